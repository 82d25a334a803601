"""Times to the paper's errors, reached or extrapolated."""

from __future__ import annotations

import math

import pytest
from experiments.common.reach import duration, reach
from experiments.common.records import Point, Run


def run_of(errors: dict[float, float]) -> Run:
    points = tuple(Point(i, t, t, 1.0, 1.0, 1.0, e) for i, (t, e) in enumerate(errors.items()))
    return Run("curves", "ksd", 0, points)


def test_a_target_that_was_reached() -> None:
    found = reach(run_of({0: 10.0, 1: 4.0, 2: 6.0, 3: 2.0}), 4.5)
    assert found is not None
    assert (found.cost, found.extrapolated, found.error) == (1, False, 2.0)


def test_a_power_law_is_followed() -> None:
    found = reach(run_of({0: 100.0} | {t: 8 * t**-0.5 for t in range(1, 101)}), 0.08)
    assert found is not None
    assert found.extrapolated
    assert found.cost == pytest.approx(10_000)
    assert found.error == pytest.approx(0.8)


def test_what_no_longer_falls_never_gets_there() -> None:
    found = reach(run_of({0: 10.0, 1: 3.0, 50: 3.0, 100: 3.5}), 1.0)
    assert found is not None
    assert (found.cost, found.error) == (math.inf, 3.0)


def test_nothing_finite() -> None:
    assert reach(run_of({0: math.nan}), 1.0) is None


def test_a_run_that_gets_faster_is_not_extrapolated() -> None:
    """As after a plateau: 10 until 60 s, then a fall."""
    found = reach(run_of({t: 10.0 if t < 60 else 10.0 - (t - 60) ** 2 / 400 for t in range(101)}), 1.0)
    assert found is not None
    assert math.isnan(found.cost)
    assert found.extrapolated
    assert duration(found.cost) == "falls ever faster"
