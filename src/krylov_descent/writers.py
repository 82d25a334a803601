"""Where reports go: a JSONL file, TensorBoard, Weights & Biases; the packages are imported when a writer is made.

A writer is called with each report and closed by its ``with`` block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from krylov_descent.report import StepReport

W = TypeVar("W", bound="_Writer")


class _Writer:
    def __call__(self, report: StepReport) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Write what is left and let go."""
        raise NotImplementedError

    def __enter__(self: W) -> W:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class JSONLWriter(_Writer):
    """One line of JSON for each report, in a file that any tool can follow while it grows.

    Numbers that are not finite, which JSON does not have, are null.

    Args:
        path: of the file; its folder is made. Lines are appended, so that a resumed run goes on in the same file.

    Example:
        >>> import tempfile, pathlib, torch
        >>> from krylov_descent import KSD
        >>> from krylov_descent.writers import JSONLWriter
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> log = pathlib.Path(tempfile.mkdtemp()) / "log.jsonl"
        >>> with JSONLWriter(log) as write:
        ...     write(KSD([w]).step(lambda: (w.square().mean(), w)))
        >>> log.read_text()[:29]
        '{"iteration": 0, "loss": 6.5,'
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def __call__(self, report: StepReport) -> None:
        """Append one line, at once."""
        self._file.write(json.dumps(_finite(report.as_dict()), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardWriter(_Writer):
    """Scalars under ``ksd/``, and the Ritz values as a histogram.

    Args:
        target: a directory for event files, or a ``SummaryWriter`` of one's own, which is left open.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, target: Any) -> None:
        self._own = isinstance(target, (str, Path))
        self._writer = _summary_writer(target) if self._own else target

    def __call__(self, report: StepReport) -> None:
        """Add the report at its iteration."""
        for name, value in scalars(report).items():
            self._writer.add_scalar(name, value, report.iteration)
        finite = [x for x in report.ritz_values if math.isfinite(x)]
        if finite:
            # NumPy's histogram, and not TensorBoard's own, whose bins begin at 1e-12.
            self._writer.add_histogram("ksd/ritz_values", _array(finite), report.iteration, bins="auto")

    def close(self) -> None:
        """Flush, and close the writer if it was made here."""
        self._writer.flush()
        if self._own:
            self._writer.close()


class WandbWriter(_Writer):
    """Scalars under ``ksd/`` in a run of Weights & Biases, and the Ritz values as a histogram.

    Args:
        run: a run of one's own, which is left open; None starts one.
        init: for ``wandb.init``, where a run is started: ``project=...``, ``mode="offline"``.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, run: Any = None, **init: Any) -> None:
        try:
            import wandb
        except ImportError:
            raise ImportError("WandbWriter needs wandb: pip install 'krylov-descent[wandb]'.") from None
        self._own = run is None
        self._run = wandb.init(**init) if run is None else run
        self._histogram = wandb.Histogram

    def __call__(self, report: StepReport) -> None:
        """Log the report; wandb counts steps by itself, so the iteration is a value of its own."""
        row: dict[str, Any] = {"ksd/iteration": report.iteration, **scalars(report)}
        finite = [x for x in report.ritz_values if math.isfinite(x)]
        if finite:
            row["ksd/ritz_values"] = self._histogram(finite)
        self._run.log(row)

    def close(self) -> None:
        """Finish the run if it was started here."""
        if self._own:
            self._run.finish()


def scalars(report: StepReport) -> dict[str, float]:
    """The numbers of a report that are worth a curve, by name.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> scalars(KSD([w]).step(lambda: (w.square().mean(), w)))["ksd/loss"]
        6.5
    """
    names = (
        "loss",
        "search_loss_before",
        "search_loss_after",
        "grad_norm",
        "krylov_dim",
        "inner_iterations",
        "inner_evaluations",
        "sample_gradients",
        "orthogonality_error",
    )
    values = {f"ksd/{name}": float(getattr(report, name)) for name in names}
    values["ksd/accepted"] = float(report.accepted)
    for phase, seconds in report.seconds.items():
        values[f"ksd/seconds/{phase}"] = seconds
    if report.ritz_values:
        values["ksd/ritz_max"] = report.ritz_values[-1]
    return values


def _finite(x: Any) -> Any:
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, Mapping):
        return {k: _finite(v) for k, v in x.items()}
    return [_finite(v) for v in x] if isinstance(x, list) else x


def _array(values: list[float]) -> Any:
    import numpy  # tensorboard brings it

    return numpy.asarray(values)


def _summary_writer(directory: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError("TensorBoardWriter needs tensorboard: pip install 'krylov-descent[tensorboard]'.") from None
    return SummaryWriter(str(directory))
