"""The paper's way to build the subspace: curvature products on B, fed to Algorithm 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from krylov_descent.basis import Subspace, krylov_basis
from krylov_descent.curvature import CurvatureProduct, MicrobatchGraph
from krylov_descent.data import Microbatch
from krylov_descent.objective import Objective
from krylov_descent.rows import Rows


@dataclass(eq=False)
class KrylovBuilder:
    """Builds span{(D⁻¹H)^k D⁻¹g} ∪ {d_prev}; owns the buffer of V, which every step reuses."""

    kind: type[MicrobatchGraph]
    krylov_dim: int
    memory_budget: int | None
    _V: Rows | None = field(default=None, init=False, repr=False)

    def __call__(
        self,
        objective: Objective,
        batches: Sequence[Microbatch],
        precondition: Callable[[Tensor], Tensor],
        g: Tensor,
        d_prev: Tensor | None,
    ) -> Subspace:
        """Algorithm 2 with H on ``batches``; at most as many Krylov vectors as there are parameters.

        Products are written over g: by the first of them, the basis has begun and g is needed no more.
        """
        K = min(self.krylov_dim, objective.parameters.numel)
        if self._V is None or not self._V.holds(K + 1, g):
            self._V = None  # free the old one first
            self._V = Rows(K + 1, g)
        out = g if len(g) == objective.parameters.numel else None
        product = CurvatureProduct(self.kind, objective, batches, self.memory_budget, out)
        return krylov_basis(product, precondition, g, d_prev, K, self._V, objective.comm)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of an optimizer needs no copy of its workspace.
        return {**self.__dict__, "_V": None}
