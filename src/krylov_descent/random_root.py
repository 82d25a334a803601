"""For each row of the outputs one random vector whose covariance is the Hessian of the loss there.

Letters: z outputs [N, c], δ = ∂L/∂z, H_L block-diagonal with a block Hᵢ [c, c] for each row, s signs ±1 [N, c];
u = L s with LLᵀ = H_L, so that E[u uᵀ] = H_L, and a pull-back of u has the Gauss–Newton matrix as its covariance.

- Hᵢ diagonal (squared error, binary cross entropy, …): u = √diag Hᵢ ∘ s.
- Softmax cross entropy, of any number of classes, weights and smoothing: Hᵢ = wᵢ (diag p − ppᵀ) = LLᵀ with
  L = √wᵢ (diag √p − p√pᵀ), because Σp = 1.
- Any other loss of rows with up to 64 outputs: blocks by output_hessian.py.
- Else (a loss that couples rows, or many outputs of a row in another way than softmax) the rows of δ itself, with one
  sign each: the empirical Fisher matrix in place of the Gauss–Newton matrix.

The loss is known by its derivatives alone, so each form is put to the test by a product H_L v.

Signs are a hash of the key, the sample's place in its set and the number of the output: with the closed forms, the same
samples get the same signs in whatever micro-batches and on whatever rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from krylov_descent.closure import Evaluation, row_scaled
from krylov_descent.output_hessian import output_roots

_BITS = 32  # signs of one hash
_ODD = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


def random_roots(evaluation: Evaluation, key: Sequence[int]) -> tuple[list[tuple[Tensor, Tensor]], bool]:
    """(z, u) for each output z that the loss is not linear in; and whether E[uuᵀ] is H_L, and not a stand-in."""
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
    """±1 in the shape of z, whose first row is the sample at ``position``.

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
    signs = bits.reshape(rows, -1)[:, :c].to(z.device, z.dtype)
    return signs.mul_(2).sub_(1).reshape(z.shape)


def _mixed(x: Tensor) -> Tensor:
    """Steele, Lea and Flood's SplitMix64; int64 wraps around, and its shifts keep the sign, which is masked away."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _ODD[1]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _ODD[2]
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _seed(key: Sequence[int]) -> int:
    digest = hashlib.blake2b(repr(tuple(key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _root(z: Tensor, delta: Tensor, s: Tensor, generator: torch.Generator) -> Tensor | None:
    """None where rows couple, or too many outputs of a row."""
    # No two entries alike: signs that all agree in a row would tell nothing of it.
    # In float64, as half precision has no such numbers beyond some hundred.
    v = torch.arange(1, z.numel() + 1, dtype=torch.float64, device="cpu").cos_().to(z.device, z.dtype).view_as(z)
    diagonal, probed = _product(z, delta, torch.ones_like(z)), _product(z, delta, v)
    if not bool(probed.isfinite().all()):
        return probed  # what is made of it will be seen not to be finite
    if _close(probed, diagonal * v):
        return diagonal.clamp(min=0).sqrt_().mul_(s)
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
    """The mean loss ℓ = Σℓᵢ/N has δᵢ = ∇ℓᵢ/N, and the empirical Fisher matrix is Σ∇ℓᵢ∇ℓᵢᵀ/N."""
    rows = len(delta) if delta.ndim else 1
    return row_scaled(delta.detach(), s.reshape(rows, -1)[:, 0] * rows**0.5)


def _softmax_root(z: Tensor, probed: Tensor, v: Tensor, s: Tensor, dim: int) -> Tensor | None:
    """L s if ``probed``, H_L v, is what softmax cross entropy along ``dim`` has, with weights estimated from it."""
    p = z.softmax(dim)
    q = p * v - p * (p * v).sum(dim, keepdim=True)
    size = q.square().sum(dim, keepdim=True)
    w = torch.where(size > 0, (probed * q).sum(dim, keepdim=True) / size, 0)
    # Where p is all but one unit vector, w is a quotient of rounding errors; what it multiplies is tiny there.
    telling = w[size > torch.finfo(z.dtype).eps]
    if not telling.numel() or not _close(probed, w * q):
        return None
    root = p.sqrt()
    return w.clamp(min=0, max=float(telling.max())).sqrt_() * (root * s - p * (root * s).sum(dim, keepdim=True))


def _product(z: Tensor, delta: Tensor, v: Tensor) -> Tensor:
    (h,) = torch.autograd.grad(delta, z, v, retain_graph=True, materialize_grads=True, allow_unused=True)
    return h.detach()


def _close(x: Tensor, y: Tensor) -> bool:
    return bool((x - y).abs().max() <= torch.finfo(x.dtype).eps ** 0.5 * x.abs().max())
