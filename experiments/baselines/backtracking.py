"""What follows CG in a step of Hessian-free optimization: backtracking over its iterates, ρ, Armijo's rule, and λ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from experiments.baselines.conjugate_gradient import Iterate
from krylov_descent.objective.objective import Objective
from krylov_descent.samples.interface import Microbatch, StepSets

_BOOST, _DROP = 3 / 2, 2 / 3  # of the damping
_ARMIJO, _SHRINK, _REDUCTIONS = 1e-2, 0.8, 60


class Nearby:
    """f near θ, on A and on the curvature set; counts passes over A, and notes whether any was finite."""

    def __init__(self, objective: Objective, draw: StepSets, theta: Tensor, loss: float) -> None:
        self._objective, self._draw, self._theta, self._loss = objective, draw, theta, loss
        self.passes = 0
        self.finite = False

    def on_A(self, x: Tensor, rate: float = 1.0) -> float:
        """f(θ + rate·x) on A."""
        self.passes += 1
        value = self._at(x, rate, self._draw.a)
        self.finite = self.finite or math.isfinite(value)
        return value

    def rho(self, x: Tensor, value: float, model: float) -> float:
        """The decrease of f on B over that of the model; ``value`` is f(θ + x) on A, known if that is B."""
        if self._draw.searches_all:  # as A, C and then B are everything
            before, after = self._loss, value
        else:
            before = self._at(x, 0.0, self._draw.b)
            after = self._at(x, 1.0, self._draw.b)
        return -math.inf if after > before else (after - before) / model if model else math.nan

    def _at(self, x: Tensor, rate: float, batches: Iterable[Microbatch]) -> float:
        parameters = self._objective.parameters
        parameters.write(self._theta.add(x, alpha=rate) if rate else self._theta)
        value = self._objective.value(batches).mean
        return value if math.isfinite(value) else math.inf


def backtrack(value: Callable[[Tensor], float], iterates: Sequence[Iterate]) -> tuple[Iterate, float]:
    """From the last iterate backwards while the earlier one is no worse.

    Example:
        >>> iterates = [Iterate(i, torch.tensor([float(i)]), 0.0) for i in (5, 7, 9, 11)]
        >>> values = {5: 0.0, 7: 3.0, 9: 1.0, 11: 2.0}
        >>> backtrack(lambda x: values[int(x)], iterates)[0].iteration
        9
    """
    chosen, lowest = iterates[-1], value(iterates[-1].x)
    for earlier in reversed(iterates[:-1]):
        lower = value(earlier.x)
        if lowest < lower:
            break
        chosen, lowest = earlier, lower
    return chosen, lowest


def armijo(value: Callable[[float], float], start: float, slope: float, at_one: float) -> tuple[float, float]:
    """The first of the rates 1, 0.8, 0.64, … with f ≤ f(θ) + 1e-2·rate·gᵀx, and f there; 0 if none of 60 has.

    Example:
        >>> armijo(lambda rate: (rate - 0.5) ** 2, 0.25, -1.0, 0.25)
        (0.8, 0.09000000000000002)
    """
    rate, found = 1.0, at_one
    for reduction in range(_REDUCTIONS):
        if reduction:
            rate *= _SHRINK
            found = value(rate)
        if found <= start + _ARMIJO * rate * min(slope, 0.0):
            return rate, found
    return 0.0, start


def new_damping(damping: float, rho: float) -> float:
    """λ for the next step, by how much of the promised decrease there was.

    Example:
        >>> new_damping(6.0, 0.1), new_damping(6.0, 0.5), new_damping(6.0, 0.9), new_damping(6.0, math.nan)
        (9.0, 6.0, 4.0, 9.0)
    """
    if rho < 0.25 or math.isnan(rho):
        return damping * _BOOST
    return damping * _DROP if rho > 0.75 else damping
