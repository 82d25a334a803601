"""The product by the empirical Fisher matrix F = (1/N) Σᵢ gᵢ gᵢᵀ of per-sample gradients (section 2).

Letters: δ = ∂ℓ_b/∂z of the micro-batch's mean loss, δᵢ its row i. As row i of the outputs depends on sample i alone,
gᵢ is proportional to Jᵢᵀδᵢ, so that gᵢᵀv = δᵢ·(Jv)ᵢ and F v = Jᵀ applied to rows δᵢ (gᵢᵀv): no gᵢ is ever formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from krylov_descent.curvature.gauss_newton import require_influence
from krylov_descent.curvature.interface import MicrobatchGraph
from krylov_descent.curvature.linearise import Linearisation
from krylov_descent.objective.closure import Evaluation, require_outputs, require_rows, row_dots, row_scaled


class FisherGraph(MicrobatchGraph):
    """The graph of one micro-batch and the product by Σᵢ (Jᵢᵀδᵢ)(Jᵢᵀδᵢ)ᵀ."""

    product_cost: ClassVar[float] = 4 / 3

    def __init__(self, evaluation: Evaluation, params: Sequence[Tensor]) -> None:
        require_outputs(evaluation, "The Fisher product (curvature='fisher')")
        require_rows(evaluation)
        delta = torch.autograd.grad(evaluation.loss, evaluation.outputs, retain_graph=True, allow_unused=True)
        require_influence(delta)
        self._delta = [torch.zeros_like(z) if x is None else x for x, z in zip(delta, evaluation.outputs, strict=True)]
        self._aligned = evaluation.aligned
        self._linear = Linearisation(evaluation.outputs, params)

    def product(self, v: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """v → Σᵢ Jᵢᵀδᵢ (δᵢ·Jᵢv) on this micro-batch."""
        Jv = self._linear.jvp(v)
        s = [row_dots(delta, Jv_z) for delta, Jv_z in zip(self._delta, Jv, strict=True)]
        if self._aligned:  # row i of every output belongs to sample i
            s = [torch.stack(s).sum(0)] * len(s)
        return self._linear.vjp([row_scaled(delta, s_z) for delta, s_z in zip(self._delta, s, strict=True)])

    @staticmethod
    def term_weight(weight: float) -> float:
        """Return w_b²: gᵢ = N (w_b/W) Jᵢᵀδᵢ, as δ is that of a mean, and F is quadratic in gᵢ."""
        return weight * weight

    @staticmethod
    def norm(total_weight: float, samples: float) -> float:
        """Return (1/N)·(N/W)², the factor of the sum over B."""
        return samples / total_weight**2
