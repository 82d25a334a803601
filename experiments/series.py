"""What several seeds say together: one curve, median and range over time, and which method is ahead."""

from __future__ import annotations

import bisect
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from experiments import plan
from experiments.records import Axis, Run

Quantity = Literal["loss", "error", "held_out_loss", "held_out_error"]
BySeed = Mapping[str, Mapping[int, float]]  # label, seed

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

    Time zero has no place on such an axis and is left out. Until the next point a run has the value of its last, and
    keeps it when it has ended; one that ended without a finite value counts as infinite from there on, so that a
    median over seeds shows it.
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
    """That of the last point until then, as in the tables: nothing is read between points."""
    return values[max(bisect.bisect_right(times, t) - 1, 0)]


def ahead(found: BySeed) -> tuple[str | None, set[int]]:
    """The label with the lowest mean, and the seeds that it is taken over; None if there is none, or two share it.

    Those are the seeds that the main methods have in common. A method that lacks some of them is only ahead if it has
    the lowest mean over the seeds that all have.
    """
    if not found:
        return None, set()
    every = set.intersection(*map(set, found.values()))
    mains = [set(values) for label, values in found.items() if label in plan.MAIN]
    main = set.intersection(*mains) if mains else every
    full = {label: values for label, values in found.items() if main <= set(values)}
    best = _lowest_mean(found, every)
    return (best, every) if best is not None and best not in full else (_lowest_mean(full, main), main)


def _lowest_mean(found: BySeed, seeds: set[int]) -> str | None:
    """The one label with the lowest mean over these seeds, where there are at least two to compare."""
    if not seeds:
        return None
    means = {label: statistics.fmean(values[s] for s in seeds) for label, values in found.items()}
    finite = {label: mean for label, mean in means.items() if math.isfinite(mean)}
    best = [label for label, mean in finite.items() if mean == min(finite.values())]
    return best[0] if len(best) == 1 and len(finite) > 1 else None
