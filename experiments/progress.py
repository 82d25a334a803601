"""What is shown of a run while it goes: a progress bar, and scalars for TensorBoard if wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.budget import Budget
from experiments.loop import Watch

_SHOWN = ("loss", "error", "held_out_loss", "held_out_error")


@contextmanager
def watching(title: str, budget: Budget, *, quiet: bool, tensorboard: Path | None) -> Iterator[Watch]:
    """What the loop calls after every advance, and at every point."""
    writer = _writer(tensorboard) if tensorboard else None
    unit = "s" if budget.unit == "seconds" else "gradients"
    layout = "{l_bar}{bar}| {n:.0f}/{total:g} {unit} {postfix}"
    with tqdm(total=budget.amount, desc=title, unit=unit, bar_format=layout, disable=quiet) as bar:

        def watch(point: dict[str, Any] | None, share: float) -> None:
            bar.update(share * budget.amount - bar.n)
            if point is None:
                return
            bar.set_postfix_str(
                f"step {point['step']}, loss {point['loss']:.5g}, error {point['error']:.4g}, "
                f"held-out {point['held_out_error']:.4g}",
                refresh=False,
            )
            bar.refresh()
            if writer is not None:
                for name in _SHOWN:
                    writer.add_scalar(name, point[name], point["step"])
                writer.add_scalar("gradients", point["gradients"], point["step"])

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
