"""The exact Hessian product by reverse over reverse (Pearlmutter 1994); KSD allows an indefinite Hessian."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from krylov_descent.curvature.interface import MicrobatchGraph, nodes_behind, refuse_cut
from krylov_descent.objective.closure import Evaluation

# PyTorch differentiates the fused weight norm twice without an error and with a wrong result
# (relative error 0.5-0.9 in the direction parameter, against finite differences).
_WRONG_TWICE = "WeightNormInterfaceBackward0"


class HessianGraph(MicrobatchGraph):
    """The graph of one micro-batch's gradient and the product by its Hessian."""

    product_cost: ClassVar[float] = 2.0
    first_order: ClassVar[bool] = False

    def __init__(self, evaluation: Evaluation, params: Sequence[Tensor]) -> None:
        _refuse_weight_norm(evaluation.loss)
        self._params = tuple(params)
        g = torch.autograd.grad(evaluation.loss, self._params, create_graph=True, allow_unused=True)
        refuse_cut(g)
        # Edges of the graph, since the tensors would keep P numbers for every micro-batch.
        self._g = [(i, get_gradient_edge(x)) for i, x in enumerate(g) if x is not None and x.requires_grad]

    def product(self, v: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """v → ∂(gᵀv)/∂θ = Hv on this micro-batch."""
        if not self._g:
            return (None,) * len(v)
        return torch.autograd.grad(
            [x for _, x in self._g],
            self._params,
            [v[i] for i, _ in self._g],
            retain_graph=True,
            allow_unused=True,
        )


def _refuse_weight_norm(loss: Tensor) -> None:
    if any(node.name() == _WRONG_TWICE for node in nodes_behind([loss])):
        raise ValueError(
            "The model uses weight_norm, whose second derivative is silently wrong in PyTorch, so that Hessian "
            "products would be too. Use curvature='ggn', which is right there, or write the normalisation "
            "with plain operations (g * v / v.norm(dim=1, keepdim=True))."
        )
