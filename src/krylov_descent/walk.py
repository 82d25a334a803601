"""f along lines in parameter space: how the search over the subspace looks at the objective.

Letters: θ + d the point where a line begins, p its direction; both are held whole on every rank [P], so that a trial
costs two numbers between ranks: its value and its slope. Vectors travel once a line: its direction, and the gradient
at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from krylov_descent.data import Microbatch
from krylov_descent.objective import Derivative, Objective
from krylov_descent.progress import Progress


class Walk:
    """Moves the parameters to trial points; where it leaves them is for the caller to settle."""

    def __init__(self, objective: Objective, batches: Sequence[Microbatch]) -> None:
        self._objective, self._batches = objective, batches
        self._origin = objective.parameters.read()  # where the line begins
        self._direction: Tensor | None = None
        self._alpha = 0.0
        self._trial: Derivative | None = None
        self._evaluations = 0

    def at_origin(self) -> tuple[float, Tensor]:
        """f and this rank's part of ∇f [P_local] where the first line begins."""
        if self._evaluations:
            self._objective.parameters.write(self._origin)
        losses, g = self._objective.value_and_gradient(self._batches)
        self._count()
        return losses.mean, g

    def value(self, p: Tensor | None = None) -> float:
        """f at p from the origin, or at the origin itself, by forward passes; p is this rank's part [P_local]."""
        objective = self._objective
        if p is not None:
            objective.parameters.write(self._origin, objective.comm.all_gather(p, objective.parameters.numel), 1.0)
        value = objective.value(self._batches).mean
        self._count()
        return value

    def begin(self, p: Tensor, *, moved: bool) -> None:
        """A line along p, of which this is the rank's part [P_local], from the last trial if ``moved``."""
        if moved:
            assert self._direction is not None
            self._origin.add_(self._direction, alpha=self._alpha)
        self._direction = self._trial = None  # vectors of P numbers, before another is made
        self._direction = self._objective.comm.all_gather(p, self._objective.parameters.numel)

    def at(self, alpha: float) -> tuple[float, float]:
        """Value and slope at ``alpha`` along the line."""
        self._trial = None  # its sums are as long as θ
        assert self._direction is not None
        self._objective.parameters.write(self._origin, self._direction, alpha)
        self._alpha = alpha
        self._trial = self._objective.differentiate(self._batches, along=self._direction)
        self._count()
        return self._trial.losses.mean, self._trial.slope

    def _count(self) -> None:
        self._evaluations += 1
        self._objective.tell(Progress("search", self._evaluations, None))

    def gradient(self) -> Tensor:
        """∇f at the last trial, this rank's part [P_local]."""
        assert self._trial is not None
        trial, self._trial = self._trial, None
        return trial.gradient()
