"""Gauss–Newton products and Fisher diagonals by other libraries, each as its documentation recommends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from backpack import backpack, extend
from backpack.extensions import SumGradSquared
from backpack.hessianfree.ggnvp import ggn_vector_product_from_plist
from curvlinops import GGNLinearOperator
from torch import Tensor, nn
from torch.func import functional_call, jvp, linearize, vjp

from benchmarks.problems import Problem
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.vectors.parameters import ParameterVector

Product = Callable[[Tensor], Tensor]
Named = dict[str, Tensor]


def curvlinops_product(problem: Problem) -> Product:
    """curvlinops' GGN operator on one batch."""
    params = [p for p in problem.model.parameters() if p.requires_grad]
    operator = GGNLinearOperator(
        problem.model, problem.loss, params, [(problem.x, problem.y)], check_deterministic=False
    )
    return lambda v: operator @ v


def backpack_product(problem: Problem) -> Product:
    """BackPACK's Hessian-free product, the forward graph kept for all products."""
    parameters = ParameterVector([{"params": list(problem.model.parameters()), "weight_decay": 0.0}])
    loss, z = problem.closure((problem.x, problem.y))

    def product(v: Tensor) -> Tensor:
        return parameters.flatten(ggn_vector_product_from_plist(loss, z, parameters.params, parameters.unflatten(v)))

    return product


def func_product(problem: Problem) -> Product:
    """torch.func: jvp through the network, the Hessian of the loss in the outputs, vjp back."""
    net, params = _functional(problem)

    def push(v: Named) -> tuple[Tensor, Tensor]:
        z, Jv, *_ = jvp(net, (params,), (v,))
        return z, Jv

    def pull(u: Tensor) -> Named:
        _, pull_back, *_ = vjp(net, params)
        back: Named = pull_back(u)[0]
        return back

    return _composed(problem, params, push, pull)


def linearize_product(problem: Problem) -> Product:
    """torch.func.linearize once, and one vjp kept."""
    net, params = _functional(problem)
    z, linear = linearize(net, params)
    _, pull_back, *_ = vjp(net, params)
    return _composed(problem, params, lambda v: (z, linear(v)), lambda u: pull_back(u)[0])


def _functional(problem: Problem) -> tuple[Callable[[Named], Tensor], Named]:
    params = {name: p.detach() for name, p in problem.model.named_parameters()}
    return lambda given: functional_call(problem.model, given, (problem.x,)), params


def _composed(
    problem: Problem,
    params: Named,
    push: Callable[[Named], tuple[Tensor, Tensor]],
    pull: Callable[[Tensor], Named],
) -> Product:
    sizes = [p.numel() for p in params.values()]

    def loss_of_outputs(z: Tensor) -> Tensor:
        loss: Tensor = problem.loss(z, problem.y)
        return loss

    def product(v: Tensor) -> Tensor:
        parts = torch.split(v, sizes)
        z, Jv = push({name: part.view_as(p) for part, (name, p) in zip(parts, params.items(), strict=True)})
        _, HJv, *_ = jvp(torch.func.grad(loss_of_outputs), (z,), (Jv,))
        return torch.cat([x.reshape(-1) for x in pull(HJv).values()])

    return product


def backpack_fisher(problem: Problem, batches: Sequence[Microbatch]) -> Callable[[], object]:
    """Gradient and Σᵢ gᵢ∘gᵢ by BackPACK, on a copy: extending breaks other uses of a model."""
    model = extend(copy.deepcopy(problem.model))
    loss = extend(copy.deepcopy(problem.loss)) if isinstance(problem.loss, nn.CrossEntropyLoss) else problem.loss

    def run() -> list[Tensor]:
        gradient, squares = [torch.zeros_like(p) for p in model.parameters()], None
        for batch in batches:
            x, y = batch.data
            model.zero_grad()
            with backpack(SumGradSquared()):
                loss(model(x), y).backward()
            torch._foreach_add_(gradient, [p.grad for p in model.parameters()])
            parts = [p.sum_grad_squared for p in model.parameters()]
            if squares is None:
                squares = parts
            else:
                torch._foreach_add_(squares, parts)
        return gradient

    return run
