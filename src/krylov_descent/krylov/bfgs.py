"""Dense BFGS for the search over the subspace: few, costly, perhaps noisy evaluations in 2..100 dimensions.

Unlike SciPy's, it is safe against NaN, stops at the rounding noise of the caller's dtype, is capped in evaluations,
returns the best point seen and takes the same path on every rank. The tests compare it with SciPy's.

Symbols:
    x, f, g     point [n], its value, its gradient [n]
    H           approximation of the inverse Hessian [n, n]; the identity at the start
    p, alpha    direction -H g and the step length along it; φ(alpha) = f(x + alpha p)
    s, y        the step taken and the change of the gradient over it
    slope       φ'(alpha) = gᵀp

Deviations from textbook BFGS (Nocedal & Wright 2006, algorithms 6.1, 3.5 and 3.6; "N&W"):
    1. H starts as I and is not rescaled by yᵀs/yᵀy (N&W 6.20). The caller whitens, so I is the curvature
       already; on whitened slices of autoencoders, rescaling took about twice the evaluations.
    2. The first trial of an iteration is at most 1, and less if the last decrease suggests so (N&W 3.60). This
       avoids most rejected trials far from the quadratic model; near the minimum the trial is 1.
    3. A step is accepted by the weak Wolfe conditions, or by approximate ones (T2 of Hager & Zhang 2005), which
       use slopes where differences of f are lost in rounding. Both keep yᵀs > 0.
    4. After an overshoot that grows faster than a quadratic, a power law is interpolated instead of a cubic: on
       a quartic, the cubic shortens the step to a third; the power law finds a thousandth at once.
    5. A trial whose value or gradient is not finite counts as too far, and is never returned.
    6. The tests for the end are the predicted decrease relative to |f| and the noise of f; ‖g‖ has no scale.
    7. A failed line search, or a direction of ascent, resets H to I; a second failure ends the minimisation.
    8. Evaluations are capped over the whole minimisation, and at 20 per line search once the step is bounded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from krylov_descent.report import StopReason

_C1, _C2 = 1e-4, 0.9  # sufficient decrease and curvature: N&W section 3.1, their values for quasi-Newton
_EXPANSION = 10.0  # largest ratio of successive trials: Moré & Thuente's 4, raised to leave saddles sooner
_RETREAT = 0.1  # next trial as a fraction of the way to one that was not finite
SHRINK = 1e-4  # least first trial, and least fraction of the first bracket: Rosenbrock from its start takes 1e-3
_INSIDE, _OUTSIDE = 0.05, 0.9  # bounds of later trials, as fractions of their bracket
_PROGRESS = 0.66  # a bracket that shrinks by less in two trials is bisected: Moré & Thuente 1994
_TRIALS = 20  # per search, once bracketed: N&W section 3.5 say ten, but retreats from NaN count here


class Lines(Protocol):
    """f along lines: each trial yields value and slope; the costlier gradient is asked for at accepted trials only."""

    def begin(self, x: Tensor, p: Tensor) -> None:
        """Begin a line from x along p; x is the origin or the last trial of the line before."""
        ...

    def at(self, alpha: float) -> tuple[float, float]:
        """Return φ(alpha) = f(x + alpha p) and its derivative."""
        ...

    def gradient(self) -> Tensor:
        """Return g [n] at the last trial."""
        ...


class Point(NamedTuple):
    """A finite evaluation at ``alpha`` along the direction of the search."""

    alpha: float
    f: float
    slope: float
    x: Tensor


class Phi:
    """Evaluates φ on successive lines, counts trials and keeps the best point."""

    def __init__(self, lines: Lines, x: Tensor, f: float, cap: int) -> None:
        self.lines, self.cap, self.x, self.f = lines, cap, x, f
        self._best_before = x, f
        self.calls = self.broken = self.finite = 0

    @property
    def spent(self) -> bool:
        """Whether the cap on evaluations is reached."""
        return self.calls >= self.cap

    def __call__(self, x: Tensor, alpha: float) -> Point | None:
        """Return the trial at x = start + alpha p; None if it is not finite."""
        self.calls += 1
        f, slope = self.lines.at(alpha)
        if not (math.isfinite(f) and math.isfinite(slope)):
            self.broken += 1
            return None
        self.finite += 1
        self._best_before = self.x, self.f
        if f < self.f:
            self.x, self.f = x, f
        return Point(alpha, f, slope, x)

    def gradient(self) -> Tensor | None:
        """Return the gradient at the last trial; None if it is not finite."""
        g = self.lines.gradient()
        if bool(g.isfinite().all()):
            return g
        self.broken += 1
        self.x, self.f = self._best_before
        return None


def _minimiser(a: Point, b: Point, noise: float) -> float:
    """Return the minimiser of a model through both points, on a's side if b overshot; NaN if there is none."""
    width = b.alpha - a.alpha
    bend = (b.slope - a.slope) * width
    excess = b.f - a.f - a.slope * width
    if b.f > a.f and a.slope * width < 0 and bend > 2 * excess > 0:
        # f(a) + slope t + q t^k with k = bend / excess > 2; at k = 2 it would be the secant.
        return a.alpha + width * math.pow(-a.slope * width / bend, 1 / (bend / excess - 1))
    if abs(b.f - a.f) <= noise:  # a cubic would fit the rounding of f; the secant uses slopes only
        return a.alpha - a.slope * width * width / bend if bend != 0 else math.nan
    d1 = a.slope + b.slope - 3 * (b.f - a.f) / width  # the cubic of N&W 3.59
    square = d1 * d1 - a.slope * b.slope
    if not square >= 0:
        return math.nan
    d2 = math.copysign(math.sqrt(square), width)
    bottom = b.slope - a.slope + 2 * d2
    return b.alpha - width * (b.slope + d2 - d1) / bottom if bottom != 0 else math.nan


