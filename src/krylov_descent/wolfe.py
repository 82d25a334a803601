"""A search along a line for a point that meets the weak Wolfe conditions; deviations from the textbook are in bfgs.py.

Symbols: p direction, alpha the length along it, φ(alpha) = f(x + alpha p), slope = φ'(alpha) = gᵀp.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

_C1, _C2 = 1e-4, 0.9  # sufficient decrease and curvature: N&W section 3.1, their values for quasi-Newton
_EXPANSION = 10.0  # most that a trial exceeds the last by: Moré & Thuente's 4, raised to leave saddles sooner
_RETREAT = 0.1  # fraction of the way to a trial that was not finite: how far is too far is not known
SHRINK = 1e-4  # least first trial, and least part of the first bracket: Rosenbrock from its start takes 1e-3
_INSIDE, _OUTSIDE = 0.05, 0.9  # later trials keep this far from either end of their bracket
_PROGRESS = 0.66  # a bracket shrinks so much in two trials or is bisected: Moré & Thuente 1994
_TRIALS = 20  # per search, once it is bracketed: N&W section 3.5 say ten, but retreats from NaN count here


class Lines(Protocol):
    """f along lines: a trial costs a value and a slope; the gradient, which may cost more, is for accepted trials."""

    def begin(self, x: Tensor, p: Tensor) -> None:
        """A line from x along p; x is where the last line began, or the point of its last trial."""
        ...

    def at(self, alpha: float) -> tuple[float, float]:
        """φ(alpha) = f(x + alpha p) and its derivative."""
        ...

    def gradient(self) -> Tensor:
        """g [n] at the last trial."""
        ...


class Point(NamedTuple):
    """A finite evaluation at ``alpha`` along the direction of the search."""

    alpha: float
    f: float
    slope: float
    x: Tensor


class Phi:
    """φ along one line after the other: counts trials, keeps the best point, answers None where it is not finite."""

    def __init__(self, lines: Lines, x: Tensor, f: float, cap: int) -> None:
        self.lines, self.cap, self.x, self.f = lines, cap, x, f
        self._best_before = x, f
        self.calls = self.broken = self.finite = 0

    @property
    def spent(self) -> bool:
        """Whether the cap is met."""
        return self.calls >= self.cap

    def __call__(self, x: Tensor, alpha: float) -> Point | None:
        """The trial at x = start + alpha p."""
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
        """At the last trial, if it is finite."""
        g = self.lines.gradient()
        if bool(g.isfinite().all()):
            return g
        self.broken += 1
        self.x, self.f = self._best_before
        return None


def _minimiser(a: Point, b: Point, noise: float) -> float:
    """Where a model through both points has its minimum, of a's side if b overshot; NaN if nowhere."""
    width = b.alpha - a.alpha
    bend = (b.slope - a.slope) * width
    excess = b.f - a.f - a.slope * width
    if b.f > a.f and a.slope * width < 0 and bend > 2 * excess > 0:
        # f(a) + slope t + q t^k with k = bend / excess > 2; at k = 2 it would be the secant.
        return a.alpha + width * math.pow(-a.slope * width / bend, 1 / (bend / excess - 1))
    if abs(b.f - a.f) <= noise:  # the cubic would fit the rounding of f; the secant needs slopes only
        return a.alpha - a.slope * width * width / bend if bend != 0 else math.nan
    d1 = a.slope + b.slope - 3 * (b.f - a.f) / width  # the cubic of N&W 3.59
    square = d1 * d1 - a.slope * b.slope
    if not square >= 0:
        return math.nan
    d2 = math.copysign(math.sqrt(square), width)
    bottom = b.slope - a.slope + 2 * d2
    return b.alpha - width * (b.slope + d2 - d1) / bottom if bottom != 0 else math.nan


def line_search(phi: Phi, start: Point, p: Tensor, alpha: float, noise: float) -> tuple[Point, Tensor] | None:
    """Find an accepted point along p and its gradient, or failing that one measurably below the start, or None.

    ``low`` is the better end of the bracket, its slope falling to where the minimum is; ``high`` is the other
    end; ``wall`` the nearest step beyond ``low`` that was not finite; ``noise`` is absolute here.
    """
    low, high, wall, trials = start, None, math.inf, 0
    widths = [math.inf, math.inf]
    phi.lines.begin(start.x, p)
    last = math.nan  # the trial of which the gradient can be had
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
        if high is None and wall == math.inf:  # still falling steeply: go outward, fast if the slope steepens
            model, far = _minimiser(before, low, noise), _EXPANSION * low.alpha
            alpha = min(max(model, 2 * low.alpha), far) if model > low.alpha else far
            continue
        width = (wall if high is None else high.alpha) - low.alpha
        if abs(width) * -start.slope <= 0.1 * noise or abs(width) <= 1e-12 * max(low.alpha, alpha):
            break  # no point of this bracket can be told from its ends
        if high is None:
            alpha = low.alpha + (_RETREAT if point is None else 0.5) * width
            continue
        t = (_minimiser(low, high, noise) - low.alpha) / width
        if math.isnan(t) or abs(width) > _PROGRESS * widths[-2]:
            # The ends may be decades apart, so their middle is the geometric mean where there is one.
            t = (math.sqrt(low.alpha * high.alpha) - low.alpha) / width if low.alpha * high.alpha > 0 else 0.5
        widths.append(abs(width))
        alpha = low.alpha + min(max(t, SHRINK if low is start else _INSIDE), _OUTSIDE) * width
    if not low.f < start.f - noise:
        return None
    if low.alpha != last and (phi.spent or phi(low.x, low.alpha) is None):
        return None  # the best point is remembered
    g = phi.gradient()
    return None if g is None else (low, g)
