"""Trainings that are killed, run out of disk or are held up: a few of those of ``python -m reliability kills``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reliability.kills import Case
from reliability.training import Plan, built, loaded, train

from krylov_descent import checkpoint
from reliability import kills

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(
    ("case", "seed"),
    [
        (Case("kill", 1), 0),
        (Case("kill", 1, "flow"), 1),
        (Case("full disk", 1), 3),
        (Case("slow disk", 1), 5),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_one_process(case: Case, seed: int) -> None:
    record = kills.trial(case, seed, kills=3)
    assert not record["lost"], record
    # The third kill comes from outside, after a while: the training may be over by then.
    assert record["times"] in ((2, 3) if case.trouble == "kill" else (1,))


@pytest.mark.parametrize(
    "case", [Case("kill", 4), Case("full disk", 4), Case("slow rank", 4)], ids=lambda case: case.name
)
def test_four_ranks(case: Case) -> None:
    record = kills.trial(case, 6, kills=2)
    assert not record["lost"], record
    assert record["times"] == (2 if case.trouble == "kill" else 1)


def test_a_checkpoint_that_differs_would_be_noticed(tmp_path: Path) -> None:
    """Otherwise the tests above would show nothing."""
    plan = Plan(str(tmp_path), 2)
    expected = train(None, plan)
    training = kills._Training(plan, Case("kill", 1), expected)
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