def line_search(phi: Phi, start: Point, p: Tensor, alpha: float, noise: float) -> tuple[Point, Tensor] | None:
    """Return an accepted point along p, or else one measurably below the start, with its gradient; or None.

    ``low`` is the better end of the bracket, with its slope towards the minimum; ``high`` is the other end;
    ``wall`` is the nearest step beyond ``low`` that was not finite; ``noise`` is absolute here.
    """
    low, high, wall, trials = start, None, math.inf, 0
    widths = [math.inf, math.inf]
    phi.lines.begin(start.x, p)
    last = math.nan  # the last trial, whose gradient is available
    while not phi.spent and (trials < _TRIALS or (high is None and wall == math.inf)):
        trials += 1
        x, before = start.x + alpha * p, low
        if torch.equal(x, low.x) or alpha == math.inf:
            break
        point, last = phi(x, alpha), alpha
        if point is not None:
            decreased = point.f <= start.f + _C1 * alpha * start.slope
            level = point.f <= start.f + noise and point.slope <= (2 * _C1 - 1) * start.slope
            if (decreased or level) and point.slope >= _C2 * start.slope:
                g = phi.gradient()
                if g is not None:
                    return point, g
                point = None
        if point is None:
            high, wall = None, alpha
        else:
            if not (decreased or level) or point.f > low.f + noise:
                high = point
            else:
                low, high = point, low if point.slope * (alpha - low.alpha) >= 0 else high
        if high is None and wall == math.inf:  # f still falls steeply: extrapolate, fast if the slope steepens
            model, far = _minimiser(before, low, noise), _EXPANSION * low.alpha
            alpha = min(max(model, 2 * low.alpha), far) if model > low.alpha else far
            continue
        width = (wall if high is None else high.alpha) - low.alpha
        if abs(width) * -start.slope <= 0.1 * noise or abs(width) <= 1e-12 * max(low.alpha, alpha):
            break  # the bracket is below the resolution of f or x
        if high is None:
            alpha = low.alpha + (_RETREAT if point is None else 0.5) * width
            continue
        t = (_minimiser(low, high, noise) - low.alpha) / width
        if math.isnan(t) or abs(width) > _PROGRESS * widths[-2]:
            # The ends may be decades apart, so the bracket is bisected at their geometric mean if it exists.
            t = (math.sqrt(low.alpha * high.alpha) - low.alpha) / width if low.alpha * high.alpha > 0 else 0.5
        widths.append(abs(width))
        alpha = low.alpha + min(max(t, SHRINK if low is start else _INSIDE), _OUTSIDE) * width
    if not low.f < start.f - noise:
        return None
    if low.alpha != last and (phi.spent or phi(low.x, low.alpha) is None):
        return None  # phi remembers the best point
    g = phi.gradient()
    return None if g is None else (low, g)


_PATIENCE = 4  # iterations without a decrease above the noise; with 2, slow problems end 50 noise levels too high


@dataclasses.dataclass(frozen=True)
class BFGSResult:
    """The outcome of `bfgs`: the best point seen, its cost and the reason for the end."""

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
    """Minimise ``fun`` from ``x0``.

    Args:
        fun: x -> (f, g), with g float64 [n]. It is never called more than ``max_evaluations`` times.
        x0: float64 [n], in coordinates where the Hessian is about the identity: the first trial is x0 - g.
        max_iterations: Cap on accepted steps.
        max_evaluations: Cap on calls of ``fun``.
        tolerance: CONVERGED when the quadratic model predicts a decrease ½ gᵀHg of at most tolerance·|f|.
        noise: Relative rounding error of f, a few eps of the dtype it is computed in. NOISE when even the least
            curvature met so far predicts a decrease below noise·|f|, or when several iterations yield less.
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
    """Minimise a function given along lines, as ``bfgs`` does; ``start`` holds f and g at ``x0``."""
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
    modelled = True  # the last step met positive curvature, so that H is trusted
    flattest = 0.0  # the greatest sᵀs / sᵀy met: the inverse of the least curvature
    reference, idle = here.f, 0  # the value at the last measurable decrease, and the iterations since
    decrease, iterations = math.inf, 0  # of the last step, and accepted steps so far
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
