"""``check`` advises the flow where it can be used and was seen to win, and says why elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, CheckReport, GaussNewtonFlow, Growing, Subsets, check
from krylov_descent.flow.sketch import ROWS, sketch_bytes
from tests.least_squares import F64, mlp, pinn


def advice(report: CheckReport) -> str:
    """What was found of the method, once, and never as something wrong."""
    (found,) = [f for f in report.findings if f.name == "method"]
    assert found.status == "ok"
    assert ("GaussNewtonFlow(" in report.line) == found.detail.startswith("GaussNewtonFlow: ")
    assert ("KSD(" in report.line) == found.detail.startswith("KSD: ")
    return found.detail


def slope(model: nn.Module, x: Tensor) -> Tensor:
    """∂u/∂x of the network's first output: what makes a physics-informed network of a model."""
    x = x.clone().requires_grad_()
    (u_x,) = torch.autograd.grad(model(x)[:, 0].sum(), x, create_graph=True)
    return u_x.reshape(len(x), -1)[:, :1]


@pytest.mark.parametrize("krylov_dim", [20, 7])
def test_a_physics_informed_network(krylov_dim: int) -> None:
    model, closure = pinn()
    report = check(closure, model, krylov_dim=krylov_dim)
    assert report.ok
    assert "GaussNewtonFlow: the loss is a mean of squares" in advice(report)
    assert report.line == (
        "from krylov_descent import GaussNewtonFlow\n\noptimizer = GaussNewtonFlow(model.parameters())"
    )
    namespace: dict[str, Any] = {"model": model}
    exec(report.line, namespace)
    optimizer = namespace["optimizer"]
    assert type(optimizer) is GaussNewtonFlow
    before = closure()[0].item()
    for _ in range(3):
        optimizer.step(closure)
    assert closure()[0].item() < before


def test_other_curvatures_have_no_rows() -> None:
    model, closure = pinn()
    for curvature in ("hessian", "fisher"):
        told = advice(check(closure, model, curvature=curvature))
        assert told.startswith("KSD: ")
        assert f"not of curvature='{curvature}'" in told


def test_sets() -> None:
    model, x = mlp(4, 5, 3), torch.randn(60, 4, dtype=F64)

    def closure(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]), logits

    report = check(closure, model, Subsets((x, torch.arange(60) % 3), batch_size=30, seed=0))
    assert "not with sets" in advice(report)


def test_rows_that_do_not_fit() -> None:
    """By what the optimizer itself asks for: it refuses a budget of a byte less."""
    model, closure = pinn()
    n = sum(p.numel() for p in model.parameters())
    taken = sketch_bytes(ROWS, n, F64)
    GaussNewtonFlow(model.parameters(), memory_budget=taken).step(closure)
    with pytest.raises(ValueError, match="Use KSD"):
        GaussNewtonFlow(model.parameters(), memory_budget=taken - 1).step(closure)
    assert advice(check(closure, model, available_memory=2 * taken)).startswith("GaussNewtonFlow: ")
    told = advice(check(closure, model, available_memory=taken))
    assert told.startswith(f"KSD: the sketch of GaussNewtonFlow takes {taken:,} bytes (400 rows)")


def test_losses_that_have_no_rows() -> None:
    model, x = mlp(2, 4, 1), torch.rand(8, 2, dtype=F64)

    def plain() -> tuple[Tensor, Tensor]:
        r = slope(model, x) - 1
        return r.square().mean(), r

    def coupled() -> tuple[Tensor, Tensor]:
        loss, r = plain()
        return loss + r.mean().square(), r

    def beside() -> tuple[Tensor, Tensor]:
        loss, r = plain()
        return loss + sum(p.square().sum() for p in model.parameters()), r

    assert advice(check(plain, model)).startswith("GaussNewtonFlow: ")
    assert "couples rows of the outputs" in advice(check(coupled, model))
    assert "does not pass through the outputs" in advice(check(beside, model))


