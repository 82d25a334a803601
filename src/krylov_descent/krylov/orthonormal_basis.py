"""Algorithm 2: an orthonormal basis of the Krylov subspace and the previous step, and the curvature within it.

Letters: g [P] gradient, D preconditioner, H curvature, d_prev [P] previous step, K Krylov dimension,
V [m, P] orthonormal rows (m ≤ K+1), H̄ = V H Vᵀ [m, m]. P counts this rank's part of the parameters; ``comm.sum`` adds
inner products over the ranks. The functions take callables and are independent of any model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krylov_descent.distributed import Comm
from krylov_descent.vectors.products import length
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
       float32 as K grows and takes k inner products in sequence where a classical pass takes one matrix product.
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
    basis = _Basis(V, K + 1, product, comm)
    u = precondition(g)  # line 1
    while basis.normalise(u):  # line 3, k = 1 … K; lines 2, 10-15
        del u  # a vector [P]: free it before the next product
        w = basis.multiply()  # lines 4, 11, 16
        if w is None or V.m == K:
            break
        u = precondition(w)  # line 6
    w = None
    if V.m == 0:
        # Not even D⁻¹g has a finite product: search along it, or along g if it overflowed, with curvature 1.
        if not basis.started:
            basis.normalise(g)
        basis.H[0, 0] = 1.0
        V.m = 1
        return basis.subspace(1)
    krylov_dim = V.m
    if d_prev is not None and basis.normalise(d_prev):  # line 8, and k = K+1
        basis.multiply()
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
    basis = _Basis(V, 1 + len(previous), None, comm)
    if not basis.normalise(precondition(g)):  # lines 1-2
        return None
    V.m = 1
    for d in previous:
        if basis.normalise(d):  # lines 8, 10-15
            V.m += 1
    H = curvature(V)  # lines 4, 11, 16-18
    if not bool(H.isfinite().all()):
        return None
    basis.H[: V.m, : V.m] = (H + H.T) / 2
    return basis.subspace(1)


def spanned_basis(
    curvature: Callable[[BasisStorage], Tensor], vectors: Iterable[Tensor], V: BasisStorage, rows: int, comm: Comm
) -> Subspace:
    """Build an orthonormal basis of the given vectors; those that are dependent or not finite are left out.

    Args:
        curvature: V → H̄.
        vectors: vectors [P], of which at least one is finite and not zero.
        V: storage for ``rows`` rows; its contents are dropped.
        rows: the largest number of rows.
        comm: adds inner products over the ranks.
    """
    basis = _Basis(V, rows, None, comm)
    for u in vectors:
        if V.m < rows and basis.normalise(u):
            V.m += 1
    H = curvature(V).to("cpu", torch.float64)
    basis.H[: V.m, : V.m] = (H + H.T) / 2
    return basis.subspace(V.m)


class _Basis:
    """A basis under construction: the rows of V so far, and H̄ in them."""

    def __init__(self, V: BasisStorage, rows: int, product: Callable[[Tensor], Tensor] | None, comm: Comm) -> None:
        self.V = V
        V.m = 0
        self.started = False
        self.H = torch.zeros(rows, rows, dtype=torch.float64, device="cpu")
        self._product = product
        self._comm = comm
        self._finite = True
        self._staged: Tensor

    def normalise(self, u: Tensor) -> bool:
        """Stage u as the next row, orthogonal to the others and of length one; return False if nothing is left."""
        V = self.V
        # A remainder shorter than this is rounding error of the projections.
        drop = torch.finfo(u.dtype).eps ** 0.75
        size = length(u, self._comm)
        if not 0 < size < math.inf:
            self._finite &= size == 0
            return False
        x = V.begin(u)
        if size > (most := torch.finfo(x.dtype).max):  # the length may overflow the dtype of its elements
            x, size = x.div_(most), size / most
        x.div_(size)
        if V.m:  # lines 10-13, twice
            c = self._comm.sum(V.dots(x))
            c = self._comm.sum(V.sweep(c, x))
            V.subtract(c, x)
        left = length(x, self._comm)
        if not left > drop:
            return False
        self._staged = V.stage(x.div_(left))  # line 15
        self.started = True
        return True

    def multiply(self) -> Tensor | None:
        """Keep the staged row with its row of H̄ and return its product w; if w is not finite, drop it: None."""
        k = self.V.m
        assert self._product is not None
        w = self._product(self._staged)  # line 4
        self.V.m = k + 1
        h = self._comm.sum(self.V.dots(w)).to("cpu", torch.float64)  # line 11, all j at once
        if not bool(h.isfinite().all()) or not math.isfinite(length(w, self._comm)):
            self._finite = False
            self.V.m = k
            return None
        self.H[k, : k + 1] = h
        self.H[: k + 1, k] = h  # line 18: upper triangle from the lower
        return w

    def subspace(self, krylov_dim: int) -> Subspace:
        """Return the finished subspace, with its orthogonality error."""
        m = self.V.m
        gram = self._comm.sum(self.V.gram()).to("cpu", torch.float64)
        error = float((gram - torch.eye(m, dtype=torch.float64, device="cpu")).abs().max())
        return Subspace(self.V, self.H[:m, :m].clone(), krylov_dim, error, finite=self._finite)
