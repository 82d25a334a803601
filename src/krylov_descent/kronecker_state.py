"""What the Kronecker-factored preconditioner remembers from step to step: tensors by name, never written to in place.

By the index i of a parameter: f"{i}.inputs" A, f"{i}.outputs" G, f"{i}.bias" the index of the bias that is part of the
matrix (0-D, if there is one), f"{i}.pulled" (0-D, where A and G are those of pull-backs to the weight itself),
f"{i}.begun" (0-D, n of its first update, if that was not 1), f"{i}.inputs_inverse" and f"{i}.outputs_inverse" (on ranks
that need them), f"{i}.diagonal" [p]; and 0-D "updates" (n), "age" (the part of what the inverses were made from that
has been replaced since), "damping" and "decay" (λ and Σc of the inverses); and "places", those of the parameters among
all, frozen ones included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from krylov_descent.kronecker_factors import BIAS, DIAGONAL, MATRIX, PULLED, TABLE, Role, Roles, Sums
from krylov_descent.kronecker_inverse import Block
from krylov_descent.parameters import ParameterVector

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
