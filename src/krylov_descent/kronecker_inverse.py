"""Damped inverses of Kronecker factors, and D⁻¹ made of them.

Letters: A [in + 1, in + 1] and G [out, out] the factors of a layer's matrix V [out, in + 1], λ the damping plus the
weight decay. A ⊗ G + λI is taken for (A + π√λ I) ⊗ (G + √λ/π I) with π² = (tr A/dim A)/(tr G/dim G), which keeps small
what that adds (Martens & Grosse 2015, section 6.3). D⁻¹V = (G + √λ/π I)⁻¹ V (A + π√λ I)⁻¹.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.distributed import Comm
from krylov_descent.parameters import ParameterVector

_LOST = 1e-3  # of an inverse's relative accuracy, beyond which float32 gives way to float64


@dataclass(frozen=True)
class Block:
    """A layer's matrix: the indices of its weight and bias, if that is part of it; ``table``: A is diagonal."""

    weight: int
    bias: int | None = None
    table: bool = False


def trace(x: Tensor) -> float:
    """Of a matrix, or of a diagonal one kept as a vector."""
    return float((x.diagonal() if x.ndim == 2 else x).sum(dtype=torch.float64))


def damped_inverses(inputs: Tensor, outputs: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """(A + π√λ I)⁻¹ and (G + √λ/π I)⁻¹, λ > 0.

    Example:
        >>> A, G = damped_inverses(torch.ones(2), torch.full((1, 1), 4.0), damping=4.0)
        >>> A, G
        (tensor([0.5000, 0.5000]), tensor([[0.1250]]))
    """
    root = math.sqrt(damping)
    a, g = trace(inputs) / len(inputs), trace(outputs) / len(outputs)
    if not (a > 0 and g > 0):  # a layer without influence as yet has the damping alone
        return _inverse(torch.zeros_like(inputs), root), _inverse(torch.zeros_like(outputs), root)
    pi = math.sqrt(a) / math.sqrt(g)
    return _inverse(inputs, root * pi), _inverse(outputs, root / pi)


def _inverse(M: Tensor, added: float) -> Tensor:
    """(M + added·I)⁻¹; what float32 cannot do well is done in float64."""
    if M.ndim == 1:
        return (M + added).reciprocal_()
    condition = 1 + trace(M) / added  # at most
    dtypes = (M.dtype, torch.float64) if condition * torch.finfo(M.dtype).eps < _LOST else (torch.float64,)
    for dtype in dtypes:
        damped = M.to(dtype, copy=True)
        damped.diagonal().add_(added)
        L, info = torch.linalg.cholesky_ex(damped)
        if not int(info):
            break
    while int(info):  # rounding of a sum of squares left something negative
        added *= 10
        damped.diagonal().add_(added)
        L, info = torch.linalg.cholesky_ex(damped)
    # Symmetric, and by columns as it comes: by rows, as a checkpoint restores it, or products would round otherwise.
    return torch.cholesky_inverse(L).mT.to(M.dtype).contiguous()


def solver(
    parameters: ParameterVector,
    comm: Comm,
    blocks: Sequence[Block],
    inverses: Mapping[int, tuple[Tensor, Tensor]],
    diagonal: Tensor | None,
) -> Callable[[Tensor], Tensor]:
    """w [P_local] → D⁻¹w [P_local].

    Args:
        parameters: whose vectors these are.
        comm: cuts them.
        blocks: layers with factors.
        inverses: of A and G, by the index of the weight; of the layers that overlap this rank's part.
        diagonal: D⁻¹ of all other parameters [P_local]; what it holds in place of layers is not used. None if there are
            no others.
    """
    starts = offsets(parameters)
    start, stop = part(parameters, comm)
    own = [block for block in blocks if block.weight in inverses]

    def write(out: Tensor, i: int, x: Tensor) -> None:
        first, last = max(start, starts[i]), min(stop, starts[i + 1])
        if first < last:
            out[first - start : last - start] = x.reshape(-1)[first - starts[i] : last - starts[i]]

    def apply(w: Tensor) -> Tensor:
        out = torch.zeros_like(w) if diagonal is None else w * diagonal
        whole = comm.all_gather(w, parameters.numel) if blocks else w
        for block in own:
            i, (A, G) = block.weight, inverses[block.weight]
            V = whole[starts[i] : starts[i + 1]]
            if block.table:
                write(out, i, V.view(len(A), -1) @ G * A[:, None])
                continue
            V = V.view(len(G), -1)
            if block.bias is None:
                write(out, i, G @ V @ A)
                continue
            b = whole[starts[block.bias] : starts[block.bias + 1]]
            X = G @ torch.cat([V, b[:, None]], dim=1) @ A
            write(out, i, X[:, :-1])
            write(out, block.bias, X[:, -1])
        return out

    return apply


def offsets(parameters: ParameterVector) -> list[int]:
    """Where each parameter begins in a vector [P], and where the last ends."""
    starts = [0]
    for size in parameters.sizes:
        starts.append(starts[-1] + size)
    return starts


def part(parameters: ParameterVector, comm: Comm) -> tuple[int, int]:
    """Where this rank's part begins and ends; its padding, beyond P, included.

    Raises:
        ValueError: parameters are spread over a mesh.
    """
    bounds = comm.bounds(parameters.numel)
    if bounds is None:
        raise ValueError(
            "preconditioner='kronecker' cannot be used with parameters on a mesh (DTensor): a rank has no whole layer. "
            "Use preconditioner='fisher', or plain parameters with process_group=..., of which each rank keeps a copy."
        )
    return bounds


def overlaps(block: Block, parameters: ParameterVector, comm: Comm) -> bool:
    """Whether some of a layer is in this rank's part."""
    starts, (start, stop) = offsets(parameters), part(parameters, comm)
    indices = [block.weight] if block.bias is None else [block.weight, block.bias]
    return any(max(start, starts[i]) < min(stop, starts[i + 1]) for i in indices)
