"""That the judge of killed trainings can tell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reliability.training import Plan, built, loaded, train

from krylov_descent import checkpoint
from reliability import kills

pytestmark = pytest.mark.nightly


def test_ranks_that_survive_must_say_so_restored_and_in_time(tmp_path: Path) -> None:
    training = kills._Training(Plan(str(tmp_path), 2), 3, {})
    said = {"rank": 1, "said": "RankError: Rank 1 of 3 lost the others", "changed": [], "time": 11.0}
    training._judge_survivors({"time": 10.0}, [said])
    assert training.wrong == []
    training._judge_survivors({"time": 10.0}, [{**said, "said": "RuntimeError: Connection closed"}])
    training._judge_survivors({"time": 10.0}, [{**said, "changed": ["parameters"]}])
    training._judge_survivors({"time": 10.0}, [{**said, "time": 11.0 + kills.BOUND}])
    assert len(training.wrong) == 3


def test_a_checkpoint_that_differs_would_be_noticed(tmp_path: Path) -> None:
    """Otherwise the trials would show nothing."""
    plan = Plan(str(tmp_path), 2)
    expected = train(None, plan)
    training = kills._Training(plan, 1, expected)
    training._compare_newest()
    assert training.wrong == []
    model, optimizer = built(plan)
    assert loaded(plan, model, optimizer) == 2
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-15
    checkpoint.save(plan.checkpoint, model, optimizer, extra={"steps": 2})
    training._compare_newest()
    assert training.wrong == ["the checkpoint after 2 steps has other bits"]
    checkpoint.save(plan.checkpoint, *built(plan), extra={"steps": 0})
    training._compare_newest()
    training._compare_end(dict.fromkeys(kills.SAME, "other"))
    assert "the newest checkpoint is of 0 steps, and 1 were saved" in training.wrong
    assert len(training.wrong) == 4
