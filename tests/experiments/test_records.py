"""Reading recorded runs, on curves whose figures are known exactly."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from experiments.common import records
from experiments.common.budget import Budget
from experiments.common.files import finished
from experiments.common.packed import pack
from experiments.common.records import Point, Run
from experiments.common.series import series
from experiments.common.table import ahead
from experiments.paper import records as paper
from experiments.paper.plan import MAIN

from tests.experiments.synthetic import header, point, write


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
    assert (found.samples, found.held_out_samples, found.budget) == (1000, 500, "20s")
    assert found.allowed == Budget(20.0, "seconds")
    assert found.settings == {"krylov_dim": 20}
    last = found.points[-1]
    assert (last.step, last.seconds, last.gradients, last.loss, last.error) == (7, 7.0, 35.0, 4.0, 2.0)
    assert last.report == report
    assert records.read_runs(tmp_path) == [found]


def without_reports(run: Run) -> str:
    """A run in letters, by which NaN is equal to NaN."""
    return repr(dataclasses.replace(run, points=tuple(dataclasses.replace(p, report=None) for p in run.points)))


def test_packed_runs_are_read_as_their_own_files(tmp_path: Path) -> None:
    report = {"seconds": {"gradient": 1.0}, "ritz_values": [0.5], "notes": []}
    for seed in (0, 1):
        lines = [header("curves", "ksd", seed), point(0, 9.0), point(7, None, error=2.0, report=report)]
        path = write(tmp_path, [*lines, {"kind": "end", "reason": "early stop"}])
    write(tmp_path, [header("mnist-ae", "hf", 0), point(0, 9.0)])  # not ended
    before = records.read_runs(tmp_path)
    assert pack(tmp_path) == [tmp_path / "curves.jsonl", tmp_path / "mnist-ae.jsonl"]
    expected, budget = {"settings": {"krylov_dim": 20}, "samples": 1000}, Budget(20.0, "seconds")
    assert finished(tmp_path, path, budget, **expected)
    shutil.rmtree(tmp_path / "curves")
    shutil.rmtree(tmp_path / "mnist-ae")
    assert finished(tmp_path, path, budget, **expected)
    assert not finished(tmp_path, path, budget, **{**expected, "samples": 10})
    assert not finished(tmp_path, path.with_name("ksd-seed2.jsonl"), budget, **expected)
    assert not finished(tmp_path, tmp_path / "mnist-ae" / "hf-seed0.jsonl", budget, **expected)
    after = records.read_runs(tmp_path)
    # All but the reports: of those, the Ritz values are kept of the first seed alone.
    assert [without_reports(run) for run in after] == [without_reports(run) for run in before]
    assert after[0].points[1].report == {"seconds": {"gradient": 1.0}, "ritz_values": [0.5]}
    assert after[1].points[1].report == {"seconds": {"gradient": 1.0}}


def test_a_run_of_its_own_counts_before_the_packed_one(tmp_path: Path) -> None:
    for seed in (0, 1):
        write(tmp_path, [header("curves", "ksd", seed), point(0, 9.0)])
    pack(tmp_path)
    shutil.rmtree(tmp_path / "curves")
    write(tmp_path, [header("curves", "ksd", 1), point(0, 5.0)])
    assert [run.points[0].loss for run in records.read_runs(tmp_path)] == [9.0, 5.0]
    pack(tmp_path)
    shutil.rmtree(tmp_path / "curves")
    assert [run.points[0].loss for run in records.read_runs(tmp_path)] == [9.0, 5.0]
    (tmp_path / "other.jsonl").write_text('{"kind":"run"}\n')
    with pytest.raises(ValueError, match="line 1, is no packed run"):
        records.read_runs(tmp_path)


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
    with pytest.raises(ValueError, match="is not a folder"):
        records.read_runs(tmp_path / "nowhere")


@pytest.mark.parametrize("line", ['[1, "kind"]', "3", "null", '"run"'])
@pytest.mark.parametrize("after", ["", json.dumps(point(1, 1.0)) + "\n"])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str, after: str) -> None:
    path = write(tmp_path, [header("curves", "ksd", 0), point(0, 9.0)])
    path.write_text(path.read_text() + line + "\n" + after)
    with pytest.raises(ValueError, match=r"ksd-seed0.jsonl, line 3, is no JSON object"):
        records.read_runs(tmp_path)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"loss": "low"}, "loss is 'low', not a number"),
        ({"held_out_error": [1.0]}, r"held_out_error is \[1.0\], not a number"),
        ({"error": True}, "error is True, not a number"),
        ({"step": None}, "step is None, not a number"),
        ({"seconds": None}, "seconds is None, not a number"),
        ({"gradients": math.inf}, "gradients is inf, not a number"),
        ({"report": "none"}, "the report is 'none', not an object or null"),
    ],
)
def test_a_broken_point_is_named(tmp_path: Path, broken: dict[str, object], complaint: str) -> None:
    write(tmp_path, [header("curves", "ksd", 0), point(0, 9.0), {**point(1, 8.0), **broken}, point(2, 7.0)])
    with pytest.raises(ValueError, match=f"ksd-seed0.jsonl, line 3: {complaint}"):
        records.read_runs(tmp_path)


def test_a_point_that_lacks_something_is_named(tmp_path: Path) -> None:
    write(tmp_path, [header("curves", "ksd", 0), {"kind": "point", "step": 4, "seconds": 1}])
    with pytest.raises(ValueError, match=r"ksd-seed0.jsonl, line 2: the point at step 4 lacks 'gradients'"):
        records.read_runs(tmp_path)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"problem": 3}, "problem is 3, not a string"),
        ({"seed": "0"}, "seed is '0', not a whole number"),
        ({"weight_decay": None}, "weight_decay is None, not a number"),
        ({"settings": [20]}, r"settings is \[20\], not an object"),
        ({"machine": "mine"}, "machine is 'mine', not an object"),
        ({"budget": "long"}, "'long' is no budget"),
        ({"budget": ""}, "'' is no budget"),
    ],
)
def test_a_broken_header_is_named(tmp_path: Path, broken: dict[str, object], complaint: str) -> None:
    path = write(tmp_path, [header("curves", "ksd", 0), point(0, 9.0)])
    path.write_text(json.dumps({**header("curves", "ksd", 0), **broken}) + "\n")
    with pytest.raises(ValueError, match=f"ksd-seed0.jsonl, line 1: {complaint}"):
        records.read_runs(tmp_path)


def test_a_header_that_lacks_something_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, [header("curves", "ksd", 0)])
    path.write_text('{"kind": "run", "problem": "curves"}\n')
    with pytest.raises(ValueError, match=r"ksd-seed0.jsonl, line 1: the header is incomplete .*'label'"):
        records.read_runs(tmp_path)


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
    assert paper.lowest(found) == 5.0
    best, last = paper.best_held_out(found), found.points[-1]
    assert best is not None
    assert (best.step, last.step) == (2, 3)
    assert paper.time_to(found, 7.0) == 2.0


def test_steps_repeated_after_a_checkpoint_replace_the_first_account(tmp_path: Path) -> None:
    lines = [point(0, 9.0), point(1, 8.0), point(2, 7.0), point(1, 6.0), point(2, 5.0)]
    found = records.read_run(write(tmp_path, [header("curves", "ksd", 0), *lines]))
    assert [(p.step, p.loss) for p in found.points] == [(0, 9.0), (1, 6.0), (2, 5.0)]


def test_early_stopping_takes_the_lowest_held_out_error_then_loss() -> None:
    tied = run(4, 3, 2, 1, held_out=[(9, 1), (2, 5), (2, 4), (3, 0)])
    best = paper.best_held_out(tied)
    assert best is not None
    assert best.step == 2
    same = paper.best_held_out(run(4, 3, 2, held_out=[(2, 5), (2, 5), (2, math.nan)]))
    assert same is not None
    assert same.step == 0
    assert paper.best_held_out(run(4, 3, held_out=[(math.nan, 1), (math.nan, 1)])) is None


def test_time_to_is_that_of_the_first_point_at_or_below() -> None:
    bumpy = run(10, 6, math.nan, 8, 2)
    assert paper.time_to(bumpy, 10) == 0
    assert paper.time_to(bumpy, 9.9) == 1
    assert paper.time_to(bumpy, 6) == 1
    assert paper.time_to(bumpy, 5.9) == 4
    assert paper.time_to(bumpy, 5.9, axis="gradients") == 40
    assert paper.time_to(bumpy, 1.9) is None
    assert paper.time_to(run(math.nan, math.nan), 1) is None


def test_long_steps_get_nothing_for_the_way_between_points() -> None:
    # A step of 30 s from 10 to 2 beside thirty of 1 s: the level of 4 is there at 30 s, not at 22.5 s on a line.
    long = Run("curves", "ksd", 0, (Point(0, 0.0, 0.0, 10, 0, 0, 0), Point(1, 30.0, 9.0, 2, 0, 0, 0)))
    short = Run("curves", "hf", 0, tuple(Point(i, float(i), i, 10 - 0.2 * i, 0, 0, 0) for i in range(31)))
    found = paper.relative_time(long, short)
    assert found is not None
    assert (found.loss, found.seconds, found.gradients) == (4.0, 1.0, 9 / 30)


def test_a_run_counts_up_to_its_budget_and_a_fortieth_more() -> None:
    falling = dataclasses.replace(run(*range(60, 0, -1)), budget="40s")
    assert paper.lowest(falling) == 1
    assert paper.lowest(paper.within_budget(falling)) == 60 - 41  # 41 s is a fortieth more, 42 s is not
    assert len(paper.within_budget(dataclasses.replace(falling, budget="10g")).points) == 2  # 0 and 10 of them


def test_the_budget_of_a_row_is_the_commonest_of_ksd_and_hf() -> None:
    def some(label: str, *budgets: str) -> list[Run]:
        return [Run("curves", label, seed, run(2, 1).points, budget=budget) for seed, budget in enumerate(budgets)]

    found = {"ksd": some("ksd", "60s", "300s"), "hf": some("hf", "5m"), "adam": some("adam", "60s", "60s", "60s")}
    assert paper.row_budget(found) == Budget(300.0, "seconds")
    assert {label: [r.seed for r in runs] for label, runs in paper.of_row(found).items()} == {"ksd": [1], "hf": [0]}
    assert paper.row_budget({"ksd": some("ksd", "60s", "300s")}) == Budget(300.0, "seconds")
    assert paper.row_budget({"adam": some("adam", "9g", "9g", "300s")}) == Budget(9.0, "gradients")
    assert paper.row_budget({}) is None
    assert paper.of_row({}) == {}


@pytest.mark.parametrize(("fast", "slow"), [(1 / 16, 1 / 64), (1 / 16, 1 / 32), (3 / 64, 1 / 32)])
def test_relative_time_of_exponentials(fast: float, slow: float) -> None:
    # Both fall as 1 + 9·exp(−rate·i): the level is what the slow one ends with, at its point 200, and the fast one is
    # there at the next point from 200·slow/fast. Its points cost 3 s and 5 gradients, those of the slow one 1 s and 20.
    a, b = exponential(fast, seconds=3, gradients=5), exponential(slow, gradients=20)
    found = paper.relative_time(a, b)
    assert found is not None
    points = math.ceil(200 * slow / fast)
    assert found.loss == 1 + 9 * math.exp(-slow * 200)
    assert found.seconds == 3 * points / 200
    assert found.gradients == 5 * points / (20 * 200)
    reverse = paper.relative_time(b, a)
    assert reverse is not None
    assert reverse.seconds == 200 / (3 * points)


def test_relative_time_needs_time_spent_by_both() -> None:
    assert paper.relative_time(run(10, 5), run(10, 11, 12)) is None
    assert paper.relative_time(run(10, 5), run(math.nan, math.nan)) is None
    diverged = paper.relative_time(run(10, 7, 4), run(10, 6, math.nan))
    assert diverged is not None
    assert (diverged.loss, diverged.seconds) == (6, 2.0)


def test_relative_times_pair_seeds() -> None:
    def seeded(rate: float, seed: int) -> Run:
        return Run("curves", "ksd", seed, exponential(rate).points)

    pairs = paper.relative_times([seeded(1 / 16, 0), seeded(1 / 32, 1)], [seeded(1 / 64, 1), seeded(1 / 64, 2)])
    assert [p.seconds for p in pairs] == [0.5]


def test_series_of_seeds() -> None:
    several = series([run(8, 4, 2), run(8, 6, 4), run(8, 5, math.nan)], "seconds", "loss")
    assert several is not None
    assert several.times[0] == 1
    assert several.times[-1] == 2
    assert (several.low[0], several.middle[0], several.high[0]) == (4, 5, 6)
    # At 2 s the third has diverged, and counts as the worst; until then its last value stands.
    assert (several.low[-1], several.middle[-1], several.high[-1]) == (2, 4, math.inf)
    assert several.low[-2] == pytest.approx(2, rel=0.02)
    assert several.middle[-2] == pytest.approx(4, rel=0.02)
    assert several.high[-2] == 5
    half = series([run(8, 4, 2), run(8, 4, 2)], "seconds", "loss")
    assert half is not None
    assert half.middle == pytest.approx([4 * 2 ** (1 - t) for t in half.times])  # lines of a logarithmic axis
    single = series([run(8, 4, 2)], "gradients", "loss")
    assert single is not None
    assert (single.times, single.middle) == ((10, 20), (4, 2))
    assert series([run(8)], "seconds", "loss") is None


def test_who_is_ahead_is_decided_on_common_seeds() -> None:
    # KSD's mean over its own seeds is the lowest; over seeds 0 and 1, which Adam has too, it is not.
    assert ahead({"ksd": {0: 5, 1: 5, 2: 0}, "adam": {0: 4, 1: 4}}, MAIN) == ("adam", {0, 1})
    assert ahead({"ksd": {0: 5, 1: 1}, "adam": {0: 4, 1: 4}}, MAIN) == ("ksd", {0, 1})
    assert ahead({"ksd": {0: 5}, "adam": {1: 4}}, MAIN) == (None, set())
    assert ahead({"ksd": {0: 5}, "adam": {0: 5}}, MAIN) == (None, {0})
    assert ahead({"ksd": {0: 5}, "adam": {0: math.nan}}, MAIN) == (None, {0})
    assert ahead({"ksd": {0: 5}}, MAIN) == (None, {0})
    assert ahead({}, MAIN) == (None, set())


def test_a_method_with_fewer_seeds_does_not_shorten_the_comparison() -> None:
    main = {"ksd": {0: 3, 1: 1}, "adam": {0: 2, 1: 4}}
    assert ahead({**main, "cg": {0: 2.5}}, MAIN) == ("ksd", {0, 1})
    assert ahead({**main, "cg": {0: 1.5}}, MAIN) == ("cg", {0})  # lower than every other where it was run
    assert ahead({**main, "cg": {0: 1.5}, "ksd-paper": {0: 1}}, MAIN) == ("ksd-paper", {0})
    assert ahead({**main, "cg": {0: 1.5}, "ksd-paper": {5: 1}}, MAIN) == ("ksd", {0, 1})  # no seed that all have
    assert ahead({**main, "cg": {0: 2.5, 1: 1}}, MAIN) == ("cg", {0, 1})
    assert ahead({"cg": {0: 1, 1: 9}, "ksd-paper": {0: 2}}, MAIN) == ("cg", {0})
