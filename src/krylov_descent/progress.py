"""How far a step is, told while it runs: the maths counts, whoever listens shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar

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
