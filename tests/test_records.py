"""Reading recorded runs, on exponential curves whose crossing times are known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from experiments import records
from experiments.records import Point, Run
from experiments.series import series

from tests.synthetic import header, point, write


def run(*losses: float, held_out: Sequence[tuple[float, float]] = (), end: str | None = "budget") -> Run:
    """One point a second, ten gradients each; held-out errors and losses if given."""
    points = []
    for i, loss in enumerate(losses):
        held_out_error, held_out_loss = held_out[i] if held_out else (loss, loss)
        points.append(Point(i, float(i), 10.0 * i, loss, loss, held_out_loss, held_out_error))
    return Run("curves", "ksd", 0, tuple(points), end)


def exponential(rate: float, seconds: float = 1.0, gradients: float = 1.0, until: int = 200) -> Run:
    """Loss 1 + 9·exp(−rate·i) at point i."""
    points = (
        Point(i, seconds * i, gradients * i, 1 + 9 * math.exp(-rate * i), 0.0, 0.0, 0.0) for i in range(until + 1)
    )
    return Run("curves", "ksd", 0, tuple(points), "budget")


def test_a_run_comes_back_as_written(tmp_path: Path) -> None:
    report = {"seconds": {"gradient": 1.0}, "ritz_values": [0.5]}
    lines = [header("curves", "ksd", 3), point(0, 9.0), point(7, 4.0, error=2.0, report=report)]
    path = write(tmp_path, [*lines, {"kind": "end", "reason": "early stop"}])
    found = records.read_run(path)
    assert (found.problem, found.label, found.seed, found.end) == ("curves", "ksd", 3, "early stop")
    assert (found.samples, found.held_out_samples, found.budget, found.axis) == (1000, 500, "20s", "seconds")
    assert found.settings == {"krylov_dim": 20}
    last = records.final(found)
    assert last is not None
    assert (last.step, last.seconds, last.gradients, last.loss, last.error) == (7, 7.0, 35.0, 4.0, 2.0)
    assert last.report == report
    assert records.read_runs(tmp_path) == [found]


@pytest.mark.parametrize("kept", range(1, 60, 7))
def test_a_last_line_cut_anywhere_is_left_out(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path, [header("curves", "ksd", 0), point(0, 9.0), point(1, 8.0)])
    path.write_text(path.read_text() + json.dumps(point(2, 7.0))[:kept])
    found = records.read_run(path)
    assert [p.step for p in found.points] == [0, 1]
    assert found.end is None


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, [header("curves", "ksd", 0), point(0, 9.0)])
    path.write_text(path.read_text() + '{"kind": "poi\n' + json.dumps(point(2, 7.0)) + "\n")
    with pytest.raises(ValueError, match="line 3, is not JSON"):
        records.read_run(path)


def test_what_is_not_a_run_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, [header("curves", "ksd", 0)])
    path.write_text(json.dumps(point(0, 1.0)) + "\n")
    with pytest.raises(ValueError, match='no line of kind "run"'):
        records.read_run(path)
    path.write_text('{"kind": "run", "problem": "curves"}\n')
    with pytest.raises(ValueError, match="header is incomplete"):
        records.read_run(path)
    path.write_text(json.dumps(header("curves", "ksd", 0)) + '\n{"kind": "point", "step": 4, "seconds": 1}\n')
    with pytest.raises(ValueError, match="step 4 lacks 'gradients'"):
        records.read_run(path)
    with pytest.raises(ValueError, match="is not a folder"):
        records.read_runs(tmp_path / "nowhere")


def test_only_runs_of_the_folder_itself_count(tmp_path: Path) -> None:
    write(tmp_path, [header("curves", "ksd", 0), point(0, 1.0)])
    write(tmp_path / "tuning", [header("curves", "ksd", 1), point(0, 1.0)])
    (tmp_path / "tuning" / "tuning-curves.jsonl").write_text('{"loss": 1}\n')
    (tmp_path / "curves" / "hf-seed0.jsonl").write_text('{"kind": "ru')  # begun this moment
    assert [(r.label, r.seed) for r in records.read_runs(tmp_path)] == [("ksd", 0)]


def test_null_is_nan_and_never_the_best(tmp_path: Path) -> None:
    lines = [point(0, 9.0), point(1, None, held_out_error=None), point(2, 5.0), point(3, None, held_out_error=None)]
    found = records.read_run(write(tmp_path, [header("curves", "ksd", 0), *lines]))
    assert math.isnan(found.points[1].loss)
    assert records.lowest(found) == 5.0
    best, last = records.best_held_out(found), records.final(found)
    assert best is not None
    assert last is not None
    assert (best.step, last.step) == (2, 3)
    assert records.time_to(found, 7.0) == 1.0  # between steps 0 and 2, over the gap


def test_steps_repeated_after_a_checkpoint_replace_the_first_account(tmp_path: Path) -> None:
    lines = [point(0, 9.0), point(1, 8.0), point(2, 7.0), point(1, 6.0), point(2, 5.0)]
    found = records.read_run(write(tmp_path, [header("curves", "ksd", 0), *lines]))
    assert [(p.step, p.loss) for p in found.points] == [(0, 9.0), (1, 6.0), (2, 5.0)]


def test_early_stopping_takes_the_lowest_held_out_error_then_loss() -> None:
    tied = run(4, 3, 2, 1, held_out=[(9, 1), (2, 5), (2, 4), (3, 0)])
    best = records.best_held_out(tied)
    assert best is not None
    assert best.step == 2
    same = records.best_held_out(run(4, 3, 2, held_out=[(2, 5), (2, 5), (2, math.nan)]))
    assert same is not None
    assert same.step == 0
    assert records.best_held_out(run(4, 3, held_out=[(math.nan, 1), (math.nan, 1)])) is None


def test_time_to_is_linear_between_points_and_uses_the_running_minimum() -> None:
    bumpy = run(10, 6, 8, 2)
    assert records.time_to(bumpy, 10) == 0
    assert records.time_to(bumpy, 7) == 0.75
    assert records.time_to(bumpy, 6) == 1
    assert records.time_to(bumpy, 5) == 2.25  # from 6, the minimum until 2 s, to 2 at 3 s
    assert records.time_to(bumpy, 5, axis="gradients") == 22.5
    assert records.time_to(bumpy, 1.9) is None
    assert records.time_to(run(math.nan, math.nan), 1) is None


def test_lowest_within_a_budget() -> None:
    falling = run(10, 6, 4, 2)
    assert records.lowest(falling) == 2
    assert records.lowest(falling, "seconds", 2.5) == 4
    assert records.lowest(falling, "gradients", 10) == 6


@pytest.mark.parametrize(("fast", "slow"), [(0.08, 0.02), (0.05, 0.04)])
def test_relative_time_of_exponentials(fast: float, slow: float) -> None:
    # Both fall as 1 + 9·exp(−rate·i): the level is what the slow one ends with, at its point 200, and the fast one is
    # there at point 200·slow/fast. Its points cost 3 s and 5 gradients, those of the slow one 1 s and 20 gradients.
    a, b = exponential(fast, seconds=3, gradients=5), exponential(slow, gradients=20)
    found = records.relative_time(a, b)
    assert found is not None
    assert found.loss == pytest.approx(1 + 9 * math.exp(-slow * 200), rel=1e-12)
    assert found.seconds == pytest.approx(3 * slow / fast, rel=1e-3)
    assert found.gradients == pytest.approx(5 / 20 * slow / fast, rel=1e-3)
    reverse = records.relative_time(b, a)
    assert reverse is not None
    assert reverse.seconds == pytest.approx(1 / found.seconds)


def test_relative_time_needs_time_spent_by_both() -> None:
    assert records.relative_time(run(10, 5), run(10, 11, 12)) is None
    assert records.relative_time(run(10, 5), run(math.nan, math.nan)) is None
    diverged = records.relative_time(run(10, 4), run(10, 6, math.nan))
    assert diverged is not None
    assert diverged.loss == 6
    assert diverged.seconds == pytest.approx(2 / 3)


def test_relative_times_pair_seeds() -> None:
    def seeded(rate: float, seed: int) -> Run:
        return Run("curves", "ksd", seed, exponential(rate).points)

    pairs = records.relative_times([seeded(0.08, 0), seeded(0.04, 1)], [seeded(0.02, 1), seeded(0.02, 2)])
    assert [p.seconds for p in pairs] == [pytest.approx(0.5, rel=1e-3)]


def test_series_of_seeds() -> None:
    several = series([run(8, 4, 2), run(8, 6, 4), run(8, 5, math.nan)], "seconds", "loss")
    assert several is not None
    assert several.times[0] == 1
    assert several.times[-1] == 2
    assert (several.low[0], several.middle[0], several.high[0]) == (4, 5, 6)
    # At 2 s the third has diverged, and counts as the worst; until then its last value stands.
    assert (several.low[-1], several.middle[-1], several.high[-1]) == (2, 4, math.inf)
    assert several.high[-2] == 5
    single = series([run(8, 4, 2)], "gradients", "loss")
    assert single is not None
    assert (single.times, single.middle) == ((10, 20), (4, 2))
    assert series([run(8)], "seconds", "loss") is None
