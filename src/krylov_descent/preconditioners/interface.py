"""The interface of preconditioners, the matrix D of Algorithm 3.

A preconditioner is a frozen configuration. It gathers statistics along the pass over A, or on B, and solves with D.
Its state is a frozen dataclass of its own, which the optimizer saves (state.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from krylov_descent.objective.objective import Objective, Statistics
from krylov_descent.samples.interface import Stateless, StepKey
from krylov_descent.stepping.gradient_pass import GradientPass

Solve = Callable[[Tensor], Tensor]
"""w [P_local] → D⁻¹w [P_local]."""


@dataclass(frozen=True, eq=False)
class Solved:
    """The preconditioner of one step.

    Attributes:
        solve: w → D⁻¹w, up to a factor; the identity if no statistics were gathered.
        state: the preconditioner's state after the step.
        name: the preconditioner's name in the report.
        notes: remarks for the report.
    """

    solve: Solve
    state: Any
    name: str
    notes: tuple[str, ...] = ()

    def without_vectors(self) -> Solved:
        """Return a copy without D, for the report and the next step."""
        return replace(self, solve=identity)


class Preconditioner(ABC):
    """Base class of preconditioners; a subclass of your own is used by ``KSD(..., preconditioner=Mine())``."""

    name: ClassVar[str] = "custom"

    def init(self) -> Any:
        """Return the state of a new run: a frozen dataclass of numbers and tensors.

        On several ranks, what has the same name must be equal: a checkpoint stores it once. A rank may have names of
        its own; each rank then loads those of all.
        """
        return Stateless()

    def gather(self, objective: Objective, key: StepKey) -> Statistics | None:
        """Return the collector of statistics along the pass over A, or None; ``key`` seeds its random numbers."""
        return None

    @abstractmethod
    def solve(self, at: GradientPass, state: Any, noise: float) -> Solved:
        """Return D⁻¹ at the start of a step. A collective.

        Args:
            at: the objective, the sets, and in ``at.gathered`` the statistics of A.
            state: the state after the last step; never written to, as a step may fail.
            noise: ν, the noise of the gradient on A: 1 if A is a small part of all samples, 0 if it is all.
        """

    def bytes_in_step(self, objective: Objective) -> int:
        """Return an upper bound of the bytes it takes from ``memory_budget``."""
        return 0

    def bytes_held(self, objective: Objective) -> int:
        """Return the bytes of its states before and after the step, which stay while the step is searched."""
        return 0


@dataclass(frozen=True)
class NoPreconditioner(Preconditioner):
    """D = 1."""

    name: ClassVar[str] = "none"

    def solve(self, at: GradientPass, state: Any, noise: float) -> Solved:
        """Return the identity."""
        return Solved(identity, state, self.name)


def nothing_gathered(state: Any, notes: tuple[str, ...] = ()) -> Solved:
    """Return D = 1, for a closure that gave nothing to gather."""
    note = (
        "No preconditioner: the closure returned only the loss, or the statistics of its outputs are not finite or "
        "without curvature."
    )
    return Solved(identity, state, "none", (*notes, note))


def identity(w: Tensor) -> Tensor:
    """Return w."""
    return w
