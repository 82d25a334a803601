"""What several seeds say together: one curve, median and range over time."""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
from collections.abc import Sequence

from experiments.common.records import Axis, Quantity, Run

_GRID = 100


@dataclasses.dataclass(frozen=True)
class Series:
    """Times from the first step on, and the median, lowest and highest value there; infinite where runs diverged."""

    times: tuple[float, ...]
    middle: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def series(runs: Sequence[Run], axis: Axis, quantity: Quantity, *, exact: bool = False) -> Series | None:
    """The curve of one seed at its own points, of several at times evenly spaced on a logarithmic axis.

    Time zero has no place on such an axis and is left out. Between two points a run is on the line that a logarithmic
    axis of values shows, and after its last it keeps that value; one that ended without a finite value counts as
    infinite from there on, so that a median over seeds shows it. An ``exact`` curve is at the points of all seeds, and
    one that ended without a finite value counts with its last.
    """
    curves = [_curve(run, axis, quantity, lost=not exact) for run in runs]
    curves = [(times, values) for times, values in curves if times and times[-1] > 0]
    if not curves:
        return None
    positive = [[t for t in times if t > 0] for times, _ in curves]
    first, last = max(times[0] for times in positive), max(times[-1] for times in positive)
    if exact or len(curves) == 1:
        grid = sorted({t for times in positive for t in times if t >= first})
    else:
        ratio = (last / first) ** (1 / (_GRID - 1))
        grid = [*(first * ratio**i for i in range(_GRID - 1)), last]
    rows = [[_value(times, values, t) for times, values in curves] for t in grid]
    return Series(
        tuple(grid),
        tuple(map(statistics.median, rows)),
        tuple(map(min, rows)),
        tuple(map(max, rows)),
    )


def _curve(run: Run, axis: Axis, quantity: Quantity, *, lost: bool) -> tuple[list[float], list[float]]:
    """Times and finite values; if the run ended without one, a last infinite value at the time it was ``lost``."""
    points = [(getattr(p, axis), getattr(p, quantity)) for p in run.points]
    finite = [i for i, (_, value) in enumerate(points) if math.isfinite(value)]
    kept = [points[i] for i in finite]
    after = finite[-1] + 1 if finite else len(points)
    if lost and after < len(points):
        kept.append((points[after][0], math.inf))
    return [time for time, _ in kept], [value for _, value in kept]


def _value(times: Sequence[float], values: Sequence[float], t: float) -> float:
    """Between two positive finite points by a line on a logarithmic axis, else that of the last point until then."""
    i = bisect.bisect_right(times, t)
    before, *after = values[max(i - 1, 0) : i + 1] if i else values[:1]
    if not after or min(before, *after) <= 0 or after[0] == math.inf:
        return before
    part = (t - times[i - 1]) / (times[i] - times[i - 1])
    return float(before ** (1 - part) * after[0] ** part)
