"""Progress inside a step: events for a listener, and ``step_bar``, which shows them with tqdm."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from krylov_descent.report import StepReport

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """Tells of a unit of work that a step has just finished.

    Attributes:
        phase: "gradient", the pass over A, in micro-batches; "basis", in curvature products; "search", in
            evaluations on C.
        done: the number of finished units in this phase.
        total: the number of all units, if known beforehand.

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
    """Ignore progress."""


class Counted(Generic[T]):
    """Micro-batches that report progress as they are iterated over."""

    def __init__(self, batches: Iterable[T], tell: Tell) -> None:
        self._batches, self._tell = batches, tell

    def __iter__(self) -> Iterator[T]:
        total = len(self._batches) if isinstance(self._batches, Sized) else None
        for done, batch in enumerate(self._batches, start=1):
            yield batch
            self._tell(Progress("gradient", done, total))


_WORDS = {"gradient": "pass over A", "basis": "basis vector", "search": "search evaluation"}


@contextmanager
def step_bar(
    optimizer: Any,
    max_steps: float = math.inf,
    seconds: float = math.inf,
    *,
    shown: bool = True,
    mininterval: float = 0.1,
) -> Iterator[Callable[[StepReport], None]]:
    """Show a progress bar of steps and phases; call the function that it yields with each report.

    It has the remaining time of ``max_steps`` or, without them, the elapsed part of ``seconds``.
    ``optimizer.run(..., progress=True)`` does this by itself.

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
    total, look = None if math.isinf(max_steps) else int(max_steps), None
    if total is None and seconds < math.inf:
        look = f"{{n_fmt}}step [{{elapsed}} of {tqdm.format_interval(seconds)}, {{rate_fmt}}{{postfix}}]"
    with tqdm(total=total, unit="step", dynamic_ncols=True, mininterval=mininterval, bar_format=look) as bar:
        loss, drawn = "", -math.inf

        def tell(progress: Progress) -> None:
            nonlocal drawn
            if before is not None:
                before(progress)
            of = "" if progress.total is None else f" of {progress.total}"
            words = f"{_WORDS[progress.phase]} {progress.done}{of}"
            bar.set_postfix_str(f"{loss}, {words}" if loss else words, refresh=False)
            if time.monotonic() - drawn >= mininterval:
                bar.refresh()  # unlike update(0), it leaves the clock of the rate alone
                drawn = time.monotonic()

        def show(report: StepReport) -> None:
            nonlocal loss
            loss = f"loss {report.loss:.5g}"
            bar.set_postfix_str(loss, refresh=False)
            bar.update()

        optimizer.on_progress = tell
        try:
            yield show
        finally:
            optimizer.on_progress = before
