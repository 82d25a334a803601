"""Square roots of H_L, the Hessian of the loss in the outputs: all of a row's, or one random vector per row.

Letters: z outputs [N, c], δ = ∂L/∂z, H_L block-diagonal with a block Hᵢ [c, c] for each row, Hᵢ = LᵢLᵢᵀ;
ρᵢ with Lᵢρᵢ = δᵢ, so that (LᵀJ)ᵀρ = Jᵀδ is the gradient and (LᵀJ)ᵀ(LᵀJ) the Gauss–Newton matrix; s signs ±1 [N, c];
u = L s, so that E[u uᵀ] = H_L, and the pull-back of u has the Gauss–Newton matrix as its covariance.

The random root u depends on the form of the loss:
- Hᵢ diagonal (squared error, binary cross entropy, …): u = √diag Hᵢ ∘ s.
- Softmax cross entropy, of any number of classes, weights and smoothing: Hᵢ = wᵢ (diag p − ppᵀ) = LLᵀ with
  L = √wᵢ (diag √p − p√pᵀ), because Σp = 1.
- Any other sum of losses of rows with up to 64 outputs: dense blocks, by ``output_roots``.
- Any other loss (rows are coupled, or many outputs of a row other than by softmax): the rows of δ with one sign each,
  which gives the empirical Fisher matrix in place of the Gauss–Newton matrix.

Only derivatives of the loss are known, so each form is tested by a product H_L v.

Signs are a hash of the key, the sample's place in its set and the number of the output: with the closed forms, a sample
has the same signs in any micro-batch and on any rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.objective.closure import Evaluation, row_scaled
from krylov_descent.vectors.devices import sent, wide
from krylov_descent.vectors.products import numbers_of

_BLOCK = 64  # the largest number of outputs of a row for which a dense block is formed
_ALL = 16  # the largest number of outputs of a row that each get a cotangent; more are combined at random


@dataclass(frozen=True, eq=False)
class Roots:
    """The roots of s rows, with k cotangents each.

    Attributes:
        u: the rows of Lᵢᵀ [k, s, c].
        rho: ρᵢ [k, s].
    """

    u: Tensor
    rho: Tensor


def cotangents(c: int, room: float = 1.0) -> int:
    """Return the number of cotangents of a row with c outputs: c, or for c > 16 as many as there is room for.

    Example:
        >>> cotangents(16), cotangents(17), cotangents(100, room=5.0), cotangents(100, room=400.0)
        (16, 1, 5, 100)
    """
    return c if c <= _ALL else min(c, max(1, int(room)))


def coupled(outputs: Sequence[Tensor], deltas: Sequence[Tensor | None]) -> tuple[int, int] | None:
    """Return the numbers of two outputs with mixed second derivatives of the loss, or None."""
    if len(outputs) < 2:
        return None
    for i, (z, delta) in enumerate(zip(outputs, deltas, strict=True)):
        if delta is None or not delta.requires_grad or not z.numel():
            continue
        v = _magnitudes(z)
        found = torch.autograd.grad(delta, outputs, v, retain_graph=True, allow_unused=True, materialize_grads=True)
        # Rows without finite curvature are ignored.
        sizes = numbers_of([h.detach().nan_to_num(0.0, 0.0, 0.0).abs().amax() if h.numel() else h.sum() for h in found])
        for j, size in enumerate(sizes):
            if j != i and size > torch.finfo(v.dtype).eps ** 0.5 * sizes[i]:
                return min(i, j), max(i, j)
    return None


def output_roots(z: Tensor, delta: Tensor | None, S: Tensor, signs: torch.Generator, k: int = 1) -> Roots | str:
    """Return the roots of the rows S, or a sentence that says why there are none.

    Args:
        z: outputs [N, …].
        delta: ∂L/∂z with its graph; None or without a graph where the loss is linear in z.
        S: rows.
        signs: the generator of the probes' signs.
        k: the number of cotangents of a row with more than 16 outputs.
    """
    rows = z.shape[0] if z.ndim else 1
    if delta is None or not delta.requires_grad:
        return Roots(z.new_zeros(0, len(S), *z.shape[1:]), z.new_zeros(0, len(S)))
    flat = delta.detach().reshape(rows, -1)[S]
    c = flat.shape[1]
    s = _signs(z, signs)
    diagonal = _product(z, delta, torch.ones_like(z))
    v = s * _magnitudes(z)
    probed = _product(z, delta, v)
    known = (diagonal.isfinite() & probed.isfinite()).reshape(rows, c).all(1)
    some, every, diagonal_alone = numbers_of([known.any(), known.all(), _near(probed, diagonal * v)])
    if not some:
        return "its second derivative is nowhere finite (|r|^p with p < 2, or a norm, at zero: smooth it)"
    if not every:  # rows without finite curvature count as zero
        diagonal, probed = (torch.where(_per_row(known, x), x, 0) for x in (diagonal, probed))
        diagonal_alone = _close(probed, diagonal * v)
    if diagonal_alone:
        h = diagonal.reshape(rows, c)[S].clamp(min=0)
        root = h.sqrt()
        rho = torch.where(h > 0, flat / root, 0)
        if c <= max(_ALL, k):
            return _by_columns(torch.diag_embed(root), rho, z)
        return _combined(lambda x: root * x, rho, z, _combinations(z, s, S, signs, k), k)
    if c > _BLOCK:
        return f"the loss couples the {c} outputs of a sample, more than the {_BLOCK} whose blocks are formed"
    blocks = torch.stack([_product(z, delta, _unit(z, j)).reshape(rows, c) for j in range(c)], dim=-1)
    blocks = torch.where(known[:, None, None], blocks, 0)
    by_blocks = (blocks @ v.reshape(rows, c, 1)).view_as(probed)
    # Near a perfect fit, products are left over from cancellation and need not agree.
    if not _close(probed, by_blocks) and _couples_rows(z, delta, v, known):
        return "the loss couples rows of the outputs (it is no sum of terms of one row each)"
    values, Q = torch.linalg.eigh(wide(blocks[S]))
    floor = values[:, -1:].clamp(min=0) * torch.finfo(z.dtype).eps * c
    root = torch.where(values > floor, values, 0).sqrt()
    rho = torch.where(root > 0, (Q.mT @ wide(flat)[:, :, None])[:, :, 0] / root, 0)
    L, rho = (Q * root[:, None]).to(z), rho.to(z)
    if c <= max(_ALL, k):
        return _by_columns(L, rho, z)
    return _combined(lambda x: (L @ x[:, :, None])[:, :, 0], rho, z, _combinations(z, s, S, signs, k), k)


def _combinations(z: Tensor, s: Tensor, S: Tensor, signs: torch.Generator, k: int) -> Iterator[Tensor]:
    """Yield k tensors of ±1/√k for the rows S [s, c], the first from the probe's signs."""
    rows = z.shape[0] if z.ndim else 1
    for i in range(k):
        yield (_signs(z, signs) if i else s).reshape(rows, -1)[S] / k**0.5


