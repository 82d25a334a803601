"""Parameters that are themselves spread over a mesh of ranks (DTensor): what the rest has to know of them.

A DTensor knows its mesh and its placements; this rank's part of it is a plain tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard

from torch import Tensor


def is_sharded(x: Any) -> TypeGuard[Any]:
    """Whether a tensor is spread over a mesh."""
    module = sys.modules.get("torch.distributed.tensor")  # a second to import; without it there is no DTensor
    return module is not None and isinstance(x, module.DTensor)


def local_part(x: Tensor, p: Tensor) -> Tensor:
    """The part of x on this rank, placed as p is: gradients come in other placements, or as terms of a sum."""
    if not is_sharded(x):
        return x
    part: Tensor
    if is_sharded(p):
        part = x.detach().redistribute(p.device_mesh, p.placements).to_local()
    else:
        part = x.detach().full_tensor()
    return part


def placed_as(part: Tensor, p: Tensor) -> Tensor:
    """The inverse: a tensor placed as p is, from this rank's part of it; shares its memory."""
    if not is_sharded(p):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def whole(x: Tensor) -> Tensor:
    """A small tensor, put together on every rank; float() of a DTensor silently gives this rank's term of a sum."""
    if not is_sharded(x):
        return x
    full: Tensor = x.full_tensor()
    return full


def beside(x: Tensor, other: Tensor) -> Tensor:
    """x, which every rank holds alike, ready for operations with ``other``."""
    if not is_sharded(other):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, other.device_mesh, [Replicate()] * other.device_mesh.ndim, run_check=False)


def holds_first(p: Tensor) -> bool:
    """Whether the first number of p is in this rank's part."""
    if not is_sharded(p):
        return True
    at = [p.device_mesh.get_local_rank(d) for d in range(p.device_mesh.ndim)]
    return all(i == 0 for i, placement in zip(at, p.placements, strict=True) if placement.is_shard())


def lean_graphs(params: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Inside, graphs keep no whole copy of parameters that are gathered where they are used (gathered.py)."""
    module = sys.modules.get("krylov_descent.distributed.gathered")
    if module is None or not any(map(is_sharded, params)):  # torch.func goes with no hook of saved tensors
        return nullcontext()
    context: AbstractContextManager[None] = module.regathering()
    return context
