"""A step may end where the loss is finite and its gradient is not: the run goes back, and on from there."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import DEEP, KSD, PAPER, EndReason, GaussNewtonFlow, Growing, StopReason, Subsets

N = 50


def solvable(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A linear regression with an exact solution: RMSE has no gradient there."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, 3, generator=generator, dtype=dtype).round()
    x[:, 0] += 10  # no row of zeros
    return x, x @ torch.tensor([1.0, -2.0, 3.0], dtype=dtype)


def rmse(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    r = x @ w - y
    return r.square().mean().sqrt(), r


METHODS: dict[str, Callable[[Tensor], Any]] = {
    "paper": lambda w: KSD([w], **{**PAPER, "krylov_dim": 3}),
    "default": lambda w: KSD([w], krylov_dim=3),
    "deep": lambda w: KSD([w], **DEEP),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_exactly_solved_rmse_never_raises(method: str, dtype: torch.dtype) -> None:
    for seed in range(4):
        x, y = solvable(seed, dtype)
        w = nn.Parameter(torch.zeros(3, dtype=dtype))
        optimizer = METHODS[method](w)
        first = rmse(w, x, y)[0].item()
        for _ in range(12):
            report = optimizer.step(lambda w=w, x=x, y=y: rmse(w, x, y))
            assert math.isfinite(report.loss)
            assert math.isfinite(report.grad_norm)
        assert rmse(w, x, y)[0].item() < 1e-2 * first


def absolute(w: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    r = x @ w - y
    return r.square().sqrt().mean(), r


def edge(w: Tensor) -> Tensor:
    """Finite for w ≥ 1, with an infinite slope at its lowest point, w = 1."""
    return (w - 1).sqrt().sum() + 0.1 * w.square().sum()


def at_the_edge() -> tuple[nn.Parameter, KSD]:
    """A run whose first step ends at w = 1."""
    w = nn.Parameter(torch.tensor([4.0]))
    optimizer = KSD([w], krylov_dim=6, curvature="hessian", rollback=False)
    optimizer.step(lambda: edge(w))
    assert w.item() == 1.0
    return w, optimizer


def test_the_step_after_goes_back_and_ends_where_the_gradient_is_finite() -> None:
    w, optimizer = at_the_edge()
    report = optimizer.step(lambda: edge(w))
    assert not report.accepted
    assert report.loss == pytest.approx(float(edge(torch.tensor([4.0]))))
    assert any("not finite" in note for note in report.notes)
    assert 1 < w.item() < 4
    for _ in range(5):
        report = optimizer.step(lambda: edge(w))
        assert report.accepted  # every later step ends at a finite gradient
    assert w.item() == pytest.approx(1, abs=1e-6)


def test_a_run_that_was_saved_there_goes_on_as_the_run_itself() -> None:
    w, optimizer = at_the_edge()
    state = copy.deepcopy(optimizer.state_dict())
    again = nn.Parameter(w.detach().clone())
    resumed = KSD([again], krylov_dim=6, curvature="hessian", rollback=False)
    resumed.load_state_dict(state)
    for _ in range(3):
        optimizer.step(lambda: edge(w))
        resumed.step(lambda: edge(again))
        assert torch.equal(w, again)


def test_where_every_lower_point_has_no_gradient_the_run_ends_with_a_reason() -> None:
    w = nn.Parameter(torch.tensor([4.0]))

    def closure(batch: Tensor) -> Tensor:
        """A loss whose gradient by sample 0 is not finite anywhere below 4; C seldom has that sample."""
        loss = 0.1 * w.square().sum()
        return loss + 0 * (w - w.detach()).square().sum().sqrt() if w.item() < 4 and bool((batch == 0).any()) else loss

    sets = Subsets(torch.arange(100), batch_size=100, fraction=0.02, seed=0)
    run = KSD([w], krylov_dim=1, curvature="hessian").run(closure, sets, max_steps=30, patience=4)
    reports = list(run)
    assert run.reason is EndReason.PATIENCE
    assert reports[-1].stop_reason is StopReason.NON_FINITE
    assert w.item() == 4.0


def test_no_pass_is_added_where_all_gradients_are_finite() -> None:
    calls = 0

    def closure(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        r = batch[0] @ w - batch[1]
        return r.square().mean(), r

    x, y = solvable(0, torch.float64)
    counts = []
    for wary in (False, True):
        w = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        optimizer = KSD([w], **{**PAPER, "krylov_dim": 3})
        sets = Subsets((x, y), batch_size=N, fraction=0.3, seed=0)
        optimizer.step(closure, sets)
        optimizer.state[w]["numbers"]["wary"] = wary
        calls = 0
        optimizer.step(closure, sets)
        counts.append(calls)
    assert counts[1] == counts[0] + 1  # the gradient on A where the step ended


def test_growing_sets_go_back_and_on() -> None:
    x, y = solvable(1, torch.float32)
    w = nn.Parameter(torch.zeros(3))
    optimizer, sets = KSD([w], **DEEP), Growing((x, y), batch_size=N, start=20, seed=0)
    for _ in range(15):
        report = optimizer.step(lambda batch: absolute(w, *batch), sets)
        assert math.isfinite(report.grad_norm)


def test_the_flow_goes_back_and_on() -> None:
    w = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    start, broken = w.detach().clone(), False

    def closure() -> tuple[Tensor, Tensor]:
        loss = w.square().mean()
        if broken and not torch.equal(w.detach(), start):
            loss = loss + 0 * (w - w.detach()).square().sum().sqrt()  # 0 · ∞ in its gradient
        return loss, w

    optimizer = GaussNewtonFlow([w])
    optimizer.step(closure)
    broken = True
    report = optimizer.step(closure)
    assert not report.accepted
    assert report.stop_reason is StopReason.NON_FINITE
    assert torch.equal(w, start)
    broken = False
    assert optimizer.step(closure).search_loss_after < report.loss
