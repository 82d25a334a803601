"""Square roots of H_L, the Hessian of the loss in the outputs, row by row.

Letters: z outputs [N, c], δ = ∂L/∂z, H_L block-diagonal with a block Hᵢ [c, c] for each row, Hᵢ = LᵢLᵢᵀ;
ρᵢ with Lᵢρᵢ = δᵢ, so that (LᵀJ)ᵀρ = Jᵀδ is the gradient and (LᵀJ)ᵀ(LᵀJ) the Gauss–Newton matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 64  # outputs of a row for which a dense block is formed
_ALL = 16  # up to so many, each is a row of its own; of more, random combinations of them


@dataclass(frozen=True, eq=False)
class Roots:
    """For k cotangents of each of s rows.

    Attributes:
        u: [k, s, c], rows Lᵢᵀ.
        rho: [k, s].
    """

    u: Tensor
    rho: Tensor


def cotangents(c: int, room: float = 1.0) -> int:
    """How many a row with c outputs gets: c, or, of many, as many random combinations as there is room for.

    Example:
        >>> cotangents(16), cotangents(17), cotangents(100, room=5.0), cotangents(100, room=400.0)
        (16, 1, 5, 100)
    """
    return c if c <= _ALL else min(c, max(1, int(room)))


def coupled(outputs: Sequence[Tensor], deltas: Sequence[Tensor | None]) -> tuple[int, int] | None:
    """Two outputs such that the curvature in one depends on the other, by their numbers; None if there are none."""
    if len(outputs) < 2:
        return None
    for i, (z, delta) in enumerate(zip(outputs, deltas, strict=True)):
        if delta is None or not delta.requires_grad or not z.numel():
            continue
        v = _magnitudes(z)
        found = torch.autograd.grad(delta, outputs, v, retain_graph=True, allow_unused=True, materialize_grads=True)
        # Where a row has no finite curvature, the others still tell.
        sizes = [float(h.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()) if h.numel() else 0.0 for h in found]
        for j, size in enumerate(sizes):
            if j != i and size > torch.finfo(v.dtype).eps ** 0.5 * sizes[i]:
                return min(i, j), max(i, j)
    return None


def output_roots(z: Tensor, delta: Tensor | None, S: Tensor, signs: torch.Generator, k: int = 1) -> Roots | str:
    """Roots on the rows S, or a sentence that says why there are none.

    Args:
        z: outputs [N, …] with the graph of the loss behind them.
        delta: ∂L/∂z with a graph of its own; None or without one where the loss is linear in z.
        S: rows.
        signs: for the probes.
        k: cotangents of a row that has more than 16 outputs.
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
    if not bool(known.any()):
        return "its second derivative is nowhere finite (|r|^p with p < 2, or a norm, at zero: smooth it)"
    if not bool(known.all()):  # rows without curvature: the others serve
        diagonal, probed = (torch.where(_per_row(known, x), x, 0) for x in (diagonal, probed))
    if _close(probed, diagonal * v):
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
    # Of a loss that is all but fitted, products are what cancellation left, and need not agree.
    if not _close(probed, by_blocks) and _couples_rows(z, delta, v, known):
        return "the loss couples rows of the outputs (it is no sum of terms of one row each)"
    values, Q = torch.linalg.eigh(blocks[S].double())
    floor = values[:, -1:].clamp(min=0) * torch.finfo(z.dtype).eps * c
    root = torch.where(values > floor, values, 0).sqrt()
    rho = torch.where(root > 0, (Q.mT @ flat.double()[:, :, None])[:, :, 0] / root, 0)
    L, rho = (Q * root[:, None]).to(z.dtype), rho.to(z.dtype)
    if c <= max(_ALL, k):
        return _by_columns(L, rho, z)
    return _combined(lambda x: (L @ x[:, :, None])[:, :, 0], rho, z, _combinations(z, s, S, signs, k), k)


def _combinations(z: Tensor, s: Tensor, S: Tensor, signs: torch.Generator, k: int) -> Iterator[Tensor]:
    """k times ±1/√k for the rows S [s, c], the first of them from the probe's signs."""
    rows = z.shape[0] if z.ndim else 1
    for i in range(k):
        yield (_signs(z, signs) if i else s).reshape(rows, -1)[S] / k**0.5


def _by_columns(L: Tensor, rho: Tensor, z: Tensor) -> Roots:
    """L [s, c, c] and ρ [s, c], each column a cotangent."""
    rows, c = rho.shape
    return Roots(L.permute(2, 0, 1).reshape(c, rows, *z.shape[1:]), rho.T)


def _combined(L: Callable[[Tensor], Tensor], rho: Tensor, z: Tensor, combinations: Iterable[Tensor], k: int) -> Roots:
    """Lx and xᵀρ for each of k combinations x [s, c], one after the other: they may be as large as J."""
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
    """[N] in a shape that goes with x [N, …]."""
    return rows.reshape(-1, *(1,) * (x.ndim - 1)) if x.ndim else rows[0]


def _close(x: Tensor, y: Tensor) -> bool:
    scale = x.abs().max()
    return bool((x - y).abs().max() <= torch.finfo(x.dtype).eps ** 0.5 * scale)


def _couples_rows(z: Tensor, delta: Tensor, v: Tensor, known: Tensor) -> bool:
    """Whether rows of a product depend on other rows of its vector: else they are zero where those are, to the bit.

    Any two rows are told apart by some bit of their numbers.
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
    """No two entries alike: if those of two that the loss couples were, a product would not tell."""
    numbers = torch.arange(1, z.numel() + 1, dtype=torch.float64, device="cpu")
    return numbers.cos_().div_(2).add_(1.5).to(z.device, z.dtype).view_as(z)


def _signs(z: Tensor, generator: torch.Generator) -> Tensor:
    s = torch.randint(0, 2, z.shape, generator=generator, device="cpu").mul_(2).sub_(1)
    return s.to(z.device, z.dtype)
