"""What goes wrong on one rank is known to all, in the same step, and none waits for ever."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from reliability.phases import STEP
from reliability.processes import running

from krylov_descent import Search
from tests.distributed import fault_runs
from tests.distributed.pool import Pool

R = 4
#: Seconds for which a rank is late, in each phase of a step; below the timeout of the pool, a minute.
DELAY = float(os.environ.get("KRYLOV_DESCENT_TEST_DELAY", "1"))
TIMEOUT = 4.0


@pytest.mark.nightly
def test_all_wait_for_one_that_is_late(pool: Pool) -> None:
    prompt = pool.run(R, fault_runs.delayed, 0.0)
    for late in pool.run(R, fault_runs.delayed, DELAY):
        for found, expected in zip(late, prompt[0], strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("loader", "fraction"),
    [
        (False, 0.2),
        pytest.param(False, 0.04, marks=pytest.mark.nightly),
        pytest.param(True, 0.2, marks=pytest.mark.nightly),
    ],
)
def test_what_raises_on_one_rank_raises_on_all(pool: Pool, loader: bool, fraction: float) -> None:
    steps = 3 if fraction == 0.2 else 6
    results = pool.run(R, fault_runs.raising, loader, fraction, steps)
    assert len(results[0]["failures"]) == 2 + 2 * len(STEP) * steps
    for rank, result in enumerate(results):
        for step, phase, bad, kind, text, restored in result["failures"]:
            where = f"step {step}, {phase}, rank {rank}"
            assert restored, where
            if rank == bad:
                assert kind == "OSError", where
                assert text.startswith("boom at "), where
            else:
                during = "" if phase == "check" else f"During the {phase}: "
                assert kind == "RankError, connected", where
                assert text.startswith(
                    f"{during}Rank {bad} of {R} failed, so that rank {rank} cannot go on: OSError: boom at "
                ), (where, text)
        assert all(result["same"])  # a step that follows is that of a run in which nothing ever failed
        assert result["undone"] == (fraction < 0.2)  # then failures while a step is undone are among them


def test_nan_on_one_rank_at_the_start_is_the_same_error_everywhere(pool: Pool) -> None:
    results = pool.run(R, fault_runs.with_nan, "all", range(99), 1, 1, 0)
    start = fault_runs.Run(None).theta()
    for result in results:
        assert result["said"][0] == "ValueError"
        assert result["said"][1].startswith("The loss on A is nan at the current parameters")
        assert result["said"] == results[0]["said"]
        assert torch.equal(result["theta"], start)


@pytest.mark.parametrize(
    ("phase", "calls", "at"),
    [
        ("search", range(1, 2), 0),  # the first trial
        ("search", range(2, 9), 1),
        ("search", range(1, 99), 1),  # every trial
        ("basis", range(1), 1),
        ("gradient", range(1), 2),  # at a point that was not there in the step before: undone
    ],
)
def test_nan_on_one_rank_later_is_met_as_in_one_process(pool: Pool, phase: str, calls: range, at: int) -> None:
    results = pool.run(R, fault_runs.with_nan, phase, calls, 2, 4, at)
    one = fault_runs.with_nan(None, phase, calls, 0, 4, at)
    assert one["said"][0] == "nothing"
    for result in results:
        assert torch.equal(result["theta"], results[0]["theta"])
        assert bool(result["theta"].isfinite().all())
        for key in ("said", "evaluations", "stops", "accepted", "notes"):
            assert result[key] == one[key], key
        for key in ("losses", "after"):
            assert result[key] == pytest.approx(one[key], rel=1e-10), key
    if len(calls) > 90:
        assert "NON_FINITE" in one["stops"]
    if phase == "gradient":
        assert not all(one["accepted"])
    if phase == "basis":
        assert any(one["notes"])


@pytest.mark.parametrize(
    ("what", "settings", "named"),
    [
        ("values", {}, "values of the parameters"),
        ("number", {}, "number of parameters"),
        ("iteration", {}, "iteration"),
        ("seed", {"seed": 1}, "seed"),
        ("krylov_dim", {"krylov_dim": 4}, "krylov_dim"),
        ("search", {"search": Search(iterations=1)}, "settings"),
        ("weight_decay", {"weight_decay": 0.1}, "settings"),
        ("curvature", {"curvature": "hessian"}, "settings"),
        ("previous", {"previous": None}, "settings"),
        ("preconditioner", {"preconditioner": None}, "settings"),
        ("rollback", {"rollback": False}, "settings"),
        ("nan", {}, "samples"),
        ("order", {}, "samples"),
    ],
)
def test_ranks_that_differ_are_told(pool: Pool, what: str, settings: dict[str, Any], named: str) -> None:
    for kind, text in pool.run(R, fault_runs.different, what, settings):
        assert kind == "ValueError"
        assert text.startswith("The ranks do not start from the same state: they differ in ")
        assert named in text


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "hung"])
def test_a_rank_that_is_gone_ends_the_others(tmp_path: Path, kill: bool) -> None:
    bad = dict(zip(STEP, (0, 2, 3), strict=True))
    with ExitStack() as stack:
        runs = {
            phase: stack.enter_context(
                running(R, TIMEOUT, fault_runs.ending, phase, bad[phase], kill, str(tmp_path / phase))
            )
            for phase in STEP
        }
        for phase, run in runs.items():
            others = [rank for rank in range(R) if rank != bad[phase]]
            ended = run.ends(others)
            for rank in others:
                assert ended[rank].code == 0
                seconds, kind, text, as_before = ended[rank].result
                assert kind == "RankError, lost"
                assert as_before, (phase, rank)  # without a word from those who are gone
                assert text.startswith(f"During the {phase}: Rank {rank} of {R} lost the others")
                assert seconds < TIMEOUT / 2 if kill else TIMEOUT / 2 < seconds < 2 * TIMEOUT
            assert ended[bad[phase]].code == (-signal.SIGKILL if kill else None)
