"""Compiled passes: the same steps as without, noticed changes of the closure, and what cannot be traced."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Subsets
from tests import problems
from tests.convergence import float64_problem


@pytest.fixture(autouse=True)
def _compiler_warnings() -> Any:
    # torch's own, of its compiler; ours is a UserWarning that names compile=True.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def test_a_pinn_takes_the_same_steps() -> None:
    """It differentiates inside the closure, which torch.compile on the closure refuses."""
    losses = []
    for compile in (False, True):
        model, closure = float64_problem("pinn", 0)
        optimizer = KSD(model.parameters(), krylov_dim=5, compile=compile)
        losses.append([optimizer.step(closure).search_loss_after for _ in range(4)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert optimizer._compiled is not None
    assert len(optimizer._compiled._graphs) == 1
    assert not copy.deepcopy(optimizer)._compiled._graphs  # type: ignore[union-attr]


def test_new_data_in_the_closure_and_new_shapes_are_noticed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    state = {"x": torch.randn(20, 2, dtype=torch.float64)}

    def closure() -> tuple[Tensor, Tensor]:
        r = model(state["x"]) - state["x"].prod(1, keepdim=True)
        return r.square().mean(), r

    reports = []
    for compile in (False, True):
        trained = copy.deepcopy(model)
        optimizer = KSD(model.parameters(), krylov_dim=3, compile=compile)
        torch.manual_seed(1)
        steps = []
        for _ in range(3):
            state["x"] = torch.randn(20, 2, dtype=torch.float64)
            steps.append(optimizer.step(closure).search_loss_after)
        reports.append(steps)
        model.load_state_dict(trained.state_dict())
    assert reports[1] == pytest.approx(reports[0], rel=1e-6)


def test_micro_batches_with_weights() -> None:
    """Two shapes of micro-batch, weights that are tensors, one micro-batch masked altogether."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 3, dtype=torch.float64), torch.randn(60, dtype=torch.float64)
    keep = torch.rand(60, dtype=torch.float64).round()
    losses = []
    for compile in (False, True):
        torch.manual_seed(2)
        model = nn.Linear(3, 1).double()

        def closure(batch: Any, model: nn.Module = model) -> tuple[Tensor, Tensor, Tensor]:
            z = model(batch["x"])
            weight = batch["keep"].sum()
            return (batch["keep"] * (z[:, 0] - batch["y"]).square()).sum() / weight, z, weight

        data = [{"x": a, "y": b, "keep": c} for a, b, c in zip(x, y, keep, strict=True)]
        sets = Subsets(data, batch_size=8, fraction=0.3, seed=0)
        optimizer = KSD(model.parameters(), krylov_dim=3, compile=compile)
        losses.append([optimizer.step(closure, sets).search_loss_after for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    assert len(optimizer._compiled._graphs) >= 2  # type: ignore[union-attr]


def test_what_cannot_be_traced_runs_without() -> None:
    problem = problems.mlp()
    inner = problem.closure

    def closure(batch: Any) -> tuple[Tensor, Any]:
        loss, z = inner(batch)
        return loss * (2.0 if z.sum().item() > 1e6 else 1.0), z

    sets = Subsets(problem.data, batch_size=4, fraction=0.4, seed=0)
    optimizer = KSD(problem.params, krylov_dim=2, compile=True)
    with pytest.warns(UserWarning, match="compile=True has no effect here.*item"):
        first = optimizer.step(closure, sets)
    assert first.search_loss_after < first.search_loss_before
    optimizer.step(closure, sets)  # and says so once


def test_batches_that_cannot_be_told_apart_run_without() -> None:
    """A leaf without a hash, as an array has none, cannot name a graph."""

    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

    problem = problems.mlp()
    inner = problem.closure
    data = [(x, y, Unhashable()) for x, y in zip(*problem.data, strict=True)]

    def stacked(samples: list[Any]) -> tuple[Tensor, Tensor, Unhashable]:
        return torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples]), samples[0][2]

    sets = Subsets(data, batch_size=4, fraction=0.4, seed=0, collate_fn=stacked)
    optimizer = KSD(problem.params, krylov_dim=2, compile=True)
    with pytest.warns(UserWarning, match="compile=True has no effect here.*unhashable"):
        report = optimizer.step(lambda batch: inner(batch[:2]), sets)
    assert report.search_loss_after < report.search_loss_before
