"""Writers of reports to a JSONL file, TensorBoard or Weights & Biases, whose packages are imported on first use.

A writer is called with each report and closed by its ``with`` block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from krylov_descent.report import StepReport

W = TypeVar("W", bound="_Writer")

_SCALARS = (
    *("loss", "search_loss_before", "search_loss_after", "grad_norm", "krylov_dim", "accepted"),
    *("inner_iterations", "inner_evaluations", "sample_gradients", "orthogonality_error"),
)


class _Writer:
    def close(self) -> None:
        """Flush and close."""
        raise NotImplementedError

    def __enter__(self: W) -> W:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class JSONLWriter(_Writer):
    """Writes one line of JSON for each report, at once; numbers that are not finite become null.

    Args:
        path: the path of the file, whose folder is created. Lines are appended, so that a resumed run continues it.

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
        """Append one line and flush."""
        self._file.write(json.dumps(_finite(report.as_dict()), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardWriter(_Writer):
    """Writes scalars under ``ksd/`` and the Ritz values as a histogram to TensorBoard.

    Args:
        target: a directory for event files, or your own ``SummaryWriter``, which is left open.

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
        if finite := _finite_ritz_values(report):
            # NumPy's histogram, and not TensorBoard's own, whose bins begin at 1e-12.
            import numpy as np  # tensorboard brings it

            self._writer.add_histogram("ksd/ritz_values", np.asarray(finite), report.iteration, bins="auto")

    def close(self) -> None:
        """Flush, and close the writer unless it was given."""
        self._writer.flush()
        if self._own:
            self._writer.close()


class WandbWriter(_Writer):
    """Writes scalars under ``ksd/`` and the Ritz values as a histogram to a run of Weights & Biases.

    Args:
        run: your own run, which is left open; None starts one.
        init: arguments of ``wandb.init`` for a new run: ``project=...``, ``mode="offline"``.

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
        """Log the report, with the iteration as a value: wandb counts steps by itself."""
        row: dict[str, Any] = {"ksd/iteration": report.iteration, **scalars(report)}
        if finite := _finite_ritz_values(report):
            row["ksd/ritz_values"] = self._histogram(finite)
        self._run.log(row)

    def close(self) -> None:
        """Finish the run if it was started here."""
        if self._own:
            self._run.finish()


def scalars(report: StepReport) -> dict[str, float]:
    """Return the numbers of a report to plot as curves, by name.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> scalars(KSD([w]).step(lambda: (w.square().mean(), w)))["ksd/loss"]
        6.5
    """
    values = {f"ksd/{name}": float(getattr(report, name)) for name in _SCALARS}
    for table in ("seconds", "details"):
        values |= {f"ksd/{table}/{name}": value for name, value in getattr(report, table).items()}
    if report.ritz_values:
        values["ksd/ritz_max"] = report.ritz_values[-1]
    return values


def _finite_ritz_values(report: StepReport) -> list[float]:
    return [x for x in report.ritz_values if math.isfinite(x)]


def _finite(x: Any) -> Any:
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    if isinstance(x, Mapping):
        return {k: _finite(v) for k, v in x.items()}
    return [_finite(v) for v in x] if isinstance(x, list) else x


def _summary_writer(directory: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ImportError("TensorBoardWriter needs tensorboard: pip install 'krylov-descent[tensorboard]'.") from None
    return SummaryWriter(str(directory))
