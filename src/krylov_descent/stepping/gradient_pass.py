"""The pass over A: f, its gradient and a preconditioner's statistics at the point where a step begins.

Letters: θ [P], f and g [P] its gradient on A. Vectors are this rank's parts [P_local].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from krylov_descent.distributed import run_on_all
from krylov_descent.objective.objective import BatchLosses, Objective, PassAgain, Statistics
from krylov_descent.samples.interface import Microbatch, StepKey, StepSets
from krylov_descent.vectors.products import dot

S = TypeVar("S", bound=Statistics | None)


@dataclass(eq=False)
class GradientPass:
    """The point where a step begins, with the results of the pass over A.

    Attributes:
        objective: f and its derivatives.
        sets: A, B and C.
        key: the key of the step's random draws.
        theta: returns θ [P_local].
        losses: f on A.
        g: ∇f on A [P_local]; None once a builder has taken it.
        grad_norm: ‖g‖.
        gathered: the preconditioner's statistics on A, or None.
        last_step: the previous step [P_local], or None if there was none or it was rolled back.
        led_by: the previous step, if it ended at θ.
        accepted: whether the previous step was kept.
        samples: the state of the sample policy.
        wary: whether the step must end where the gradient is finite.
        notes: notes for the step's report.
        details: further numbers for the step's report.
        keeps_gradient: whether g is still needed after the subspace is built.
    """

    objective: Objective
    sets: StepSets
    key: StepKey
    theta: Callable[[], Tensor]
    losses: BatchLosses
    g: Tensor | None
    grad_norm: float
    gathered: Any
    last_step: Tensor | None
    led_by: Tensor | None
    accepted: bool
    samples: Any
    wary: bool = False
    notes: list[str] = field(default_factory=list)
    details: Mapping[str, float] = field(default_factory=dict)
    keeps_gradient: bool = False

    def slope(self, d: Tensor) -> float:
        """Return gᵀd."""
        assert self.g is not None
        return dot(self.g, d, self.objective.comm)

    @property
    def b(self) -> Sequence[Microbatch]:
        """The micro-batches of B; an error in loading on one rank is raised on all."""
        return run_on_all(self.objective.comm, lambda: self.sets.b)

    @property
    def statistics(self) -> Sequence[Microbatch]:
        """The part of B from which a preconditioner takes its statistics, loaded."""
        return run_on_all(self.objective.comm, lambda: self.sets.statistics)

    @property
    def c(self) -> Sequence[Microbatch]:
        """The micro-batches of C, loaded."""
        return run_on_all(self.objective.comm, lambda: self.sets.c)

    def take_gradient(self) -> Tensor:
        """Return g for the caller to overwrite; it is a copy only if g is still needed."""
        g = self.g
        assert g is not None
        if self.keeps_gradient:
            return g.clone()
        self.g = None
        return g


def pass_with_statistics(
    objective: Objective, batches: Iterable[Microbatch], start: Callable[[], S]
) -> tuple[BatchLosses, Tensor, S]:
    """Return f, ∇f and the statistics of one pass, repeated on ``PassAgain``; ``start`` makes new statistics."""
    while True:
        statistics = start()
        try:
            losses, g = objective.value_and_gradient(batches, statistics)
        except PassAgain:
            continue
        return losses, g, statistics


def require_finite(loss: float, grad_norm: float) -> None:
    """Require a finite loss and gradient.

    Raises:
        ValueError: f or its gradient on A is not finite.
    """
    for what, value in (("loss", loss), ("gradient's norm", grad_norm)):
        if not math.isfinite(value):
            raise ValueError(
                f"The {what} on A is {value} at the current parameters, and there is no earlier point to return to. "
                "Look for NaN or inf in the data, labels out of range, logarithms or divisions by zero in the "
                "closure, or an initialisation that overflows."
            )
