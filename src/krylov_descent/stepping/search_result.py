"""The point that a search found, taken if it holds on C.

Letters: d [P_local] the step, f the loss on C.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from krylov_descent.objective.objective import relative_noise
from krylov_descent.report import StopReason
from krylov_descent.samples.interface import Stateless
from krylov_descent.stepping.gradient_pass import GradientPass
from krylov_descent.vectors.products import length

_HALVINGS = 10
LOST_IN_ROUNDING = (
    "The step that the search found is lost in rounding to the parameters' dtype and was not taken; if every step ends "
    "so, training is finished or needs float64."
)


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best point that a search found.

    Attributes:
        d: the step [P_local], or None if no better point than the start was found.
        before: f at the start of the search.
        after: f at its end.
        iterations: the number of iterations of the search.
        evaluations: the number of evaluations of f, with or without its gradient.
        stop_reason: why the search ended.
        coefficients: the coefficients of d in the rows of V.
        exact: whether ``after`` was computed at θ + d itself, and not at the end of a chain of lines.
        agreement: the ratio of actual to predicted decrease of f at the quadratic model's minimum; NaN if not computed.
        state: the new state of the search strategy.
    """

    d: Tensor | None
    before: float
    after: float
    iterations: int
    evaluations: int
    stop_reason: StopReason
    coefficients: tuple[float, ...] = ()
    exact: bool = False
    agreement: float = math.nan
    state: Any = Stateless()  # noqa: RUF009 — frozen


def take(at: GradientPass, found: SearchResult) -> tuple[Tensor | None, SearchResult]:
    """Algorithm 3, line 13: θ ← θ + d in the parameters' dtype, unless f is higher there than at θ.

    If an earlier step ended where the gradient is not finite, d is halved until it is finite at θ + d.
    """
    d, found = _rounded(at, found)
    return _differentiable(at, d, found) if at.wary and d is not None else (d, found)


def _rounded(at: GradientPass, found: SearchResult) -> tuple[Tensor | None, SearchResult]:
    """Move by d in the parameters' dtype: another point than the search's sequence of lines, so f is evaluated anew."""
    objective, here = at.objective, at.theta()
    at.theta = lambda: here
    d = None if found.d is None else objective.parameters.rounded(found.d)
    objective.move_to(here if d is None else here + d)
    if d is None or (found.exact and d is found.d):  # f was computed at this very point
        return d, found
    after = objective.value(at.sets.c).mean
    rounding = relative_noise(objective.parameters.params[0].dtype) * abs(found.before)
    if after <= found.before + rounding:
        return d, replace(found, after=after)
    objective.move_to(here)
    at.notes.append(LOST_IN_ROUNDING)
    return None, replace(found, after=found.before, coefficients=(), stop_reason=StopReason.NOISE)


def _differentiable(at: GradientPass, d: Tensor, found: SearchResult) -> tuple[Tensor | None, SearchResult]:
    """Halve d until f and its gradient on A are finite, as long as f on C is lower than at θ."""
    objective, here = at.objective, at.theta()
    for _ in range(_HALVINGS):
        losses, g = objective.value_and_gradient(at.sets.a)
        if math.isfinite(losses.mean) and math.isfinite(length(g, objective.comm)):
            return d, found
        d = objective.parameters.rounded(d / 2)
        objective.move_to(here + d)
        found = replace(
            found, after=objective.value(at.sets.c).mean, coefficients=tuple(a / 2 for a in found.coefficients)
        )
        if not found.after < found.before:
            break
    objective.move_to(here)
    return None, replace(found, after=found.before, coefficients=(), stop_reason=StopReason.NON_FINITE)


def at_rest(at: GradientPass, state: Any) -> SearchResult:
    """Return the result of a search at a point where the gradient is zero."""
    return SearchResult(None, at.losses.mean, at.losses.mean, 0, 0, StopReason.ZERO_GRADIENT, state=state)
