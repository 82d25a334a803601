"""The objective on a set: values, slopes and gradients are those of one weighted mean, weight decay included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from krylov_descent.distributed import SingleProcess
from krylov_descent.objective.objective import Objective
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.vectors.parameters import ParameterVector

F64 = torch.float64


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_value_gradient_and_slope_are_those_of_the_weighted_mean(decay: float) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(10, 3, dtype=F64)
    params = list(model.parameters())
    objective = Objective(
        lambda rows: (model(rows).pow(4).mean(), model(rows)),
        ParameterVector([{"params": params, "weight_decay": decay}]),
        SingleProcess(),
    )
    batches = [Microbatch(part, len(part)) for part in (x[:7], x[7:])]
    expected: Tensor = model(x).pow(4).mean() + decay / 2 * sum(p.square().sum() for p in params)
    g = torch.cat([p.reshape(-1) for p in torch.autograd.grad(expected, params)])
    along = torch.randn(8, dtype=F64)
    found = objective.differentiate(batches, along=along)
    assert found.losses.mean == pytest.approx(expected.item(), rel=1e-14)
    assert found.slope == pytest.approx(float(g @ along), rel=1e-12)
    torch.testing.assert_close(found.gradient(), g)
    assert objective.value(batches).mean == pytest.approx(expected.item(), rel=1e-14)
