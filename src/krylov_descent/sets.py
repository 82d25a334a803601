"""The sample sets of one step as the algorithm sees them, and their plainest form: everything, at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from krylov_descent.data import Microbatch


class StepSets(Protocol):
    """A, B and C of one step; each may be passed over several times."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Samples in "A", "B" and "C", as far as known."""
        ...

    @property
    def a(self) -> Iterable[Microbatch]:
        """The gradient's set."""
        ...

    @property
    def a_in_parts(self) -> Iterable[Microbatch]:
        """The same samples in enough parts to measure how a loss scatters over them."""
        ...

    @property
    def b(self) -> Sequence[Microbatch]:
        """The curvature's set."""
        ...

    @property
    def statistics(self) -> Sequence[Microbatch]:
        """The part of B, or all of it, whose statistics a preconditioner remembers."""
        ...

    @property
    def c(self) -> Sequence[Microbatch]:
        """The search's set."""
        ...

    @property
    def probe(self) -> tuple[Microbatch, Microbatch, Microbatch] | None:
        """A small batch and its two halves, or None where there is no such thing."""
        ...

    @property
    def coverage(self) -> float:
        """The part of all samples that is in A."""
        ...

    @property
    def covers_all(self) -> bool:
        """Whether A is all samples, so that losses on it compare from step to step."""
        ...

    @property
    def searches_all(self) -> bool:
        """Whether C is A, so that a step cannot raise the loss on A."""
        ...

    @property
    def grows(self) -> bool:
        """Whether the sets are few samples, and more are to be had when noise demands them."""
        ...


class FullBatch:
    """A = B = C: whatever the closure evaluates, as with torch.optim.LBFGS."""

    sizes: Mapping[str, int] = {}
    b: Sequence[Microbatch] = (Microbatch(None, None),)
    a = a_in_parts = statistics = c = b
    probe = None
    coverage = 1.0
    covers_all = searches_all = True
    grows = False

    def draw(self, iteration: int, **_: object) -> FullBatch:
        """The same at every step; each rank's closure evaluates that rank's samples."""
        return self