def _by_columns(L: Tensor, rho: Tensor, z: Tensor) -> Roots:
    """Return roots from L [s, c, c] and ρ [s, c], each column a cotangent."""
    rows, c = rho.shape
    return Roots(L.permute(2, 0, 1).reshape(c, rows, *z.shape[1:]), rho.T)


def _combined(L: Callable[[Tensor], Tensor], rho: Tensor, z: Tensor, combinations: Iterable[Tensor], k: int) -> Roots:
    """Return Lx and xᵀρ for k combinations x [s, c], taken one at a time: together they may be as large as J."""
    rows = len(rho)
    u, mixed = z.new_empty(k, rows, *z.shape[1:]), rho.new_empty(k, rows)
    for i, x in enumerate(combinations):
        u[i] = L(x).reshape(u[i].shape)
        mixed[i] = (rho * x).sum(1)
    return Roots(u, mixed)


def _product(z: Tensor, delta: Tensor, v: Tensor) -> Tensor:
    (h,) = torch.autograd.grad(delta, z, v, retain_graph=True, materialize_grads=True, allow_unused=True)
    return h.detach()


def _per_row(rows: Tensor, x: Tensor) -> Tensor:
    """Return ``rows`` [N] in a shape that broadcasts with x [N, …]."""
    return rows.reshape(-1, *(1,) * (x.ndim - 1)) if x.ndim else rows[0]


def _close(x: Tensor, y: Tensor) -> bool:
    return bool(_near(x, y))


def _near(x: Tensor, y: Tensor) -> Tensor:
    near: Tensor = (x - y).abs().max() <= torch.finfo(x.dtype).eps ** 0.5 * x.abs().max()
    return near


def _couples_rows(z: Tensor, delta: Tensor, v: Tensor, known: Tensor) -> bool:
    """Whether rows of a product depend on other rows of its vector, by setting rows of the vector to zero.

    Any two rows differ in some bit of their numbers, so one product for each bit tests all pairs.
    """
    if z.ndim == 0:
        return False
    index = torch.arange(z.shape[0], device=z.device).reshape(-1, *(1,) * (z.ndim - 1))
    for bit in range((z.shape[0] - 1).bit_length()):
        inside = ((index >> bit) & 1).to(z.dtype)
        h = torch.where(_per_row(known, z), _product(z, delta, v * inside), 0)
        if not _close(h, h * inside):
            return True
    return False


def _unit(z: Tensor, j: int) -> Tensor:
    e = torch.zeros_like(z).reshape(z.shape[0] if z.ndim else 1, -1)
    e[:, j] = 1
    return e.view_as(z)


def _magnitudes(z: Tensor) -> Tensor:
    """Return entries that are all different: equal entries of coupled outputs would hide the coupling."""
    numbers = torch.arange(1, z.numel() + 1, dtype=torch.float64, device="cpu")
    return sent(numbers.cos_().div_(2).add_(1.5), z.device, z.dtype).view_as(z)


def _signs(z: Tensor, generator: torch.Generator) -> Tensor:
    s = torch.randint(0, 2, z.shape, generator=generator, device="cpu").mul_(2).sub_(1)
    return sent(s, z.device, z.dtype)


