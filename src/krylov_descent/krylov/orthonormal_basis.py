"""Algorithm 2: an orthonormal basis of the Krylov subspace and the previous step, and the curvature within it.

Letters: g [P] gradient, D preconditioner, H curvature, d_prev [P] previous step, K Krylov dimension,
V [m, P] orthonormal rows (m ≤ K+1), H̄ = V H Vᵀ [m, m]. P counts this rank's part of the parameters; ``comm.sum`` adds
inner products over the ranks. The functions take callables and are independent of any model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krylov_descent.distributed import Comm
from krylov_descent.vectors.storage import BasisStorage


@dataclass(frozen=True, eq=False)
class Subspace:
    """A subspace to search, with its orthonormal basis and the curvature in it.

    Attributes:
        V: orthonormal rows [m, P]; ``BasisStorage.of(tensor)`` makes them from a tensor.
        H: H̄, the curvature in the coordinates of V, float64 [m, m], symmetric.
        krylov_dim: the number of Krylov vectors, which are the first rows; the previous step is not counted.
        orthogonality_error: max |V Vᵀ − I|.
        finite: whether every curvature product was finite; vectors whose product was not are left out of V.
    """

    V: BasisStorage
    H: Tensor
    krylov_dim: int
    orthogonality_error: float
    finite: bool = True

    @classmethod
    def none(cls) -> Subspace:
        """Return the empty subspace, for a step at a point where the gradient is zero."""
        return cls(BasisStorage(0, torch.zeros(0)), torch.zeros(0, 0, dtype=torch.float64, device="cpu"), 0, 0.0)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the report."""
        said = "A curvature product was not finite; the directions it concerns were left out."
        return () if self.finite else (said,)

    def numbers(self) -> dict[str, Any]:
        """Return the report's fields on the subspace; Ritz values are the eigenvalues of H̄."""
        return {
            "krylov_dim": self.krylov_dim,
            "ritz_values": tuple(torch.linalg.eigvalsh(self.H).tolist()),
            "orthogonality_error": self.orthogonality_error,
        }

    def curvature_along(self, d: Tensor, comm: Comm) -> float:
        """Return dᵀHd for a vector d [P] in the span of V."""
        c = comm.sum(self.V.dots(d)).to("cpu", torch.float64)
        return float(c @ self.H @ c)


def krylov_basis(
    product: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    g: Tensor,
    d_prev: Tensor | None,
    K: int,
    V: BasisStorage,
    comm: Comm,
) -> Subspace:
    """Build the subspace of Algorithm 2 (Vinyals & Povey 2011): span{(D⁻¹H)^k D⁻¹g, 0 ≤ k < K} ∪ {d_prev}.

    Deviations from the paper:

    1. Two passes of classical Gram–Schmidt replace one modified pass (lines 10-13), which loses orthogonality in
       float32 as K grows and takes k inner products in sequence where a classical pass takes one matrix product. The
       second pass is left out where it would subtract less than 32 ε.
    2. A vector that the basis already spans, to rounding, is left out: the Krylov part then ends early and d_prev
       is still appended. The paper divides by its norm.
    3. A vector whose product is not finite is left out in the same way.
    4. If d_prev is None, no vector is added; the paper's arbitrary first vector must be passed by the caller.

    Args:
        product: v → Hv; may return the same tensor each time, and may write into g.
        precondition: w → D⁻¹w, a new tensor or w itself.
        g: the gradient, not zero; overwritten if ``product`` writes into it.
        d_prev: the previous step, or None.
        K: the number of Krylov vectors.
        V: storage for K+1 rows; its contents are dropped.
        comm: adds inner products over the ranks.
    """
    basis = _Basis(V, K + 1, comm)
    u, w = precondition(g), None  # line 1
    while basis.extend(u, w):  # line 3, k = 1 … K; lines 2, 10-15
        del u  # a vector [P]: free it before the next product
        w = product(basis.last)  # line 4
        if V.m == K:
            basis.close(w)
            break
        u = precondition(w)  # line 6
    w = None
    if V.m == 0:
        # Not even D⁻¹g has a finite product: search along it, or along g if it overflowed, with curvature 1.
        if not basis.started:
            basis.extend(g)
        basis.H[0, 0] = 1.0
        V.m = 1
        basis.close()
        return basis.subspace(1)
    krylov_dim = V.m
    if d_prev is not None and basis.extend(d_prev):  # line 8, and k = K+1
        basis.close(product(basis.last))
    return basis.subspace(krylov_dim)


