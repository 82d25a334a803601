"""Why KSD refuses models of FSDP2 (docs/appendix/scale.md): what torch 2.13 does with their derivatives.

A test that fails with a later torch tells that it has mended one of these.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from krylov_descent import KSD
from tests.distributed.pool import Pool

pytestmark = pytest.mark.nightly


def sharded(group: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    return model


def loss_of(model: nn.Module) -> Tensor:
    z: Tensor = model(torch.ones(3, 4, dtype=torch.float64))
    return z.square().mean()


def gradients(group: Any) -> tuple[list[bool], list[bool]]:
    """By which parameters, those that an optimizer is given, autograd.grad and backward give gradients."""
    model = sharded(group)
    params = list(model.parameters())
    found = torch.autograd.grad(loss_of(model), params, allow_unused=True)
    model = sharded(group)
    loss_of(model).backward()  # type: ignore[no-untyped-call]
    return [g is not None for g in found], [p.grad is not None for p in model.parameters()]


def second(group: Any) -> str:
    """What a derivative of the derivative by the input raises."""
    model = sharded(group)
    x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    try:
        dx.square().sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return str(error)
    return ""


def created(group: Any) -> list[tuple[bool, bool]]:
    """Whether backward(create_graph=True) gives gradients, and these a graph."""
    model = sharded(group)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph=True")
        loss_of(model).backward(create_graph=True)  # type: ignore[no-untyped-call]
    return [(p.grad is not None, p.grad is not None and p.grad.requires_grad) for p in model.parameters()]


def refused(group: Any) -> str:
    """What KSD says of such a model."""
    model = sharded(group)

    def closure() -> tuple[Tensor, Tensor]:
        z = model(torch.ones(3, 4, dtype=torch.float64))
        return z.square().mean(), z

    try:
        KSD(model.parameters()).step(closure)
    except ValueError as error:
        return str(error)
    return ""


def test_autograd_grad_returns_none(pool: Pool) -> None:
    assert pool.run(2, gradients) == [([False] * 4, [True] * 4)] * 2


def test_a_second_derivative_fails_in_freed_storage(pool: Pool) -> None:
    assert all("storage of size 0" in said for said in pool.run(2, second))


def test_backward_drops_the_graph_without_a_word(pool: Pool) -> None:
    assert pool.run(2, created) == [[(True, False)] * 4] * 2


def test_ksd_refuses_it(pool: Pool) -> None:
    for said in pool.run(2, refused):
        assert "depends on none of the parameters" in said
        assert "shard_at_rest" in said
