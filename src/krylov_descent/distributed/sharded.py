"""Helpers for parameters that are sharded over a mesh of ranks (DTensor); this rank's part is a plain tensor."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard

from torch import Tensor


def is_sharded(x: Any) -> TypeGuard[Any]:
    """Whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # importing takes a second; without it there is no DTensor
    return module is not None and isinstance(x, module.DTensor)


def local_part(x: Tensor, p: Tensor) -> Tensor:
    """Return this rank's part of x in the placements of p; gradients may come in others, or as partial sums."""
    if not is_sharded(x):
        return x
    part: Tensor
    if is_sharded(p):
        part = x.detach().redistribute(p.device_mesh, p.placements).to_local()
    else:
        part = x.detach().full_tensor()
    return part


def placed_as(part: Tensor, p: Tensor) -> Tensor:
    """Return a tensor in the placements of p from this rank's part, whose memory it shares; inverts ``local_part``."""
    if not is_sharded(p):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def whole(x: Tensor) -> Tensor:
    """Return a small tensor whole on every rank; float() of a DTensor silently gives this rank's partial sum."""
    if not is_sharded(x):
        return x
    full: Tensor = x.full_tensor()
    return full


def beside(x: Tensor, other: Tensor) -> Tensor:
    """Return x, equal on every rank, in a form that combines with ``other``."""
    if not is_sharded(other):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, other.device_mesh, [Replicate()] * other.device_mesh.ndim, run_check=False)


def holds_first(p: Tensor) -> bool:
    """Whether this rank's part contains the first number of p."""
    if not is_sharded(p):
        return True
    at = [p.device_mesh.get_local_rank(d) for d in range(p.device_mesh.ndim)]
    return all(i == 0 for i, placement in zip(at, p.placements, strict=True) if placement.is_shard())


def lean_graphs(params: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Return a context in which graphs keep no whole copy of gathered parameters (gathered.py)."""
    module = sys.modules.get("krylov_descent.distributed.gathered")
    if module is None or not any(map(is_sharded, params)):  # torch.func does not allow saved-tensor hooks
        return nullcontext()
    context: AbstractContextManager[None] = module.regathering()
    return context