def shortest_basis(
    curvature: Callable[[BasisStorage], Tensor],
    precondition: Callable[[Tensor], Tensor],
    g: Tensor,
    previous: Sequence[Tensor],
    V: BasisStorage,
    comm: Comm,
) -> Subspace | None:
    """Build the subspace of Algorithm 2 with K = 1, where ``curvature`` computes all of H̄ from V at once.

    Returns None if a number is not finite or D⁻¹g is zero; g is not written to.

    Deviation from the paper: ``previous`` may hold several steps, one row of V each. Where the curvature changes or
    comes from few samples, earlier steps add directions that the last one lacks; each costs one Jv.
    """
    basis = _Basis(V, 1 + len(previous), comm)
    if not basis.extend(precondition(g)):  # lines 1-2
        return None
    for d in previous:
        basis.extend(d)  # lines 8, 10-15
    basis.close()
    H = curvature(V)  # lines 4, 11, 16-18
    if not bool(H.isfinite().all()):
        return None
    basis.H[: V.m, : V.m] = (H + H.T) / 2
    return basis.subspace(1)


_AGAIN = 32.0  # ε, the largest inner product of a new row with the others at which the second pass is left out


class _Basis:
    """A basis under construction: the rows of V so far, and H̄ in them.

    Each new row is decided on by one read from the device, and takes two passes over V, or three: all inner products
    with V, its projection with the inner products that are left, and their subtraction if they are too large.

    Attributes:
        started: whether there was any row.
    """

    def __init__(self, V: BasisStorage, rows: int, comm: Comm) -> None:
        self.V = V
        V.m = 0
        self.started = False
        self.H, self._gram = torch.zeros(2, rows, rows, dtype=torch.float64, device="cpu")
        self._comm = comm
        self._finite = True

    def extend(self, u: Tensor, w: Tensor | None = None) -> bool:
        """Add u as the next row, orthogonal to the others and of length one; return False if nothing is left of it.

        If w, the product of the last row, is given, its row of H̄ is computed in the same pass over V. If w is not
        finite, the last row is dropped in place of adding u.
        """
        V, m, eps = self.V, self.V.m, torch.finfo(u.dtype).eps
        x = V.begin(u)
        given = [x, *([self.last] if m else []), *([] if w is None else [w])]
        found = self._comm.sum(torch.cat([(x @ x)[None], V.products(given).flatten()]))  # lines 11 and 12, all j
        rest = self._comm.sum(V.sweep(found[1 : m + 1], x))  # lines 10-13
        read = torch.cat([found, rest]).to("cpu", torch.float64)
        square, remaining, again = float(read[0]), float(read[-1]), read[len(found) : -1]
        if m and not self._note(*torch.split(read[m + 1 : len(found)], m)):
            return False
        if not torch.finfo(u.dtype).tiny / eps**2 < square < math.inf:  # the square left the range of the dtype
            largest = float(self._comm.max(torch.linalg.vector_norm(u, torch.inf) if len(u) else u.new_zeros(())))
            if not 0 < largest < math.inf:
                self._finite &= largest == 0
                return False
            return self.extend(u / largest)
        if (correction := float(again @ again)) > (_AGAIN * eps) ** 2 * remaining:
            V.subtract(rest[:-1], x)  # lines 10-13 again
            remaining -= correction
        # A remainder shorter than this is rounding error of the projections, or of the rows as they are stored.
        if not remaining > max(eps**1.5, V.eps**2) * square:
            return False
        V.append(x.div_(math.sqrt(remaining)))  # line 15
        self.started = True
        return True

    @property
    def last(self) -> Tensor:
        """The last row."""
        return self.V.row(self.V.m - 1)

    def close(self, *w: Tensor) -> None:
        """Note the last row's inner products, with its row of H̄ from its product w; drop it if w is not finite."""
        self._note(*self._comm.sum(self.V.products([self.last, *w])).to("cpu", torch.float64))  # line 11, all j at once

    def _note(self, gram: Tensor, h: Tensor | None = None) -> bool:
        """Keep the last row's inner products with V and Hv; return False if it is dropped, as they are not finite."""
        k = len(gram) - 1
        self._gram[k, : k + 1] = gram
        if h is None:
            return True
        if not bool(h.isfinite().all()):  # none is if an entry of w is not
            self._finite = False
            self.V.m = k
            return False
        self.H[k, : k + 1] = h
        self.H[: k + 1, k] = h  # line 18: upper triangle from the lower
        return True

    def subspace(self, krylov_dim: int) -> Subspace:
        """Return the finished subspace, with its orthogonality error."""
        m = self.V.m
        lower = self._gram[:m, :m].tril()
        error = float((lower - torch.eye(m, dtype=torch.float64, device="cpu")).abs().max())
        return Subspace(self.V, self.H[:m, :m].clone(), krylov_dim, error, finite=self._finite)
