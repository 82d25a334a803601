"""Preconditioners: what may stand for D in Algorithm 3, and the paper's own, the diagonal of the Fisher matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from krylov_descent.data import Microbatch
from krylov_descent.distributed import Comm
from krylov_descent.fisher_diagonal import FisherDiagonal
from krylov_descent.objective import Objective, Statistics
from krylov_descent.rule_check import Verdict

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


@dataclass(frozen=True)
class Fisher:
    """The diagonal of the per-sample Fisher matrix: the paper's preconditioner.

    Args:
        floor: ε, D is floored at ε·max(D). 1e-2 was ahead of the paper's 1e-4 (section 4) on eight of nine seeds
            (docs/measurements.md); ``PAPER`` has the paper's.
        probes: sign patterns per micro-batch for parameters without an exact rule; one gives an unbiased estimate, and
            each costs two thirds of a gradient.

    Example:
        >>> from krylov_descent import KSD, Fisher
        >>> optimizer = KSD([torch.nn.Parameter(torch.ones(3))], preconditioner=Fisher(floor=1e-3))
    """

    floor: float = 1e-2
    probes: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1:
            raise ValueError(f"Fisher(floor={self.floor}): must be in (0, 1]; the paper's is 1e-4.")
        if self.probes < 1:
            raise ValueError(f"Fisher(probes={self.probes}): must be at least 1.")

    def prepare(self) -> FisherPreconditioner:
        """For one optimizer: what works by these options, and remembers which rules it found right."""
        return FisherPreconditioner(self)


class FisherPreconditioner:
    """The diagonal of the Fisher matrix, for one optimizer."""

    name = "fisher"

    def __init__(self, options: Fisher) -> None:
        self._options = options
        self._judged: tuple[object, ...] = ()
        self._verdict = Verdict()

    def start(self, objective: Objective, *key: int) -> FisherDiagonal:
        """Begin a pass over A; another closure or other parameters are judged anew."""
        judged = (objective.identity, *map(id, objective.parameters.params))
        if judged != self._judged:
            self._judged, self._verdict = judged, Verdict()
        options = self._options
        return FisherDiagonal(objective.parameters, options.floor, options.probes, key, self._verdict)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is of other parameters.
        return {"_options": self._options, "_judged": (), "_verdict": Verdict()}
