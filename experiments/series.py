"""One curve from the runs of several seeds: median and range over time."""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Literal

from experiments.records import Axis, Run

Quantity = Literal["loss", "error", "held_out_loss", "held_out_error"]

_GRID = 100


@dataclasses.dataclass(frozen=True)
class Series:
    """Times from the first step on, and the median, lowest and highest value there; infinite where runs diverged."""

    times: tuple[float, ...]
    middle: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def series(runs: Sequence[Run], axis: Axis, quantity: Quantity) -> Series | None:
    """The curve of one seed at its own points, of several at times evenly spaced on a logarithmic axis.

    Time zero has no place on such an axis and is left out. A run that ended keeps its last value, one that ended
    without a finite value counts as infinite from there on, so that a median over seeds shows it.
    """
    curves = [curve for curve in (_curve(run, axis, quantity) for run in runs) if curve[0] and curve[0][-1] > 0]
    if not curves:
        return None
    positive = [[t for t in times if t > 0] for times, _ in curves]
    if len(curves) == 1:
        grid = positive[0]
    else:
        first, last = max(times[0] for times in positive), max(times[-1] for times in positive)
        ratio = (last / first) ** (1 / (_GRID - 1))
        grid = [*(first * ratio**i for i in range(_GRID - 1)), last]
    rows = [[_value(times, values, t) for times, values in curves] for t in grid]
    return Series(
        tuple(grid),
        tuple(map(statistics.median, rows)),
        tuple(map(min, rows)),
        tuple(map(max, rows)),
    )


def _curve(run: Run, axis: Axis, quantity: Quantity) -> tuple[list[float], list[float]]:
    """Times and finite values; if the run ended without one, a last infinite value at the time it was lost."""
    points = [(getattr(p, axis), getattr(p, quantity)) for p in run.points]
    finite = [i for i, (_, value) in enumerate(points) if math.isfinite(value)]
    kept = [points[i] for i in finite]
    after = finite[-1] + 1 if finite else len(points)
    if after < len(points):
        kept.append((points[after][0], math.inf))
    return [time for time, _ in kept], [value for _, value in kept]


def _value(times: Sequence[float], values: Sequence[float], t: float) -> float:
    """Linear between points, constant outside them."""
    i = bisect.bisect_right(times, t)
    if i == 0 or i == len(times):
        return values[max(i - 1, 0)]
    before, after = values[i - 1], values[i]
    if math.isinf(after):
        return before
    return before + (after - before) * (t - times[i - 1]) / (times[i] - times[i - 1])
