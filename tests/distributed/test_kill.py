"""Trainings under torchrun that lose a rank; ``python -m tests.distributed.kill_loop`` has many more of them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from reliability.training import Death, Plan

from krylov_descent import KSD, checkpoint
from tests.distributed import kill_loop
from tests.distributed.runs import model_of

pytestmark = pytest.mark.nightly


def test_killed_in_the_search_and_in_a_save_it_ends_as_if_left_alone(tmp_path: Path) -> None:
    expected = kill_loop.left_alone(Plan(str(tmp_path / "alone"), kill_loop.STEPS), kill_loop.R)
    assert expected[0]["undone"]  # the state has then all that it can have
    events = expected[0]["events"]
    assert events["search"] > 3
    deaths = [Death("kill", 0, 2, "save", events["save"] // 2), Death("kill", 3, 7, "search", 3)]
    plan = Plan(str(tmp_path / "killed"), kill_loop.STEPS, deaths=deaths)
    assert kill_loop.compare(plan, *kill_loop.torchrun(plan, kill_loop.R, 2), expected) == []
    assert [died["phase"] for died in kill_loop.entries(plan, "deaths")] == ["save", "search"]
    for text, wrong in kill_loop.continue_elsewhere(tmp_path, expected):
        assert not wrong, text


def test_a_step_that_is_forgotten_would_be_noticed(tmp_path: Path) -> None:
    """Otherwise the test above would show nothing."""
    whole = kill_loop.left_alone(Plan(str(tmp_path / "alone"), 4), 2)
    plan = Plan(str(tmp_path / "half"), 2)
    kill_loop.left_alone(plan, 2)
    model = model_of("mlp", torch.float64)
    optimizer = KSD(model.parameters(), krylov_dim=5)
    path = tmp_path / "half" / "run.safetensors"
    extra = checkpoint.load(path, model, optimizer)
    state = optimizer.whole_state()
    forgotten = {**state.vectors, "last_step": torch.zeros_like(state.vectors["last_step"])}
    optimizer.load_whole_state(state._replace(vectors=forgotten))
    checkpoint.save(path, model, optimizer, extra=extra)
    changed = kill_loop.left_alone(Plan(plan.directory, 4), 2)
    for key in kill_loop.SAME:
        assert changed[0][key] != whole[0][key]


def test_torchrun_ends_a_job_in_which_a_rank_hangs(tmp_path: Path) -> None:
    seconds = 4.0
    plan = Plan(str(tmp_path / "hung"), 6, timeout=seconds, deaths=[Death("hang", 1, 2, "search", 3)])
    code, errors = kill_loop.torchrun(plan, 2, 0)
    ended = time.monotonic()
    assert code == 1
    assert "During the search: Rank 0 of 2 lost the others" in errors
    (hung,) = kill_loop.entries(plan, "deaths")
    assert ended - hung["time"] < 4 * seconds
    assert [entry["iteration"] for entry in kill_loop.entries(plan, "losses")] == [0, 1]