F = nn.functional
SQUARES = [lambda z, y: F.mse_loss(z, y), lambda z, y: ((z - y) ** 2).sum(), lambda z, y: ((z - y) * (z - y)).mean()]
OTHERS = [
    lambda z, y: F.cross_entropy(z, y.argmax(1)),
    lambda z, y: F.binary_cross_entropy_with_logits(z, (y > 0).to(z.dtype)),
    lambda z, y: (z - y).cosh().log().mean(),
    lambda z, y: z.mean(),
    lambda z, y: F.l1_loss(z, y),
    lambda z, y: F.huber_loss(z, y, delta=0.3),
    lambda z, y: F.smooth_l1_loss(z, y, beta=0.3),
]


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("loss", [*SQUARES, *OTHERS])
def test_it_is_for_least_squares(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    model = mlp(2, 4, 2).to(dtype)
    x, y = torch.rand(30, 2, dtype=dtype), torch.randn(30, 2, dtype=dtype)

    def closure() -> tuple[Tensor, Tensor]:
        z = torch.cat([model(x)[:, :1], slope(model, x)], dim=1)
        return loss(z, y), z

    told = advice(check(closure, model))
    if loss in SQUARES and dtype == F64:
        assert told.startswith("GaussNewtonFlow: ")
    elif loss in SQUARES:
        assert "was ahead in float64" in told
    else:
        assert "not quadratic in the outputs" in told


def test_rows_that_take_a_backward_pass_each() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose1d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(30, 1)).double()
    x = torch.randn(20, 1, 8, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        r = slope(model, x) - 1
        return r.square().mean(), r

    # Few numbers outside of linear layers have columns of their own; more do not.
    assert advice(check(closure, model)).startswith("GaussNewtonFlow: ")
    model[0] = nn.ConvTranspose1d(1, 20, 3).double()
    model[3] = nn.Linear(200, 1).double()
    told = advice(check(closure, model))
    assert "backward pass each here, which is slow: parameters are used by conv_transpose1d (test_advice.py:" in told


def test_a_few_rows_that_take_a_backward_pass_each_do_no_harm() -> None:
    model, x = mlp(2, 5, 1), torch.rand(60, 2, dtype=F64)

    def closure() -> tuple[Tensor, tuple[Tensor, Tensor]]:
        inside, ends = slope(model, x) - 1, model(x[:10])
        periodic = ends - ends.roll(1, 0)
        return inside.square().mean() + periodic.square().mean(), (inside, periodic)

    assert advice(check(closure, model)).startswith("GaussNewtonFlow: ")


def test_points_belong_in_the_first_dimension() -> None:
    model, x = mlp(2, 5, 1), torch.rand(60, 2, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        r = slope(model, x).T - 1
        return r.square().mean(), r

    assert "backward pass each" in advice(check(closure, model))


def test_large_networks() -> None:
    """Of which nobody knows."""
    model, x = mlp(2, 400, 400, 1), torch.rand(4, 2, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        r = slope(model, x) - 1
        return r.square().mean(), r

    assert "timed up to 100,000 parameters, and the model has 162,001" in advice(check(closure, model))


@pytest.mark.parametrize("krylov_dim", [20, 7])
def test_sets_that_grow_go_with_what_is_made_for_them(krylov_dim: int) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    x = torch.randn(200, 3)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        r = model(batch) - batch.sum(1, keepdim=True)
        return r.square().mean(), r

    sets = Growing(x, batch_size=50, start=60, seed=0)
    report = check(closure, model, sets, krylov_dim=krylov_dim)
    assert report.ok
    assert report.line == "from krylov_descent import DEEP, KSD\n\noptimizer = KSD(model.parameters(), **DEEP)"
    scope: dict[str, Any] = {"model": model}
    exec(report.line, scope)
    assert scope["optimizer"].step(closure, sets).preconditioner == "kronecker"


def test_earlier_steps_that_may_not_fit_are_left_out_by_a_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2)).double()
    x = torch.randn(200, 8, dtype=torch.float64)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch)
        return z.square().mean(), z

    sets = Growing(x, batch_size=50, start=200, seed=0)
    memory: dict[str, list[str]] = {"ok": [], "warn": []}
    for available in (10**9, 660_000):  # 540 KiB are needed with them, 485 without, and a fifth is left free
        report = check(closure, model, sets, available_memory=available)
        found = next(finding for finding in report.findings if finding.name == "memory")
        memory[found.status].append(found.detail)
        scope: dict[str, Any] = {"model": model}
        exec(report.line, scope)
        rows = [len(scope["optimizer"].step(closure, sets).ritz_values) for _ in range(4)]
        assert max(rows) == (4 if available == 10**9 else 2)
    assert len(memory["ok"]) == len(memory["warn"]) == 1
    assert "earlier steps may not fit" in memory["warn"][0]


def test_derivatives_by_torch_func() -> None:
    """They do not tell what graphs hold: nothing to fail for, and a step of either method goes well."""
    import_module("krylov_descent.distributed.gathered")  # has hooks of its own, for DTensor parameters alone
    model, x = mlp(2, 6, 1), torch.rand(9, 2, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        def u(p: Tensor) -> Tensor:
            value: Tensor = model(p)[0]
            return value

        r = torch.func.vmap(torch.func.jacrev(torch.func.grad(u)))(x).diagonal(0, 1, 2).sum(1) - 1
        return r.square().mean(), r

    report = check(closure, model)
    assert report.ok
    (memory,) = [f for f in report.findings if f.name == "memory"]
    assert "graphs of B unknown (torch.func does not tell)" in memory.detail
    assert advice(report).startswith("GaussNewtonFlow: ")
    of_flow = GaussNewtonFlow(model.parameters()).step(closure)
    assert of_flow.search_loss_after < of_flow.loss
    with pytest.warns(UserWarning, match="Leave memory_budget out to keep them"):
        budgeted = KSD(model.parameters(), memory_budget=10**8).step(closure)
    assert budgeted.search_loss_after < budgeted.loss
