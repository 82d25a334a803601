"""The loop of the PINN study: its clock, when it evaluates and ends, and the file it writes."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.common.records import read_run
from experiments.pinn import run as running
from experiments.pinn.problems import Grid, Problem
from experiments.pinn.records import column, fields
from experiments.pinn.rivals import METHODS
from experiments.pinn.run import RunConfig, drive, due, run
from torch import Tensor, nn


class Clock:
    """Seconds that pass only where a test lets them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def counted(self, value: Callable[[], float], seconds: float = 100.0) -> Callable[[], float]:
        """The same function, which now takes its time."""

        def slow() -> float:
            self.now += seconds
            return value()

        return slow


def small_problem(clock: Clock | None = None) -> Problem:
    """One weight w, whose loss is w², held-out loss 2w² and error |w|; evaluations take 100 seconds."""
    clock = clock or Clock()
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)

    def closure() -> tuple[Tensor, tuple[Tensor, ...]]:
        z = model.weight.flatten()
        return z.square().mean(), (z,)

    def weight() -> float:
        return float(model.weight.detach())

    axis = torch.linspace(0, 1, 150, dtype=torch.float64)
    exact = axis[:, None] * axis
    return Problem(
        "small",
        model,
        closure,
        error=clock.counted(lambda: abs(weight())),
        held_out=clock.counted(lambda: 2 * weight() ** 2),
        resample=lambda _: None,
        grid=Grid(("x", "t"), (axis, axis), exact, lambda: exact + 1e-9 * weight()),
        part=lambda count, generator: closure,
    )


def weight_of(problem: Problem) -> Tensor:
    return next(problem.model.parameters()).detach()


def halving(
    problem: Problem, clock: Clock, seconds: float = 1.0, steps: float = math.inf, *, then: Sequence[float] = ()
) -> Iterator[float]:
    """Halves the weight in every step; after some steps yields other losses, if given, and ends."""
    taken = 0
    while taken < steps:
        clock.now += seconds
        weight_of(problem).mul_(0.5)
        taken += 1
        yield float(weight_of(problem).square())
    yield from then


def test_the_loop_ends_with_its_budget_and_evaluations_are_off_the_clock() -> None:
    clock = Clock()
    problem = small_problem(clock)
    *points, end = drive(problem, halving(problem, clock, 0.75), 3.0, clock=clock)
    # Due at 1, 1.3, 1.69, 2.197, 2.8561 and 3 s; steps end at multiples of 0.75 s.
    assert [p["seconds"] for p in points] == [0, 1.5, 2.25, 3.0]
    assert [p["steps"] for p in points] == [0, 2, 3, 4]
    assert [p["error"] for p in points] == [1.0, 2**-2, 2**-3, 2**-4]
    assert (points[-1]["loss"], points[-1]["held_out"]) == (2.0**-8, 2.0**-7)
    assert end == {"kind": "end", "reason": "budget", "spent": 3.0} | {
        k: points[-1][k] for k in points[-1] if k != "kind"
    }
    assert clock.now == 3.0 + 4 * 200


def test_evaluations_are_due_at_one_ratio_and_at_the_marks() -> None:
    times = due(900.0)
    assert times[0] == 1.0
    assert times[-1] == 900.0
    assert {60.0, 300.0} <= set(times)
    assert max(b / a for a, b in itertools.pairwise(times)) < 1.3 + 1e-12
    assert due(60.0).count(60.0) == 1
    assert due(0.5) == (0.5,)


def test_a_method_that_makes_no_progress_ends_the_run() -> None:
    clock = Clock()
    problem = small_problem(clock)
    end = drive(problem, halving(problem, clock, steps=3), 60.0, clock=clock)[-1]
    assert (end["reason"], end["steps"], end["seconds"], end["error"]) == ("stopped", 3, 3.0, 2**-3)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run_with_the_last_finite_point(loss: float) -> None:
    clock = Clock()
    problem = small_problem(clock)
    *points, end = drive(problem, halving(problem, clock, 0.4, 5, then=[loss, 0.1]), 60.0, clock=clock)
    assert (end["reason"], end["steps"], end["error"]) == ("diverged", 5, 2**-5)
    assert end["spent"] == pytest.approx(2.0)
    assert points[-1]["steps"] == 5


