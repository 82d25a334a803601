"""Preconditioners: the protocols of what may stand for D in Algorithm 3."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from krylov_descent.distributed import Comm
from krylov_descent.objective.objective import Objective, Statistics
from krylov_descent.samples.subsets import Microbatch

Precondition = Callable[[Tensor], Tensor]
"""w [P_local] → D⁻¹w [P_local]."""


class PreconditionerStatistics(Statistics, Protocol):
    """Statistics that turn into D⁻¹ after the pass."""

    def solver(self, comm: Comm) -> Precondition | None:
        """D⁻¹, up to a factor, from what was gathered, or None where the closure gave nothing to gather."""
        ...


class Preconditioner(Protocol):
    """A way to precondition: starts the gathering of statistics on each pass over A."""

    def start(self, objective: Objective, *key: int) -> PreconditionerStatistics:
        """Begin a pass; ``key`` seeds whatever is random in it."""
        ...


@runtime_checkable
class RememberingPreconditioner(Protocol):
    """A way to precondition by statistics of B, or of a part of it, added to those of earlier steps.

    What it remembers under one name must be the same on all ranks that have it: a checkpoint stores it once, as a
    contiguous tensor, and gives it to all. One with a ``note``, a text, has it in the report of the step.
    """

    def refresh(
        self,
        objective: Objective,
        batches: Sequence[Microbatch],
        factors: Mapping[str, Tensor] | None,
        key: tuple[int, ...],
        noise: float = 1.0,
    ) -> tuple[Precondition | None, Mapping[str, Tensor]]:
        """D⁻¹, or None where the closure gave nothing to gather, and what the next step is to give back. A collective.

        Args:
            objective: f at the current point.
            batches: this rank's micro-batches of that part.
            factors: what the last step got; never written to, as a step may fail.
            key: seeds whatever is random.
            noise: of the gradient on A, relative to that of one of which one half is signal.
        """
        ...
