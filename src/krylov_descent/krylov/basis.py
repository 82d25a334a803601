"""Algorithm 2: an orthonormal basis of the Krylov subspace and the previous step, and the curvature within it.

Letters: g [P] gradient, D preconditioner, H curvature, d_prev [P] previous step, K Krylov dimension,
V [m, P] orthonormal rows (m ≤ K+1), H̄ = V H Vᵀ [m, m]. P stands for this rank's part of the parameters;
``comm.sum`` completes inner products. Takes callables, knows nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.distributed import Comm
from krylov_descent.krylov.candidates import Carry, Starts
from krylov_descent.vectors.storage import Rows

EARLIER = 5  # steps before the last one that may be in a basis; 15 gave no more


@dataclass(frozen=True, eq=False)
class Subspace:
    """What the search works in.

    Attributes:
        V: orthonormal rows [m, P]; ``Rows.of(tensor)`` makes them from a tensor.
        H: H̄, the curvature in the coordinates of V, float64 [m, m], symmetric.
        krylov_dim: the Krylov vectors among the rows, which come first; the previous step is not counted.
        orthogonality_error: max |V Vᵀ − I|.
        starts: points at which the search may begin, beside zero; None for no other.
        finite: whether every product was finite (those that were not have no row in V).
        note: for the step's report, or nothing.
    """

    V: Rows
    H: Tensor
    krylov_dim: int
    orthogonality_error: float
    starts: Starts | None = None
    finite: bool = True
    note: str = ""

    def bend(self, d: Tensor, comm: Comm) -> float:
        """dᵀHd of a vector d [P] that the rows span."""
        c = comm.sum(self.V.dots(d)).to("cpu", torch.float64)
        return float(c @ self.H @ c)


@dataclass(frozen=True)
class Turn:
    """Which step it is, for a builder that draws or remembers.

    Attributes:
        seed, iteration: key what is random.
        carry: from the last step, or None.
        earlier: steps before the last one [P], the newest first.
    """

    seed: int = 0
    iteration: int = 0
    carry: Carry | None = None
    earlier: tuple[Tensor, ...] = ()


def krylov_basis(
    product: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    g: Tensor,
    d_prev: Tensor | None,
    K: int,
    V: Rows,
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
        product: v → Hv; may return the same tensor each time, and that of g.
        precondition: w → D⁻¹w, a new tensor or w itself.
        g: the gradient, not zero; overwritten where ``product`` returns it.
        d_prev: the previous step, or None.
        K: Krylov vectors wanted.
        V: room for K+1 rows; those in it are dropped.
        comm: completes inner products.
    """
    basis = _Basis(V, K + 1, product, comm)
    u = precondition(g)  # line 1
    while basis.normalise(u):  # line 3, k = 1 … K; lines 2, 10-15
        del u  # vectors of P numbers: no more of them are alive during a product than need be
        w = basis.multiply()  # lines 4, 11, 16
        if w is None or V.m == K:
            break
        u = precondition(w)  # line 6
    w = None
    if V.m == 0:
        # Not even D⁻¹g has a finite product: search along it, as if the curvature were one; along g if it overflowed.
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
    curvature: Callable[[Rows], Tensor],
    precondition: Callable[[Tensor], Tensor],
    g: Tensor,
    previous: Sequence[Tensor],
    V: Rows,
    comm: Comm,
) -> Subspace | None:
    """Algorithm 2 with K = 1, where no row needs the product of another: all of H̄ at once, by ``curvature``, V → H̄.

    None where something is not finite, or nothing is left of D⁻¹g; g is left as it is.

    Deviation from the paper: there may be several previous steps (V has a row for each). Where curvature changes, or is
    that of few samples, the last one has not all that earlier ones found; each costs one Jv.
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
    curvature: Callable[[Rows], Tensor], vectors: Iterable[Tensor], V: Rows, rows: int, comm: Comm
) -> Subspace:
    """An orthonormal basis of given vectors; what it spans already, or is not finite, is left out.

    Args:
        curvature: V → H̄, all of it at once.
        vectors: one of them at least neither zero nor infinite.
        V: room for ``rows`` rows; those in it are dropped.
        rows: at most so many are kept.
        comm: completes inner products.
    """
    basis = _Basis(V, rows, None, comm)
    for u in vectors:
        if V.m < rows and basis.normalise(u):
            V.m += 1
    H = curvature(V).to("cpu", torch.float64)
    basis.H[: V.m, : V.m] = (H + H.T) / 2
    return basis.subspace(V.m)


class _Basis:
    """The rows gathered so far, and H̄ among them."""

    def __init__(self, V: Rows, rows: int, product: Callable[[Tensor], Tensor] | None, comm: Comm) -> None:
        self.V = V
        V.m = 0
        self.started = False
        self.H = torch.zeros(rows, rows, dtype=torch.float64, device="cpu")
        self._product = product
        self._comm = comm
        self._finite = True
        self._staged: Tensor

    def normalise(self, u: Tensor) -> bool:
        """The next row: u made orthogonal to those before it and of length one; False if nothing is left of it."""
        V = self.V
        # Below this, what is left of a vector is rounding of what was taken away.
        drop = torch.finfo(u.dtype).eps ** 0.75
        size = length(u, self._comm)
        if not 0 < size < math.inf:
            self._finite &= size == 0
            return False
        x = V.begin(u)
        if size > (most := torch.finfo(x.dtype).max):  # a length may be beyond what its elements are held in
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
        """Take the product w of the next row, fill H̄'s row and keep both; None, and neither, if w is not finite."""
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
        """What was built, with its orthogonality measured."""
        m = self.V.m
        gram = self._comm.sum(self.V.gram()).to("cpu", torch.float64)
        error = float((gram - torch.eye(m, dtype=torch.float64, device="cpu")).abs().max())
        return Subspace(self.V, self.H[:m, :m].clone(), krylov_dim, error, finite=self._finite)


def length(x: Tensor, comm: Comm) -> float:
    """‖x‖, whatever its scale; not finite if x is not.

    Example:
        >>> from krylov_descent.distributed import SingleProcess
        >>> length(torch.tensor([3e300, 4e300], dtype=torch.float64), SingleProcess())
        5e+300
    """
    info = torch.finfo(x.dtype)
    square = float(comm.sum(x @ x))
    if info.tiny / info.eps**2 < square < math.inf:
        return math.sqrt(square)
    # Squares that overflow or vanish: the largest element first. Slow, and rare.
    size = float(comm.max(torch.linalg.vector_norm(x, torch.inf) if len(x) else x.new_zeros(())))
    if not 0 < size < math.inf:
        return size
    return size * math.sqrt(float(comm.sum((x / size).square().sum())))
