"""Algorithm 1: the Gauss–Newton product Gv = Jᵀ H_L J v (Schraudolph 2002).

The paper writes out a modified forward pass (v → Jv) and a backward pass (→ Jᵀ) for layered networks. Here both
come from autograd for any module, and so does H_L, the Hessian of the loss in the outputs (line 10), for any
twice-differentiable loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from krylov_descent.curvature.interface import MicrobatchGraph
from krylov_descent.curvature.linearise import Linearisation
from krylov_descent.objective.closure import Evaluation, require_outputs
from krylov_descent.vectors.devices import summed


class GaussNewtonGraph(MicrobatchGraph):
    """The graph of one micro-batch and the product by its Gauss–Newton matrix."""

    product_cost: ClassVar[float] = 4 / 3  # lines 3-9 and 10-15: a forward-like and a backward pass
    image_cost: ClassVar[float] = 2 / 3
    """The cost of v → Jv alone, in gradients per sample."""

    def __init__(self, evaluation: Evaluation, params: Sequence[Tensor]) -> None:
        require_outputs(evaluation, "The Gauss–Newton product (curvature='ggn')")
        self._linear = Linearisation(evaluation.outputs, params)
        dL_dz = torch.autograd.grad(evaluation.loss, evaluation.outputs, create_graph=True, allow_unused=True)
        require_influence(dL_dz)
        # Terms of the loss that are linear in the outputs have no second derivative.
        self._dL_dz = [(i, x) for i, x in enumerate(dL_dz) if x is not None and x.requires_grad]

    def product(self, v: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """v → Gv on this micro-batch."""
        Jv = self._linear.jvp(v)  # v → Jv, lines 3-9
        if not self._dL_dz:
            return (None,) * len(v)
        return self._linear.vjp(self._bent(Jv))  # H_L Jv → Jᵀ H_L Jv, lines 11-15

    def image(self, v: Sequence[Tensor]) -> Sequence[Tensor]:
        """v → Jv."""
        return self._linear.jvp(v) if self._dL_dz else ()

    def gram(self, images: Sequence[Sequence[Tensor]]) -> Tensor:
        """Return [(Jvᵢ)ᵀ H_L Jvⱼ] from the images Jv, float64 on the CPU, without pull-backs to the parameters."""
        m = len(images)
        if not self._dL_dz:
            return torch.zeros(m, m, dtype=torch.float64, device="cpu")
        found = []
        for Jv in images:
            HJv = self._bent(Jv)
            for Ju in images:
                terms = [summed(x * y) for x, y in zip(Ju, HJv, strict=True)]
                found.append(sum(terms[1:], terms[0]))
        return torch.stack(found).reshape(m, m).T.cpu()

    def _bent(self, Jv: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Jv → H_L Jv, line 10."""
        return torch.autograd.grad(
            [x for _, x in self._dL_dz],
            self._linear.outputs,
            [Jv[i] for i, _ in self._dL_dz],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )


def require_influence(dL_dz: Sequence[Tensor | None]) -> None:
    """Require that the loss is computed from the outputs returned with it.

    Raises:
        ValueError: the loss is computed from none of them.
    """
    if all(x is None for x in dL_dz):
        raise ValueError(
            "The closure's loss is not computed from the outputs it returned (they may be a copy, a softmax of "
            "the logits made for display, or another forward pass). Return the very tensors that the loss "
            "function was given."
        )
