"""When a run came down to a figure of the paper, or when it would by the power law of its second half."""

from __future__ import annotations

import dataclasses
import math

from experiments.records import Run


@dataclasses.dataclass(frozen=True)
class Reach:
    """Seconds until the held-out error came down to a target.

    Attributes:
        seconds: when it did, or would; infinite if it no longer falls.
        extrapolated: whether that lies beyond the end of the run.
        error: the lowest held-out error of the run.
    """

    seconds: float
    extrapolated: bool
    error: float


def reach(run: Run, target: float) -> Reach | None:
    """When the lowest held-out error so far is at the target; None without any finite error.

    Beyond the run's end: error ∝ seconds^(−p), with p from where the budget was half spent to its end. Errors flatten
    sooner or later, so that such a time is a lower bound more than a forecast.
    """
    valid = [(point.seconds, point.held_out_error) for point in run.points if math.isfinite(point.held_out_error)]
    if not valid:
        return None
    best, end = min(error for _, error in valid), valid[-1][0]
    reached = next((time for time, error in valid if error <= target), None)
    if reached is not None:
        return Reach(reached, False, best)
    half = next(time for time, _ in valid if time >= end / 2)
    then = min(error for time, error in valid if time <= half)
    if not 0 < half < end or not best < then or target <= 0:
        return Reach(math.inf, True, best)
    power = math.log(then / best) / math.log(end / half)
    return Reach(end * (best / target) ** (1 / power), True, best)


def duration(seconds: float) -> str:
    """A time to two digits, in a unit fit for it.

    Example:
        >>> duration(45), duration(400), duration(9000), duration(500000)
        ('45 s', '6.7 min', '2.5 h', '5.8 days')
    """
    if seconds == math.inf:
        return "no longer falls"
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"
