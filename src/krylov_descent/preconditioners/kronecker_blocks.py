"""Damped inverses of Kronecker factors, and D⁻¹ made of them.

Letters: A [in + 1, in + 1] and G [out, out] the factors of a layer's matrix V [out, in + 1], λ the damping plus the
weight decay. A ⊗ G + λI is taken for (A + π√λ I) ⊗ (G + √λ/π I) with π² = (tr A/dim A)/(tr G/dim G), which keeps small
what that adds (Martens & Grosse 2015, section 6.3). D⁻¹V = (G + √λ/π I)⁻¹ V (A + π√λ I)⁻¹.

What is remembered from step to step are tensors by name, never written to in place.
By the index i of a parameter: f"{i}.inputs" A, f"{i}.outputs" G, f"{i}.bias" the index of the bias that is part of the
matrix (0-D, if there is one), f"{i}.pulled" (0-D, where A and G are those of pull-backs to the weight itself),
f"{i}.begun" (0-D, n of its first update, if that was not 1), f"{i}.inputs_inverse" and f"{i}.outputs_inverse" (on ranks
that need them), f"{i}.diagonal" [p]; and 0-D "updates" (n), "age" (the part of what the inverses were made from that
has been replaced since), "damping" and "decay" (λ and Σc of the inverses); and "places", those of the parameters among
all, frozen ones included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.distributed import Comm
from krylov_descent.preconditioners.statistics import BIAS, DIAGONAL, MATRIX, PULLED, TABLE, Role, Roles, Sums
from krylov_descent.vectors.parameters import ParameterVector

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


Factors = Mapping[str, Tensor]
"""All that is remembered, by name."""

_OF_LAYERS = ("inputs", "outputs", "inputs_inverse", "outputs_inverse", "bias")


def scalar(x: float) -> Tensor:
    """0-D float64."""
    return torch.tensor(x, dtype=torch.float64, device="cpu")


def number(factors: Factors, name: str, default: float = 0.0) -> float:
    """A 0-D tensor's value."""
    return float(factors[name]) if name in factors else default


def blocks_of(factors: Factors) -> list[Block]:
    """The layers with factors."""
    blocks = []
    for name, A in factors.items():
        i, _, what = name.partition(".")
        if what == "inputs":
            bias = int(factors[f"{i}.bias"]) if f"{i}.bias" in factors else None
            blocks.append(Block(int(i), bias, table=A.ndim == 1))
    return sorted(blocks, key=lambda block: block.weight)


def shapes_of(roles: Roles, params: Sequence[Tensor]) -> dict[str, tuple[int, ...]]:
    """Of the statistics, in an order that all ranks share."""
    shapes: dict[str, tuple[int, ...]] = {}
    with_bias = {role.weight for role in roles.values() if role.kind == BIAS}
    for i, role in sorted(roles.items()):
        p = params[i]
        if role.kind == DIAGONAL:
            shapes[f"{i}.diagonal"] = (p.numel(),)
        elif role.kind == TABLE:
            shapes |= {f"{i}.inputs": (p.shape[0],), f"{i}.outputs": (p.shape[1],) * 2, f"{i}.calls": ()}
        elif role.kind == MATRIX:
            width = p.numel() // p.shape[0] + (i in with_bias)
            shapes |= {f"{i}.inputs": (width, width), f"{i}.outputs": (p.shape[0],) * 2, f"{i}.calls": ()}
        elif role.kind == PULLED:
            width = p.numel() // p.shape[0]
            shapes |= {f"{i}.inputs": (width, width), f"{i}.outputs": (p.shape[0],) * 2, f"{i}.pulled": ()}
    return shapes


def factors_of(factors: Factors, parameters: ParameterVector) -> dict[str, Tensor]:
    """Factors, where these parameters are; none, if by their places or shapes they are of others."""
    places = factors.get("places")
    if places is not None and [int(i) for i in places] != parameters.places[: len(places)]:
        return {}  # others are frozen now
    roles: Roles = {}
    for name, x in factors.items():
        i, _, what = name.partition(".")
        if what == "diagonal":
            roles[int(i)] = Role(DIAGONAL)
        elif what == "inputs":
            roles[int(i)] = Role(TABLE if x.ndim == 1 else PULLED if f"{i}.pulled" in factors else MATRIX)
        elif what == "bias":
            roles[int(x)] = Role(BIAS, int(i))
    if max(roles, default=-1) >= len(parameters.params):
        return {}
    shapes = shapes_of(roles, parameters.params)
    shapes |= {f"{name}_inverse": shape for name, shape in shapes.items()}
    if any(tuple(factors[name].shape) != shape for name, shape in shapes.items() if name in factors):
        return {}
    return {name: x.to(parameters.device, parameters.dtype) if x.ndim else x for name, x in factors.items()}


def averaged(old: Factors, fresh: Sums, roles: Roles, memory: float, n: int) -> tuple[dict[str, Tensor], float]:
    """e·old + (1 − e)·fresh at update n; and the smallest e.

    A layer without calls keeps what it has, and one of another shape begins anew.
    """
    biases = {role.weight: i for i, role in roles.items() if role.kind == BIAS}
    changed = {i for i, role in roles.items() if role.kind == DIAGONAL}
    changed |= {i for i, role in roles.items() if role.kind == PULLED and f"{i}.pulled" not in old}
    changed |= {i for i, r in roles.items() if r.kind == MATRIX and number(old, f"{i}.bias", -1) != biases.get(i, -1)}
    anew = {f"{i}.{what}" for i in changed for what in _OF_LAYERS}
    new = {name: x for name, x in old.items() if name not in anew}
    least = memory
    for name, x in fresh.items():
        begun = f"{name.partition('.')[0]}.begun"
        if name in new:
            e = min(memory, 1 - 1 / (n - number(new, begun, 1) + 1))
            new[name], least = x.lerp_(new[name], e), min(least, e)
        else:
            new[name] = x
            new |= {begun: scalar(n)} if n > 1 else {}
    new |= {f"{i}.pulled": scalar(1) for i, role in roles.items() if role.kind == PULLED}
    for weight, i in biases.items():
        if f"{weight}.inputs" in new:
            new[f"{weight}.bias"] = scalar(i)
    return new, least
