"""Small least-squares problems and their dense matrices, for tests of the flow."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent.distributed import SingleProcess
from krylov_descent.objective.objective import Objective
from krylov_descent.vectors.parameters import ParameterVector

F64 = torch.float64
Closure = Callable[[], tuple[Tensor, Any]]


def objective_of(model: nn.Module, closure: Closure, decay: float = 0.0) -> Objective:
    parameters = ParameterVector([{"params": list(model.parameters()), "weight_decay": decay}])
    return Objective(lambda _: closure(), parameters, SingleProcess())


def mlp(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for i, o in itertools.pairwise(widths) for layer in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def dense(model: nn.Module, closure: Closure) -> tuple[Tensor, Tensor]:
    """The Gauss–Newton matrix and the gradient, entry by entry."""
    params = list(model.parameters())
    loss, outputs = closure()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    slopes = torch.autograd.grad(loss, outputs, create_graph=True)
    G = torch.zeros((), dtype=F64)
    for z, dz in zip(outputs, slopes, strict=True):
        if not z.numel():
            continue
        rows = []
        for e in z.reshape(-1):
            grads = torch.autograd.grad(e, params, retain_graph=True, allow_unused=True, materialize_grads=True)
            rows.append(torch.cat([x.reshape(-1) for x in grads]))
        J = torch.stack(rows)
        H = torch.stack(
            [
                torch.autograd.grad(d, z, retain_graph=True, materialize_grads=True)[0].reshape(-1)
                for d in dz.reshape(-1)
            ]
        )
        G = G + J.T @ H @ J
    grads = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
    return G, torch.cat([x.reshape(-1) for x in grads])


def pinn() -> tuple[nn.Module, Closure]:
    """A residual that differentiates the network twice, and a boundary term with another number of points."""
    model = mlp(2, 6, 6, 1)
    inside, edge = torch.rand(15, 2, dtype=F64), torch.rand(7, 2, dtype=F64)

    def closure() -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x = inside.clone().requires_grad_()
        u = model(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
        r = du[:, 1] + u[:, 0] * du[:, 0] - 0.1 * ddu[:, 0]
        b = 3 * (model(edge)[:, 0] - edge[:, 0])
        return r.square().mean() + b.square().mean(), (r, b)

    return model, closure
