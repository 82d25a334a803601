"""Times at which runs reach an error."""

from __future__ import annotations

import math

from experiments.common.records import Point, Run
from experiments.paper.reach import reached


def run_of(errors: dict[float, float]) -> Run:
    points = tuple(Point(i, t, t, 1.0, 1.0, 1.0, e) for i, (t, e) in enumerate(errors.items()))
    return Run("curves", "ksd", 0, points)


def test_the_first_time_counts() -> None:
    run = run_of({0: 10.0, 1: 4.0, 2: 6.0, 3: 2.0})
    assert reached(run, 4.5) == 1
    assert reached(run, 4.0) == 1
    assert reached(run, 1.0) is None


def test_nothing_finite() -> None:
    assert reached(run_of({0: math.nan}), 1.0) is None
