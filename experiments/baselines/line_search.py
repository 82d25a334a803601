"""A line search for the strong Wolfe conditions (Nocedal & Wright 2006, algorithms 3.5 and 3.6; "N&W").

The search of KSD (krylov_descent/krylov/bfgs.py) takes weak conditions, which suffice for BFGS;
conjugate directions need a nearly exact search.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

_C1, _C2 = 1e-4, 0.1  # N&W's for nonlinear conjugate gradients
_EXPANSION = 10.0
_INSIDE = 0.1  # a trial keeps this share of the bracket from its ends


@dataclass(frozen=True, eq=False)
class Trial:
    """f and its slope at ``alpha`` along the direction, with the point and the gradient [P] there."""

    alpha: float
    f: float
    slope: float
    x: Tensor
    g: Tensor

    @property
    def finite(self) -> bool:
        """Whether f and its slope are numbers."""
        return math.isfinite(self.f) and math.isfinite(self.slope)


# Deviations from N&W:
# 1. A trial that is not finite is too far: the search goes back.
# 2. A decrease below the rounding of f cannot be asked for: there no rise will do, if the slope is small enough.
# 3. When trials run out, the lowest one is returned if it is below the start.
def strong_wolfe(
    trial: Callable[[float], Trial], start: Trial, alpha: float, noise: float, max_trials: int = 20
) -> tuple[Trial | None, bool]:
    """A point that satisfies the strong Wolfe conditions with c₁ = 1e-4 and c₂ = 0.1, or a lower one.

    Args:
        trial: alpha → f there.
        start: f at alpha = 0, of negative slope.
        alpha: the first trial.
        noise: of f, absolute.
        max_trials: the cap.

    Returns:
        The point, None if none was lower; and whether the conditions hold there.

    Example:
        >>> def bowl(alpha):
        ...     return Trial(alpha, (alpha - 3) ** 2, 2 * (alpha - 3), torch.empty(0), torch.empty(0))
        >>> found, exact = strong_wolfe(bowl, bowl(0.0), 1.0, 0.0)
        >>> found.alpha, exact
        (3.0, True)
    """
    low, high = start, None
    for _ in range(max_trials):
        here, before = trial(alpha), low
        decreased = here.f <= start.f + _C1 * alpha * start.slope
        level = here.f <= start.f and -_C1 * alpha * start.slope <= noise
        if not here.finite or not (decreased or level) or here.f > low.f:
            high = here
        elif abs(here.slope) <= -_C2 * start.slope:
            return here, True
        else:
            high = low if here.slope * (alpha - low.alpha) >= 0 else high
            low = here
        if high is None:  # still falling
            guess = _minimiser(before, low)
            far = _EXPANSION * low.alpha
            alpha = min(max(guess, (1 + _INSIDE) * low.alpha), far) if guess > low.alpha else far
            continue
        width = high.alpha - low.alpha
        if abs(width) <= 1e-14 * max(low.alpha, high.alpha):
            break
        t = (_minimiser(low, high) - low.alpha) / width if high.finite else math.nan
        if math.isnan(t):  # how far is too far is not known
            t = _INSIDE if low is start else 0.5
        alpha = low.alpha + width * min(max(t, _INSIDE), 1 - _INSIDE)
    return (low, False) if low.f < start.f else (None, False)


def _minimiser(a: Trial, b: Trial) -> float:
    """Of the cubic through both (N&W 3.59); NaN if it has none."""
    width = b.alpha - a.alpha
    d1 = a.slope + b.slope - 3 * (b.f - a.f) / width
    square = d1 * d1 - a.slope * b.slope
    if not square >= 0:
        return math.nan
    d2 = math.copysign(math.sqrt(square), width)
    bottom = b.slope - a.slope + 2 * d2
    return b.alpha - width * (b.slope + d2 - d1) / bottom if bottom else math.nan
