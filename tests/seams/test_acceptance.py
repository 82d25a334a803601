"""An acceptance of a user's own: the loss on A must fall at every step, or the step is rolled back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from krylov_descent import KSD, GaussNewtonFlow
from krylov_descent.objective.objective import BatchLosses, Objective
from krylov_descent.samples.interface import SamplePolicy, StepSets
from krylov_descent.stepping.acceptance import Acceptance, AcceptanceState
from krylov_descent.stepping.gradient_pass import GradientPass
from tests.seams import contract


@dataclass(frozen=True)
class Falling(Acceptance):
    """Rolls back a step after which the loss is not below ``ratio`` times the loss before it."""

    ratio: float = 1.0

    def loss_before(
        self, objective: Objective, sets: StepSets, state: AcceptanceState, losses: BatchLosses, earlier: Tensor
    ) -> float | None:
        return None if losses.mean < self.ratio * state.loss else state.loss

    def after(self, at: GradientPass) -> AcceptanceState:
        return AcceptanceState(at.losses.mean)


def made(ratio: float) -> tuple[nn.Module, KSD, SamplePolicy]:
    model = contract.network()
    return model, KSD(model.parameters(), krylov_dim=4, rollback=Falling(ratio)), contract.quarter()


def make(group: Any) -> tuple[nn.Module, KSD, SamplePolicy]:
    return made(0.97)


def test_what_decides_nothing_is_refused() -> None:
    for method in (KSD, GaussNewtonFlow):
        with pytest.raises(ValueError, match="rollback='no': must be True, False, or an Acceptance"):
            method(contract.network().parameters(), rollback="no")  # type: ignore[arg-type]


def test_it_resumes(tmp_path: Path) -> None:
    contract.resumes_exactly(make, tmp_path)


def test_its_steps_are_atomic() -> None:
    contract.is_atomic(make)


def test_it_decides() -> None:
    """No step is good enough for a ratio of zero: every second one begins where the first began."""
    model, optimizer, sets = made(0.0)
    closure = contract.closure_of(model)
    reports = [optimizer.step(closure, sets) for _ in range(4)]
    assert [report.accepted for report in reports] == [True, False, False, False]
    assert len({report.loss for report in reports}) == 1
    model, optimizer, sets = made(1.0)
    closure = contract.closure_of(model)
    losses = [report.loss for report in (optimizer.step(closure, sets) for _ in range(6)) if report.accepted]
    assert all(after < before for before, after in itertools.pairwise(losses))
