"""Dense BFGS for the search over the subspace: few, costly, perhaps noisy evaluations in 2..100 dimensions.

Why not SciPy's: this one is safe against NaN, stops at the rounding noise of the caller's dtype, is capped in
evaluations, returns the best point seen, and takes the same path on every rank. SciPy's BFGS is the oracle of
the tests and no dependency.

Symbols:
    x, f, g     point [n], its value, its gradient [n]
    H           approximation of the inverse Hessian [n, n]; the identity at the start
    p, alpha    direction -H g and the step length along it; φ(alpha) = f(x + alpha p)
    s, y        the step taken and the change of the gradient over it
    slope       φ'(alpha) = gᵀp

Deviations from textbook BFGS (Nocedal & Wright 2006, algorithms 6.1, 3.5 and 3.6; "N&W"):
    1. H starts as I and is not rescaled by yᵀs/yᵀy (N&W 6.20). The caller whitens, so I is the curvature
       already; on whitened slices of autoencoders, rescaling took about twice the evaluations.
    2. An iteration's first trial is 1 only where the last decrease makes that believable (N&W 3.60). Far from
       the quadratic model this spares most rejected trials; near the minimum it is 1.
    3. A step is accepted by the weak Wolfe conditions, or by approximate ones (T2 of Hager & Zhang 2005),
       which ask for slopes where differences of f drown in rounding. Both keep yᵀs > 0.
    4. After an overshoot that grows faster than a quadratic, a power law is interpolated and not a cubic: of
       a quartic, the cubic keeps a third of the step; the power law finds a thousandth at once.
    5. A trial whose value or gradient is not finite is too far: the search goes back, and never returns it.
    6. It ends by predicted decrease relative to |f|, and by the noise of f; no norm of g, which has no scale.
    7. A failed search, or a direction that is not downhill, sets H back to I; a second failure ends the run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from krylov_descent.report import StopReason
from krylov_descent.wolfe import SHRINK, Lines, Phi, Point, line_search

_PATIENCE = 4  # iterations without a decrease above the noise: at 2, slow problems end 50 noise levels high


@dataclasses.dataclass(frozen=True)
class BFGSResult:
    """The outcome of `bfgs`: the best point seen, what it cost and why the search ended."""

    x: Tensor
    f: float
    iterations: int
    evaluations: int
    stop_reason: StopReason


class _Along:
    """Lines of a function x → (f, g)."""

    def __init__(self, fun: Callable[[Tensor], tuple[float, Tensor]]) -> None:
        self._fun = fun

    def begin(self, x: Tensor, p: Tensor) -> None:
        self._x, self._p = x, p

    def at(self, alpha: float) -> tuple[float, float]:
        f, g = self._fun(self._x + alpha * self._p)
        self._g = g.detach().to(torch.float64, copy=True)  # a copy: the caller may reuse its buffer
        return float(f), float(self._g @ self._p)

    def gradient(self) -> Tensor:
        return self._g


def bfgs(
    fun: Callable[[Tensor], tuple[float, Tensor]],
    x0: Tensor,
    *,
    max_iterations: int = 30,  # Vinyals & Povey 2011, section 5.2
    max_evaluations: int = 60,  # two per iteration; the problems of the tests take 1.3
    tolerance: float,
    noise: float,
    start: tuple[float, Tensor] | None = None,
) -> BFGSResult:
    """Minimise ``fun`` from ``x0``; the letters are those of the module.

    Args:
        fun: x -> (f, g), with g float64 [n]. It is never called more than ``max_evaluations`` times.
        x0: float64 [n], in coordinates where the Hessian is about the identity: the first trial is x0 - g.
        max_iterations: Cap on accepted steps.
        max_evaluations: Cap on calls of ``fun``.
        tolerance: CONVERGED when the quadratic model predicts a decrease ½ gᵀHg of at most tolerance·|f|.
        noise: Relative rounding error of f, a few eps of the dtype it is computed in. NOISE when not even the
            flattest curvature met so far could yield noise·|f|, or when iterations go by without yielding it.
        start: ``fun(x0)``, if it is known already.

    Returns:
        The lowest finite point seen, never above f(x0). NON_FINITE with ``x0`` if no other point was finite.

    Example:
        >>> import torch
        >>> target = torch.tensor([1.0, -2.0], dtype=torch.float64)
        >>> bowl = lambda x: (1.0 + 0.5 * float((x - target).square().sum()), x - target)
        >>> result = bfgs(bowl, torch.zeros(2, dtype=torch.float64), tolerance=1e-9, noise=1e-15)
        >>> result.x.tolist(), result.f, result.evaluations, result.stop_reason.name
        ([1.0, -2.0], 1.0, 2, 'CONVERGED')
    """
    if start is None and max_evaluations < 1:
        raise ValueError("max_evaluations must be at least 1 where start is not given")
    first = int(start is None)
    result = bfgs_on_lines(
        _Along(fun),
        x0,
        fun(x0) if start is None else start,
        max_iterations=max_iterations,
        max_evaluations=max_evaluations - first,
        tolerance=tolerance,
        noise=noise,
    )
    return dataclasses.replace(result, evaluations=result.evaluations + first)


def bfgs_on_lines(
    lines: Lines,
    x0: Tensor,
    start: tuple[float, Tensor],
    *,
    max_iterations: int,
    max_evaluations: int,
    tolerance: float,
    noise: float,
) -> BFGSResult:
    """As ``bfgs``, of a function that is known along lines, and at ``x0`` by ``start``."""
    x0 = x0.detach().to(torch.float64, copy=True)
    g = start[1].detach().to(torch.float64, copy=True)
    identity, phi = (
        torch.eye(x0.numel(), dtype=torch.float64, device=x0.device),
        Phi(lines, x0, float(start[0]), max_evaluations),
    )
    if not (math.isfinite(start[0]) and bool(g.isfinite().all())):
        return BFGSResult(x0, float(start[0]), 0, 0, StopReason.NON_FINITE)
    here = Point(0.0, float(start[0]), 0.0, x0)
    H, fresh = identity, True  # fresh: H is I
    modelled = True  # the last step met positive curvature, so that H says something of what lies ahead
    flattest = 0.0  # the greatest sᵀs / sᵀy met: the inverse of the least curvature
    reference, idle = here.f, 0  # the value at the last measurable decrease, and the iterations since
    decrease, iterations = math.inf, 0  # what the last step gained, and the steps so far
    while True:
        p = -(H @ g)
        slope = float(g @ p)
        blur = noise * abs(here.f)
        possible = 0.5 * max(-slope, float(g @ g) * flattest)
        if not bool(g.any()) or (modelled and 0 <= -0.5 * slope <= tolerance * abs(here.f)):
            reason = StopReason.CONVERGED
        elif (modelled and possible <= blur) or idle >= _PATIENCE or (fresh and not slope < 0):
            reason = StopReason.NOISE
        elif iterations >= max_iterations:
            reason = StopReason.MAX_ITERATIONS
        elif phi.spent:
            reason = StopReason.MAX_EVALUATIONS
        elif not slope < 0:
            H, fresh = identity, True
            continue
        else:
            first = min(1.0, max(SHRINK, 1.01 * 2 * max(decrease, blur) / -slope))  # N&W 3.60
            found = line_search(phi, here._replace(alpha=0.0, slope=slope), p, first, blur)
            if found is not None:
                point, g_new = found
                iterations += 1
                decrease = here.f - point.f
                reference, idle = (point.f, 0) if point.f < reference - blur else (reference, idle + 1)
                s, y = point.x - here.x, g_new - g
                sy, ss = float(s @ y), float(s @ s)
                modelled = sy > math.sqrt(noise * ss * float(y @ y))  # else rounding: Dennis & Schnabel A9.4.1
                if modelled:
                    flattest = max(flattest, ss / sy)
                    Hy, fresh = H @ y, False
                    cross = torch.outer(s, Hy)  # N&W 6.17, multiplied out
                    H = H - (cross + cross.T) / sy + torch.outer(s, s) * ((1 + float(y @ Hy) / sy) / sy)
                here, g = point, g_new
                continue
            if not (fresh or phi.spent):
                H, fresh, idle = identity, True, idle + 1
                continue
            reason = StopReason.MAX_EVALUATIONS if phi.spent else StopReason.NOISE
        if phi.broken and phi.finite == 0:
            reason = StopReason.NON_FINITE
        return BFGSResult(phi.x, phi.f, iterations, phi.calls, reason)