_BITS = 32  # signs from one hash
_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def random_roots(evaluation: Evaluation, key: Sequence[int]) -> tuple[list[tuple[Tensor, Tensor]], bool]:
    """Return (z, u) for each output z in which the loss is not linear, and whether every E[uuᵀ] is H_L."""
    outputs = evaluation.outputs
    deltas = torch.autograd.grad(evaluation.loss, outputs, create_graph=True, allow_unused=True)
    pairs, exact = [], True
    for number, (z, delta) in enumerate(zip(outputs, deltas, strict=True)):
        if delta is None or not delta.requires_grad or z.numel() == 0:
            continue
        signs = keyed_signs((*key, number), evaluation.position, z)
        generator = torch.Generator("cpu").manual_seed(_seed((*key, number, evaluation.position)) >> 1)
        u = _root(z, delta, signs, generator)
        exact &= u is not None
        pairs.append((z, _empirical(delta, signs) if u is None else u))
    return pairs, exact


def keyed_signs(key: Sequence[int], position: int, z: Tensor) -> Tensor:
    """Return ±1 in the shape of z, whose first row is the sample at ``position``.

    Example:
        >>> z = torch.empty(6, 40)
        >>> torch.equal(keyed_signs((1, 2), 4, z[4:]), keyed_signs((1, 2), 0, z)[4:])
        True
    """
    rows = z.shape[0] if z.ndim else 1
    c = z.numel() // max(1, rows)
    groups = -(-c // _BITS)
    row = torch.arange(position, position + rows, device="cpu")[:, None]
    hashed = _mixed(_mixed(row * _ODD[0] + _seed(key)) + torch.arange(1, groups + 1, device="cpu") * _ODD[0])
    bits = (hashed[:, :, None] >> torch.arange(_BITS, device="cpu")) & 1
    signs = sent(bits.reshape(rows, -1)[:, :c], z.device, z.dtype)
    return signs.mul_(2).sub_(1).reshape(z.shape)


def _mixed(x: Tensor) -> Tensor:
    """Return the SplitMix64 hash (Steele, Lea and Flood); int64 wraps around, and the masks undo arithmetic shifts."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _ODD[1]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _ODD[2]
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _seed(key: Sequence[int]) -> int:
    digest = hashlib.blake2b(repr(tuple(key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _root(z: Tensor, delta: Tensor, s: Tensor, generator: torch.Generator) -> Tensor | None:
    """Return u, or None if rows are coupled, or too many outputs of a row."""
    # All entries differ: equal signs in a row would not test it. Computed in float64, as half precision has too few
    # distinct numbers.
    v = torch.arange(1, z.numel() + 1, dtype=torch.float64, device="cpu").cos_()
    v = sent(v, z.device, z.dtype).view_as(z)
    diagonal, probed = _product(z, delta, torch.ones_like(z)), _product(z, delta, v)
    if _close(probed, diagonal * v):
        return diagonal.clamp(min=0).sqrt_().mul_(s)
    if not bool(probed.isfinite().all()):
        return probed  # the caller sees that it is not finite
    for dim in {1, z.ndim - 1} if z.ndim > 1 else ():
        u = _softmax_root(z.detach(), probed, v, s, dim)
        if u is not None:
            return u
    rows = z if z.ndim else z.reshape(1)
    roots = output_roots(rows, delta, torch.arange(len(rows), device=z.device), generator)
    if isinstance(roots, str):
        return None
    k = len(roots.u)
    if k == 1:  # combined by output_roots
        return roots.u[0].detach().view_as(z)
    by_column = s.reshape(len(rows), -1)[:, :k].T.reshape(k, len(rows), *(1,) * (rows.ndim - 1))
    return (roots.u * by_column).sum(0).detach().view_as(z)


def _empirical(delta: Tensor, s: Tensor) -> Tensor:
    """Return a root of the empirical Fisher matrix Σ∇ℓᵢ∇ℓᵢᵀ/N; the mean loss ℓ = Σℓᵢ/N has δᵢ = ∇ℓᵢ/N."""
    rows = len(delta) if delta.ndim else 1
    return row_scaled(delta.detach(), s.reshape(rows, -1)[:, 0] * rows**0.5)


def _softmax_root(z: Tensor, probed: Tensor, v: Tensor, s: Tensor, dim: int) -> Tensor | None:
    """Return L s of softmax cross entropy along ``dim``, with estimated weights; None if ``probed`` ≠ H_L v."""
    p = z.softmax(dim)
    q = p * v - p * (p * v).sum(dim, keepdim=True)
    size = q.square().sum(dim, keepdim=True)
    w = torch.where(size > 0, (probed * q).sum(dim, keepdim=True) / size, 0)
    # Where p is almost a unit vector, w is a quotient of rounding errors, but its factor is tiny.
    telling = w[size > torch.finfo(z.dtype).eps]
    if not telling.numel() or not _close(probed, w * q):
        return None
    root = p.sqrt()
    return w.clamp(min=0, max=float(telling.max())).sqrt_() * (root * s - p * (root * s).sum(dim, keepdim=True))
