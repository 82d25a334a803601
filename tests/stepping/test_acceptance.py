"""Acceptance: whether the last step raised the loss on A, by a difference that scatter does not explain."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Growing, Subsets
from krylov_descent.distributed import SingleProcess
from krylov_descent.objective.objective import BatchLosses, Objective
from krylov_descent.samples.subsets import Draw
from krylov_descent.stepping.acceptance import _standard_error, better_before
from krylov_descent.vectors.parameters import ParameterVector

F64 = torch.float64


def at_one() -> tuple[nn.Parameter, Objective, Draw]:
    """f = mean (w − t)² over forty samples t = 0, at w = 1, and sets of these."""
    w = nn.Parameter(torch.ones(1, dtype=F64))
    parameters = ParameterVector([{"params": [w], "weight_decay": 0.0}])
    sets = Subsets(torch.zeros(40, 1, dtype=F64), batch_size=10, fraction=0.25, seed=0)
    objective = Objective(lambda t: (w - t).square().mean(), parameters, SingleProcess())
    return w, objective, sets.draw(0, krylov_dim=2)


def losses(values: Iterable[float], weights: Iterable[float]) -> BatchLosses:
    values, weights = tuple(values), tuple(weights)
    total = math.fsum(weights)
    return BatchLosses(values, weights, math.fsum(w * x for w, x in zip(weights, values, strict=True)) / total, total)


def test_the_standard_error_is_that_of_a_weighted_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.rand(9, generator=generator, dtype=F64) * 7 + 1
    old, new = (torch.randn(9, generator=generator, dtype=F64) for _ in range(2))
    _, objective, _ = at_one()
    found = _standard_error(losses(old.tolist(), w.tolist()), losses(new.tolist(), w.tolist()), objective)
    d = new - old
    mean = (w * d).sum() / w.sum()
    scatter = (w * (d - mean)).square().sum() * 9 / 8
    assert found == pytest.approx(float(scatter.sqrt() / w.sum()), rel=1e-12)
    assert _standard_error(losses([1.0], [2.0]), losses([3.0], [2.0]), objective) == math.inf


@pytest.mark.parametrize(("earlier", "better"), [(0.1, True), (2.0, False)])
def test_looking_back_leaves_the_parameters_where_they_are(earlier: float, better: bool) -> None:
    w, objective, draw = at_one()
    found = better_before(objective, draw, losses([1.0] * 4, [10.0] * 4), torch.tensor([earlier], dtype=F64), 0.5)
    assert (found is not None) == better
    assert w.item() == 1.0
    if better:
        assert found == pytest.approx(earlier**2)


@pytest.mark.parametrize(("scatter", "undone"), [(0.0, True), (1e3, False)])
def test_a_rise_within_two_standard_errors_is_noise(scatter: float, undone: bool) -> None:
    """The loss on a subset A rises everywhere alike, or by an average of what scatters much more."""
    generator = torch.Generator().manual_seed(0)
    slopes = 1 + scatter * torch.randn(200, 1, generator=generator, dtype=F64)
    slopes += 1 - slopes.mean()
    w = nn.Parameter(torch.ones(1, dtype=F64))
    parameters = ParameterVector([{"params": [w], "weight_decay": 0.0}])
    objective = Objective(lambda s: (s * w).mean(), parameters, SingleProcess())
    sets = Subsets(slopes, batch_size=5, fraction=0.1, gradient_fraction=0.9, seed=0)
    draw = sets.draw(0, krylov_dim=2)
    now = objective.value(draw.a)
    found = better_before(objective, draw, now, torch.zeros(1, dtype=F64), now.mean - 0.5)
    assert now.mean > 0.5
    assert (found is not None) == undone


def test_every_step_that_is_undone_doubles_C() -> None:
    """The loss on A is flat and that on a fresh C falls steeply: most steps fit C alone."""
    torch.manual_seed(0)
    x = torch.randn(400, 30, dtype=F64)
    y = torch.randn(400, 1, dtype=F64)
    model = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 1)).double()

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        r = model(batch[0]) - batch[1]
        return r.square().mean(), r

    optimizer, sets = KSD(model.parameters(), krylov_dim=5), Subsets((x, y), batch_size=400, fraction=0.02, seed=0)
    reports = [optimizer.step(closure, sets) for _ in range(8)]
    undone = 0
    for report in reports:
        undone += not report.accepted
        assert report.set_sizes["C"] == min(8 << undone, 400 - 8)
    assert undone >= 2


def test_a_step_to_where_the_loss_is_not_finite_is_undone_by_every_rule() -> None:
    for rollback, settles in ((True, True), (False, True), (False, False)):
        torch.manual_seed(0)
        w, broken = nn.Parameter(torch.ones(3, dtype=F64)), [False]

        def closure(batch: Tensor, w: nn.Parameter = w, broken: list[bool] = broken) -> tuple[Tensor, Tensor]:
            moved = not torch.equal(w.detach(), torch.ones(3, dtype=F64))
            r = batch - w * (torch.nan if broken[0] and moved else 1.0)
            return r.square().mean(), r

        sets = Growing(torch.randn(200, 3, dtype=F64), batch_size=50, start=40, seed=0)
        optimizer = KSD([w], krylov_dim=1, rollback=rollback)
        optimizer.step(closure, sets)
        broken[0] = True
        undone = optimizer.settle(closure, sets) if settles else optimizer.step(closure, sets)
        assert not undone.accepted
        assert torch.equal(w.detach(), torch.ones(3, dtype=F64))
