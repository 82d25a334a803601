"""Which rows a sketch draws: chances, draws with just these chances, and sketches that stand for all rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from krylov_descent.flow.row_sampling import chances, systematic
from krylov_descent.flow.sketch import Sketcher
from krylov_descent.samples.subsets import Microbatch
from tests.least_squares import F64, mlp, objective_of


def test_chances_are_even_unless_some_rows_stand_out() -> None:
    torch.manual_seed(0)
    usual = 1 + torch.rand(50, dtype=F64)
    torch.testing.assert_close(chances(usual, 10), torch.full((50,), 0.2, dtype=F64))
    usual[7] = 1e6
    chance = chances(usual, 10)
    assert float(chance[7]) == 1
    torch.testing.assert_close(torch.cat([chance[:7], chance[8:]]), torch.full((49,), 9 / 49, dtype=F64))
    for size in (torch.zeros(50, dtype=F64), torch.full((50,), 1e308, dtype=F64)):  # nothing is known of them
        torch.testing.assert_close(chances(size, 10), torch.full((50,), 0.2, dtype=F64))
    torch.testing.assert_close(chances(usual, 50), torch.ones(50, dtype=F64))
    assert chances(usual[:0], 0).shape == systematic(usual[:0], 0, torch.Generator()).shape == (0,)
    alone = torch.zeros(50, dtype=F64)
    alone[3] = 1.0
    torch.testing.assert_close(chances(alone, 1).sum(), torch.ones((), dtype=F64))


@pytest.mark.parametrize("s", [1, 5, 17])
def test_rows_are_drawn_with_just_their_chances(s: int) -> None:
    torch.manual_seed(0)
    chance = chances(torch.randn(20, dtype=F64).exp().pow(4), s)
    assert float(chance.sum()) == pytest.approx(s)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.zeros(20, dtype=F64)
    for _ in range(4000):
        S = systematic(chance, s, generator)
        assert len(S) == s
        assert bool((S.diff() > 0).all())
        drawn[S] += 1
    torch.testing.assert_close(drawn / 4000, chance, rtol=0, atol=0.03)  # four standard deviations


def test_sketches_stand_for_all_rows_where_few_hold_the_loss() -> None:
    """The mean over many draws of JᵀJ and Jᵀρ; the row that stands out is in every one, with weight 1."""
    torch.manual_seed(0)
    model, x = mlp(2, 3, 1), torch.rand(40, 2, dtype=F64)
    y = torch.zeros(40, dtype=F64)
    y[11] = 30.0

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x)[:, 0] - y
        return r.square().mean(), r

    objective = objective_of(model, closure)
    whole = Sketcher(40).draw(objective, [Microbatch(None, None)], (0,))
    assert whole.whole
    H, g = torch.zeros_like(whole.J.T @ whole.J), torch.zeros_like(whole.J[0])
    draws = 600
    largest = whole.rho.abs().max()
    for i in range(draws):
        sketch = Sketcher(8).draw(objective, [Microbatch(None, None)], (i,))
        assert len(sketch.J) == 8
        assert float(sketch.rho.abs().max()) == pytest.approx(float(largest))
        H += sketch.J.T @ sketch.J / draws
        g += sketch.J.T @ sketch.rho / draws
    torch.testing.assert_close(H, whole.J.T @ whole.J, rtol=0, atol=0.1 * float((whole.J.T @ whole.J).norm()))
    torch.testing.assert_close(g, whole.J.T @ whole.rho, rtol=0.05, atol=0.01 * float(g.norm()))
