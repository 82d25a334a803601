"""Algorithm 2: an orthonormal basis of the Krylov subspace and the previous step, and the curvature within it.

Letters: g [P] gradient, D preconditioner, H curvature, d_prev [P] previous step, K Krylov dimension,
V [m, P] orthonormal rows (m ≤ K+1), H̄ = V H Vᵀ [m, m]. P stands for this rank's part of the parameters;
``comm.sum`` completes inner products. Takes callables, knows nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.distributed import Comm


@dataclass(frozen=True, eq=False)
class Subspace:
    """What the search works in.

    Attributes:
        V: orthonormal rows [m, P].
        H: H̄, the curvature in the coordinates of V, float64 [m, m], symmetric.
        krylov_dim: the Krylov vectors among the rows, which come first; the previous step is not counted.
        orthogonality_error: max |V Vᵀ − I|.
        start: coefficients [m] at which the search begins; None is zero.
        finite: whether every product was finite (those that were not have no row in V).
    """

    V: Tensor
    H: Tensor
    krylov_dim: int
    orthogonality_error: float
    start: Tensor | None = None
    finite: bool = True


def krylov_basis(
    product: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    g: Tensor,
    d_prev: Tensor | None,
    K: int,
    V: Tensor,
    comm: Comm,
) -> Subspace:
    """Algorithm 2 of Vinyals & Povey 2011, span{(D⁻¹H)^k D⁻¹g, 0 ≤ k < K} ∪ {d_prev}.

    Deviations from the paper:

    1. Two passes of classical Gram–Schmidt instead of one of modified (lines 10-13): in float32 the latter loses
       orthogonality as K grows, and it takes k inner products one after the other where a pass takes one product.
    2. A vector that the basis already spans, to rounding, is left out: the Krylov part then ends early and d_prev
       is still appended. The paper divides by its norm.
    3. A vector whose product is not finite is left out in the same way.
    4. Without a previous step (d_prev is None) none is added; an arbitrary vector, as in the paper, is for the
       caller to give.

    Args:
        product: v → Hv.
        precondition: w → D⁻¹w, a new tensor or w itself.
        g: the gradient, not zero.
        d_prev: the previous step, or None.
        K: Krylov vectors wanted.
        V: the buffer for the rows, [≥ K+1, P]; overwritten.
        comm: completes inner products.
    """
    basis = _Basis(V, product, comm)
    u: Tensor | None = precondition(g)  # line 1
    while u is not None and basis.m < K:  # line 3, k = 1 … K
        w = basis.append(u)  # lines 2, 4, 10-16
        u = None if w is None else precondition(w)  # line 6
    krylov_dim = basis.m
    if d_prev is not None:
        basis.append(d_prev)  # line 8, and k = K+1
    if basis.m == 0:
        # Not even D⁻¹g has a finite product: search along g, which is finite, as if the curvature were one.
        basis.normalise(g)
        basis.H[0, 0] = 1.0
        basis.m = krylov_dim = 1
    return basis.subspace(krylov_dim)


class _Basis:
    """The rows gathered so far, and H̄ among them."""

    def __init__(self, V: Tensor, product: Callable[[Tensor], Tensor], comm: Comm) -> None:
        self.V = V
        self.m = 0
        self.H = torch.zeros(V.shape[0], V.shape[0], dtype=torch.float64, device="cpu")
        self._product = product
        self._comm = comm
        self._finite = True
        # Below this, what is left of a vector is rounding of what was taken away.
        self._drop = torch.finfo(V.dtype).eps ** 0.75

    def append(self, u: Tensor) -> Tensor | None:
        """Orthonormalise u, take its product w, fill H̄'s row; returns w, or None if u adds nothing."""
        if not self.normalise(u):
            return None
        k = self.m
        w = self._product(self.V[k])  # line 4
        h = self._comm.sum(self.V[: k + 1] @ w).to("cpu", torch.float64)  # line 11, all j at once
        if not bool(h.isfinite().all()) or not self._all_finite(w):
            self._finite = False
            return None
        self.H[k, : k + 1] = h
        self.H[: k + 1, k] = h  # line 18: upper triangle from the lower
        self.m = k + 1
        return w

    def normalise(self, u: Tensor) -> bool:
        """V[m] ← u made orthogonal to the rows before it and of length one; False if nothing is left of it."""
        row, before = self.V[self.m], self.V[: self.m]
        # The largest element first, so that squares neither overflow nor vanish.
        size = float(self._comm.max(torch.linalg.vector_norm(u, torch.inf)))
        if not 0 < size < float("inf"):
            self._finite &= size == 0
            return False
        row.copy_(u).div_(size)
        length = self._length(row)
        for _ in range(2):  # lines 10-13
            if self.m:
                row.addmv_(before.T, self._comm.sum(before @ row), alpha=-1)
        left = self._length(row)
        if not left > self._drop * length:
            return False
        row.div_(left)  # line 15
        return True

    def subspace(self, krylov_dim: int) -> Subspace:
        """What was built, with its orthogonality measured."""
        V = self.V[: self.m]
        gram = self._comm.sum(V @ V.T).to("cpu", torch.float64)
        error = float((gram - torch.eye(self.m, dtype=torch.float64, device="cpu")).abs().max())
        return Subspace(V, self.H[: self.m, : self.m].clone(), krylov_dim, error, finite=self._finite)

    def _length(self, x: Tensor) -> float:
        return math.sqrt(float(self._comm.sum(x @ x)))

    def _all_finite(self, w: Tensor) -> bool:
        return bool(self._comm.max((~w.isfinite()).any().to(torch.float32)) == 0)
