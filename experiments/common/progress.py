"""What is shown of a run while it goes: a progress bar, and scalars for TensorBoard if wanted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.common.budget import Budget
from experiments.common.loop import Watch

_SCALARS = ("loss", "error", "held_out_loss", "held_out_error", "gradients")


def follow(
    run: Callable[[Watch], Path],
    title: str,
    budget: Budget,
    shown: Sequence[str],
    *,
    interrupted: str,
    quiet: bool = False,
    tensorboard: Path | None = None,
) -> None:
    """Run with a bar that shows these numbers of a point, then print the file.

    Raises:
        SystemExit: it was interrupted, and what that means.
    """
    try:
        with _watching(title, budget, shown, quiet=quiet, tensorboard=tensorboard) as watch:
            path = run(watch)
    except KeyboardInterrupt:
        raise SystemExit(f"\nInterrupted; {interrupted}.") from None
    if not quiet:
        sys.stdout.write(f"{path}\n")


@contextmanager
def _watching(
    title: str, budget: Budget, shown: Sequence[str], *, quiet: bool, tensorboard: Path | None
) -> Iterator[Watch]:
    """What the loop calls after every advance, and at every point."""
    writer: Any = _writer(tensorboard) if tensorboard else None
    unit = "s" if budget.unit == "seconds" else "gradients"
    layout = "{l_bar}{bar}| {n:.0f}/{total:g} {unit} {postfix}"
    with tqdm(total=budget.amount, desc=title, unit=unit, bar_format=layout, disable=quiet) as bar:

        def watch(point: dict[str, Any] | None, share: float) -> None:
            bar.update(share * budget.amount - bar.n)
            if point is None:
                return
            numbers = (f"{name.replace('_', ' ')} {point[name]:.5g}" for name in shown)
            bar.set_postfix_str(", ".join(numbers), refresh=False)
            bar.refresh()
            for name in _SCALARS if writer is not None else ():
                writer.add_scalar(name, point[name], point["step"])

        try:
            yield watch
        finally:
            if writer is not None:
                writer.close()


def _writer(directory: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError("--tensorboard needs the package tensorboard: pip install tensorboard.") from None
    return SummaryWriter(str(directory))
