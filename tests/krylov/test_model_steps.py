"""Steps that take the minimum of the quadratic model: slope of A, curvature of B, looked at on C."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import DEEP, KSD, Growing, ModelSearch, StopReason, Subsets
from tests.samples.test_growing import F64, closure_of, network, regression, steps, theta


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_the_loss_of_a_step_without_a_search_is_that_of_the_point_it_leads_to(dtype: torch.dtype) -> None:
    data = regression(300, 0.1, dtype)
    model = network(dtype)
    optimizer, sets = KSD(model.parameters(), **DEEP), Growing(data, batch_size=300, start=60, seed=0)
    for report in steps(model, optimizer, sets, 5):
        last = report
    assert last.stop_reason is StopReason.MODEL
    (batch,) = sets.draw(4, krylov_dim=1).c
    assert closure_of(model)(batch.data)[0].item() == last.search_loss_after
    assert last.inner_evaluations == 2  # before and after, on C


def test_the_model_has_the_slope_of_C_and_the_curvature_of_B() -> None:
    """Along the gradient on A; B and C are the same samples, outside of A."""
    x, y = regression(400, 0.5)
    model = nn.Linear(12, 2).double()
    before, sets = theta(model), Growing((x, y), batch_size=400, start=200, seed=0)
    report = KSD(model.parameters(), **{**DEEP, "preconditioner": None}).step(closure_of(model), sets)
    assert report.stop_reason is StopReason.MODEL
    assert report.set_sizes == {"A": 200, "B": 64, "C": 64}
    draw = sets.draw(0, krylov_dim=1)
    ((a, target),), ((b, of_b),) = [batch.data for batch in draw.a], [batch.data for batch in draw.b]
    W = before[:24].view(2, 12)
    g, of_c = (
        2 * torch.cat([(r.T @ x).reshape(-1), r.sum(0)]) / r.numel()
        for x, r in ((x, x @ W.T + before[24:] - y) for x, y in ((a, target), (b, of_b)))
    )
    Jg = b @ g[:24].view(2, 12).T + g[24:]
    step = -(g @ of_c) / (2 * Jg.square().sum() / Jg.numel()) * g
    torch.testing.assert_close(theta(model) - before, step)


def test_where_the_model_is_wrong_on_C_the_loss_is_searched_there() -> None:
    w = nn.Parameter(torch.full((3,), 2.0, dtype=F64))
    x = torch.linspace(1, 2, 40, dtype=F64)[:, None]

    def closure(batch: Tensor) -> tuple[Tensor, Tensor]:  # the first Newton step overshoots to where the loss is higher
        z = 5 * batch * w
        return torch.log(torch.cosh(z)).mean(), z

    sets = Subsets(x, batch_size=40, fraction=0.25, seed=0)
    report = KSD([w], search=ModelSearch(agreement=0.5), krylov_dim=1, preconditioner=None).step(closure, sets)
    assert report.stop_reason is not StopReason.MODEL
    (batch,) = sets.draw(0, krylov_dim=1).c
    with torch.no_grad():
        assert float(closure(batch.data)[0]) == pytest.approx(report.search_loss_after, rel=1e-12)
        w.fill_(2.0)
        assert float(closure(batch.data)[0]) == pytest.approx(report.search_loss_before, rel=1e-12)
    assert report.search_loss_after < 0.5 * report.search_loss_before


def test_where_the_model_is_wrong_the_loss_is_searched() -> None:
    w = nn.Parameter(torch.full((3,), 2.0, dtype=F64))

    def closure() -> tuple[Tensor, Tensor]:  # the first Newton step overshoots to where the loss is higher
        return torch.log(torch.cosh(5 * w)).sum(), w

    report = KSD([w], search=ModelSearch(agreement=0.5), krylov_dim=1).step(closure)
    assert report.stop_reason is not StopReason.MODEL
    assert report.search_loss_after < report.search_loss_before
    with pytest.raises(ValueError, match=r"ModelSearch\(agreement=2\): must be in"):
        ModelSearch(agreement=2)


def test_the_model_of_several_krylov_vectors_has_the_slope_of_A() -> None:
    """Products are written over the gradient while the basis is built; the model needs it as it was."""
    x, y = regression(400, 0.5)
    model = nn.Linear(12, 2).double()
    before, sets = theta(model), Subsets((x, y), batch_size=400, fraction=0.25, seed=0)
    optimizer = KSD(model.parameters(), krylov_dim=4, preconditioner=None, search=ModelSearch(agreement=0.01))
    report = optimizer.step(closure_of(model), sets)
    assert report.stop_reason is StopReason.MODEL
    ((b, _),) = [batch.data for batch in sets.draw(0, krylov_dim=4).b]

    def flat(slopes: Tensor, inputs: Tensor) -> Tensor:
        return torch.cat([(slopes.T @ inputs).reshape(-1), slopes.sum(0)])

    r = x @ before[:24].view(2, 12).T + before[24:] - y
    g = 2 * flat(r, x) / r.numel()
    V = optimizer.basis()
    JV = torch.stack([b @ v[:24].view(2, 12).T + v[24:] for v in V])
    H = 2 * torch.einsum("imo,jmo->ij", JV, JV) / JV[0].numel()
    torch.testing.assert_close(theta(model) - before, -V.T @ torch.linalg.solve(H, V @ g), rtol=1e-8, atol=1e-10)