def test_weights_that_are_not_finite_count_as_diverged_though_the_method_does_not_say_so() -> None:
    clock = Clock()
    problem = small_problem(clock)

    def spoilt() -> Iterator[float]:
        yield from halving(problem, clock, 1.0, 2)
        weight_of(problem).fill_(math.nan)
        clock.now += 1
        yield 0.5

    *points, end = drive(problem, spoilt(), 60.0, clock=clock)
    assert (end["reason"], end["steps"], end["error"]) == ("diverged", 2, 2**-2)
    assert math.isnan(points[-1]["error"])


def test_new_points_are_drawn_every_so_many_steps_and_on_the_clock() -> None:
    clock = Clock()
    problem = small_problem(clock)
    drawn: list[tuple[int, float]] = []

    def resample(key: int) -> None:
        clock.now += 0.5
        drawn.append((key, float(weight_of(problem))))

    problem.resample = resample
    end = drive(problem, halving(problem, clock, 1.0), 8.0, clock=clock, resample=2)[-1]
    assert drawn == [(1, 2**-2), (2, 2**-4), (3, 2**-6)]
    assert (end["steps"], end["seconds"]) == (7, 8.5)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The small problem under the name of Burgers' equation, and the method "lm" halving its weight."""
    clock = Clock()
    monkeypatch.setattr(running, "make_problem", lambda *_, **__: small_problem(clock))

    def method(problem: Problem, *, seed: int, start: float = 1.0, seconds: float = 0.0) -> Iterator[float]:
        assert seconds > 0  # methods that go by the budget are told it
        return halving(problem, clock, start)

    monkeypatch.setattr(running, "METHODS", {**METHODS, "lm": method})
    return clock


def test_a_run_is_one_file_and_the_solution_of_seed_0(stand_in: Clock, tmp_path: Path) -> None:
    path = run(RunConfig("burgers", "lm", {"start": "0.5"}, 4.0), tmp_path, clock=stand_in)
    assert path == tmp_path / "pinn" / "burgers" / "3x32" / "lm-4s-seed0.jsonl"
    header = json.loads(path.read_text().splitlines()[0])
    expected = {"problem": "burgers", "method": "lm", "settings": {"start": 0.5}, "seconds": 4.0, "n": 1, "N": 1}
    assert header.items() >= expected.items()
    assert header["threads"] == torch.get_num_threads()
    found = read_run(path)
    assert (found.end, found.final.step, found.final.error, column(found)) == ("budget", 8, 2**-8, "lm")
    assert fields(found).stat().st_size < 100_000
    kept = np.load(fields(found))
    assert kept["exact"].shape == kept["error"].shape == (75, 75)
    assert kept["error"] == pytest.approx(np.full((75, 75), 1e-9 * 2**-8), rel=1e-3)  # lost in a float32 solution
    assert list(kept["names"]) == ["x", "t"]
    second = run(RunConfig("burgers", "lm", {"start": "0.5"}, 4.0, seed=1), tmp_path, clock=stand_in)
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, fields(found).name, second.name]


def test_a_finished_run_is_left_alone_and_one_of_other_settings_refused(stand_in: Clock, tmp_path: Path) -> None:
    config = RunConfig("burgers", "lm", {"start": 0.5}, 4.0)
    path = run(config, tmp_path, clock=stand_in)
    before, now = path.read_bytes(), stand_in.now
    assert run(config, tmp_path, clock=stand_in).read_bytes() == before
    assert stand_in.now == now
    other = RunConfig("burgers", "lm", {"start": 0.25}, 4.0)
    with pytest.raises(ValueError, match="holds a run with other settings"):
        run(other, tmp_path, clock=stand_in)
    assert path.read_bytes() == before


def test_an_interrupted_run_leaves_nothing(stand_in: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(_: object, share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(RunConfig("burgers", "lm", {}, 4.0), tmp_path, clock=stand_in, watch=watch)

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        run(RunConfig("burgers", "lm", {}, 4.0, seed=1), tmp_path, clock=stand_in)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_labels_tell_runs_apart() -> None:
    assert RunConfig("burgers", "lm").name == "lm-60s"
    assert RunConfig("burgers", "lm", {}, 0.5, dtype="float32", resample=10, points=500).name == (
        "lm-float32-points500-resample10-0.5s"
    )
    assert RunConfig("burgers", "lm", label="mine").name == "mine"
