"""Progress inside a step: the maths counts, a listener shows; ``step_bar`` does so with tqdm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from krylov_descent.report import StepReport

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """What a step has just finished.

    Attributes:
        phase: "gradient", the pass over A, in micro-batches; "basis", in curvature products; "search", in
            evaluations on C.
        done: how many of them.
        total: of how many, where that is known beforehand.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> optimizer = KSD([w])
        >>> seen = []
        >>> optimizer.on_progress = seen.append
        >>> report = optimizer.step(lambda: (w.square().mean(), w))
        >>> seen[0]
        Progress(phase='gradient', done=1, total=1)
    """

    phase: Literal["gradient", "basis", "search"]
    done: int
    total: int | None


Tell: TypeAlias = Callable[[Progress], None]


def nobody(progress: Progress) -> None:
    """Listens to nothing."""


class Counted(Generic[T]):
    """Micro-batches that tell when the pass goes on to the next of them."""

    def __init__(self, batches: Iterable[T], tell: Tell) -> None:
        self._batches, self._tell = batches, tell

    def __iter__(self) -> Iterator[T]:
        total = len(self._batches) if isinstance(self._batches, Sized) else None
        for done, batch in enumerate(self._batches, start=1):
            yield batch
            self._tell(Progress("gradient", done, total))


_WORDS = {"gradient": "pass over A", "basis": "basis vector", "search": "search evaluation"}


class Listened(Protocol):
    """What tells how far it is."""

    on_progress: Tell | None


@contextmanager
def step_bar(
    optimizer: Listened, max_steps: float = math.inf, *, shown: bool = True, mininterval: float = 0.1
) -> Iterator[Callable[[StepReport], None]]:
    """Show a bar of steps with the phase within the step; call what it gives with each report.

    ``optimizer.run(..., progress=True)`` does this by itself; for a loop of one's own:

    Example:
        >>> import torch
        >>> from krylov_descent import KSD

        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> optimizer = KSD([w])
        >>> with step_bar(optimizer, 2) as show:
        ...     for _ in range(2):
        ...         show(optimizer.step(lambda: (w.square().mean(), w)))
    """
    if not shown:
        yield lambda report: None
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise ValueError("A progress bar needs tqdm: pip install 'krylov-descent[cli]', or tqdm itself.") from None
    before = optimizer.on_progress
    with tqdm(
        total=None if math.isinf(max_steps) else int(max_steps),
        unit="step",
        dynamic_ncols=True,
        mininterval=mininterval,
    ) as bar:
        latest = ""

        def tell(progress: Progress) -> None:
            if before is not None:
                before(progress)
            _postfix(bar, f"{latest}{_WORDS[progress.phase]} {_count(progress)}")

        def show(report: StepReport) -> None:
            nonlocal latest
            latest = f"loss {report.loss:.5g}, "
            bar.update()
            _postfix(bar, latest[:-2])

        optimizer.on_progress = tell
        try:
            yield show
        finally:
            optimizer.on_progress = before


def _postfix(bar: Any, text: str) -> None:
    bar.set_postfix_str(text, refresh=False)
    bar.update(0)  # redraws at tqdm's own pace


def _count(progress: Progress) -> str:
    return f"{progress.done}" if progress.total is None else f"{progress.done} of {progress.total}"
