"""What becomes of a step that a search found: taken where it holds on C as rounded, and where errors say they fell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from krylov_descent import StopReason
from krylov_descent.distributed import RankError, SingleProcess
from krylov_descent.objective.objective import Objective
from krylov_descent.samples.interface import Stateless, StepKey
from krylov_descent.samples.subsets import Draw
from krylov_descent.stepping.gradient_pass import GradientPass
from krylov_descent.stepping.search_result import LOST_IN_ROUNDING, SearchResult, at_rest, take
from krylov_descent.stepping.step_log import StepLog
from tests.stepping.test_acceptance import F64, at_one


def beginning(objective: Objective, draw: Draw) -> GradientPass:
    """Where a step begins: the parameters as they are."""
    here = objective.point()
    losses, g = objective.value_and_gradient(draw.a)
    seen = losses, g, float(g.norm()), None, None, None, True, Stateless()
    return GradientPass(objective, draw, StepKey(0, 0), lambda: here, *seen)


def found(d: Tensor | None, before: float, after: float, *, exact: bool = False) -> SearchResult:
    return SearchResult(d, before, after, 1, 2, StopReason.CONVERGED, (1.0,), exact)


@contextmanager
def forward_passes(objective: Objective) -> Iterator[list[float]]:
    """How many sample gradients were computed within."""
    spent: list[float] = []
    before = objective.sample_gradients
    yield spent
    spent.append(objective.sample_gradients - before)


@pytest.mark.parametrize(("before", "taken"), [(1.0, True), (1 - 1e-15, True), (0.99, False)])
def test_a_step_that_raised_the_loss_on_C_is_not_taken(before: float, taken: bool) -> None:
    """Up to rounding; the loss at w = 1, where the step leads, is 1."""
    w, objective, draw = at_one()
    with torch.no_grad():
        w.fill_(3.0)
    at = beginning(objective, draw)
    d, result = take(at, found(torch.tensor([-2.0], dtype=F64), before, 0.5))
    assert w.item() == (1.0 if taken else 3.0)
    if taken:
        assert d is not None
        assert d.item() == -2.0
        assert result.after == 1.0
        assert (result.stop_reason, at.notes) == (StopReason.CONVERGED, [])
    else:
        assert d is None
        assert result.after == before
        assert result.coefficients == ()
        assert (result.stop_reason, at.notes) == (StopReason.NOISE, [LOST_IN_ROUNDING])


def test_a_loss_that_was_computed_at_the_very_point_is_not_computed_again() -> None:
    for exact in (True, False):
        w, objective, draw = at_one()
        at = beginning(objective, draw)
        with forward_passes(objective) as spent:
            d, result = take(at, found(torch.tensor([-0.5], dtype=F64), 1.0, 0.125, exact=exact))
        assert d is not None
        assert w.item() == 0.5
        assert result.after == (0.125 if exact else 0.25)
        assert (spent == [0.0]) == exact


def test_where_nothing_was_found_the_parameters_are_put_back() -> None:
    w, objective, draw = at_one()
    at = beginning(objective, draw)
    with torch.no_grad():
        w.fill_(7.0)  # where a search has ended
    d, result = take(at, at_rest(at, Stateless()))
    assert d is None
    assert w.item() == 1.0
    assert (result.before, result.after) == (1.0, 1.0)
    assert result.stop_reason is StopReason.ZERO_GRADIENT


@pytest.mark.parametrize("phase", ["gradient", "basis", "search"])
def test_an_error_of_ranks_says_in_which_phase_it_fell(phase: str) -> None:
    def step() -> None:
        with StepLog(SingleProcess()) as log:
            for done in ("gradient", "basis", "search"):
                if done == phase:
                    raise RankError("another rank failed", connected=True)
                log.lap(done)

    with pytest.raises(RankError, match=f"During the {phase}: another rank failed"):
        step()
