"""When a run came down to an error, or when it would by the power law of its second half."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from experiments.common.records import Run

_STEEPER = 0.05  # growth of p that is more than rounding and noise


@dataclasses.dataclass(frozen=True)
class Reach:
    """What it cost until an error came down to a target.

    Attributes:
        cost: when it did, or would; infinite if it no longer falls, NaN if it falls ever faster.
        extrapolated: whether that lies beyond the end of the run.
        error: the lowest of the run.
    """

    cost: float
    extrapolated: bool
    error: float


def reach(run: Run, target: float) -> Reach | None:
    """The seconds after which the lowest held-out error so far is at the target; None without any finite error."""
    return reach_along([(point.seconds, point.held_out_error) for point in run.points], target)


def reach_along(points: Sequence[tuple[float, float]], target: float) -> Reach | None:
    """The cost at which the lowest error so far is at the target, of (cost, error) in order; None if none is finite.

    Beyond the run's end: error ∝ cost^(−p), with p from where the cost was half spent to its end. Errors flatten
    sooner or later, so that such a time is a lower bound more than a forecast; but not while p still grows, as after a
    plateau: of a run whose last quarter is steeper than its last half, nothing is said.
    """
    valid = [(cost, error) for cost, error in points if math.isfinite(error)]
    if not valid:
        return None
    best = min(error for _, error in valid)
    reached = next((cost for cost, error in valid if error <= target), None)
    if reached is not None:
        return Reach(reached, False, best)
    half, quarter = _power(valid, 0.5), _power(valid, 0.75)
    if not half or target <= 0:
        return Reach(math.inf, True, best)
    if quarter > (1 + _STEEPER) * half:
        return Reach(math.nan, True, best)
    return Reach(valid[-1][0] * (best / target) ** (1 / half), True, best)


def _power(valid: Sequence[tuple[float, float]], share: float) -> float:
    """p of the lowest error so far, from where this share of the cost was spent to the end; 0 if it does not fall."""
    end, best = valid[-1][0], min(error for _, error in valid)
    since = next(cost for cost, _ in valid if cost >= share * end)
    then = min(error for cost, error in valid if cost <= since)
    return math.log(then / best) / math.log(end / since) if 0 < since < end and 0 < best < then else 0.0


def duration(seconds: float) -> str:
    """A time to two digits, in a unit fit for it.

    Example:
        >>> duration(45), duration(400), duration(9000), duration(500000)
        ('45 s', '6.7 min', '2.5 h', '5.8 days')
    """
    if seconds == math.inf:
        return "no longer falls"
    if math.isnan(seconds):
        return "falls ever faster"
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"
