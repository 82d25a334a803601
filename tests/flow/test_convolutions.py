"""Jacobian rows of convolutions are those of autograd, and few backward passes suffice for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent.flow.jacobian_rows import write_rows
from krylov_descent.flow.owners import Owners
from krylov_descent.flow.taps import Taps
from tests.least_squares import F64


def values(model: nn.Module, x: Tensor) -> Tensor:
    u: Tensor = model(x)
    return u.sum(1)


def derivatives(model: nn.Module, x: Tensor) -> Tensor:
    """A nonlinear function of first and second derivatives by the inputs."""
    u = values(model, x)
    (u_x,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    return (u_xx * u_x).flatten(1).sum(1) + u


def single(model: nn.Module, x: Tensor) -> Tensor:
    """Samples without a dimension of samples."""

    def u(p: Tensor) -> Tensor:
        value: Tensor = model[:3](p).square().sum()  # type: ignore[index]
        return value

    slopes: Tensor = torch.func.vmap(torch.func.grad(u))(x)
    return slopes.square().flatten(1).sum(1) + values(model, x)


def forward(model: nn.Module, x: Tensor) -> Tensor:
    along: Tensor = torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]
    return along.sum(1)


@pytest.mark.parametrize("z_of", [values, derivatives, single, forward])
@pytest.mark.parametrize(
    ("dims", "options"),
    [
        (1, {}),
        (1, {"stride": 2, "padding": 3, "dilation": 2}),
        (1, {"padding": "same", "bias": False}),
        (1, {"padding": "same", "padding_mode": "circular"}),
        (2, {}),
        (2, {"stride": (1, 2), "padding": (2, 0), "dilation": (2, 1)}),
        (2, {"padding": "same", "dilation": 2}),
        (3, {"stride": 2, "padding": 1}),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")  # of torch's own forward derivatives
def test_rows_are_those_of_autograd(
    dims: int, options: dict[str, Any], z_of: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    torch.manual_seed(0)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    first, second = layer(2, 3, 3, **options), layer(3, 4, 2)
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)).double()
    x = torch.randn(5, 2, *(6, 7, 5)[:dims], dtype=F64, requires_grad=True)
    model(x)
    params = list(model.parameters())
    with Taps(params) as taps:
        z = z_of(model, x)
    plain = z_of(model, x)
    torch.testing.assert_close(z, plain, rtol=1e-12, atol=1e-12)
    colours = Owners().learn(taps, z)
    assert colours is not None
    assert len(colours) == 1
    rows = [p.new_empty(3, *p.shape) for p in params]
    write_rows(taps, z, colours, torch.tensor([0, 2, 4]), torch.ones(3, dtype=F64), rows)
    for k in range(3):
        expected = torch.autograd.grad(plain[2 * k], params, retain_graph=True, materialize_grads=True)
        for row, slope in zip(rows, expected, strict=True):
            torch.testing.assert_close(row[k], slope, rtol=1e-10, atol=1e-10)
    assert not taps.elsewhere(z)


def test_those_in_groups_are_named() -> None:
    layer, x = nn.Conv1d(4, 4, 3, groups=2).double(), torch.randn(5, 4, 8, dtype=F64)
    with Taps(list(layer.parameters())) as taps:
        z = layer(x)
    (name,) = taps.elsewhere(z)
    assert name.startswith("conv1d (test_convolutions.py:")


@pytest.mark.parametrize("shape", [(5, 2, 2), (5, 2, 1), (5, 3, 8), (8,), (5, 5, 2, 8)])
def test_mistakes_are_told_by_torch(shape: tuple[int, ...]) -> None:
    layer, x = nn.Conv1d(2, 3, 3).double(), torch.randn(shape, dtype=F64)
    with pytest.raises(RuntimeError) as plain:
        layer(x)
    with Taps(list(layer.parameters())), pytest.raises(RuntimeError) as tapped:
        layer(x)
    assert str(tapped.value) == str(plain.value)
