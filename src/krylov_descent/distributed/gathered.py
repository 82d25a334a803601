"""Modules with parameters that are sharded at rest and gathered for use, like FSDP, but twice differentiable.

Letters: p a parameter (a DTensor, sharded along dimension 0), W the gathered parameter on every rank; each rank applies
W to its own samples. p → W gathers; its transpose sums u over ranks and scatters the sum; each is the other's
derivative, so that derivatives of any order exist. Autograd saves p in place of W and gathers it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef


class _Gather(torch.autograd.Function):
    """p → W."""

    @staticmethod
    def forward(ctx: Any, p: DTensor, home: DTensor) -> Tensor:
        ctx.home = home
        W = p.redistribute(home.device_mesh, home.placements).full_tensor()
        return W.view_as(W)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Any:
        return _Scatter.apply(u, ctx.home), None  # type: ignore[no-untyped-call]


class _Scatter(torch.autograd.Function):
    """u → Σ u over ranks, in p's placements."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, home: DTensor) -> Tensor:
        ctx.home = home
        mesh = home.device_mesh
        return DTensor.from_local(u, mesh, [Partial()] * mesh.ndim, run_check=False).redistribute(mesh, home.placements)

    @staticmethod
    def backward(ctx: Any, v: DTensor) -> Any:
        return _Gather.apply(v, ctx.home), None  # type: ignore[no-untyped-call]


# Live storages of W → their p. One table for all models: saved tensors are identified by their storage alone.
_whole: dict[int, tuple[StorageWeakRef, DTensor]] = {}


def _gathered(p: DTensor) -> Tensor:
    W: Tensor = _Gather.apply(p, p.detach())  # type: ignore[no-untyped-call]
    _note(W, p)
    return W


def _note(W: Tensor, p: DTensor) -> None:
    for key in [key for key, (ref, _) in _whole.items() if ref.expired()]:  # type: ignore[no-untyped-call]
        del _whole[key]
    _whole[W.untyped_storage().data_ptr()] = StorageWeakRef(W.untyped_storage()), p  # type: ignore[no-untyped-call]


@contextmanager
def regathering() -> Iterator[None]:
    """Return a context in which no graph keeps a whole parameter."""

    def pack(x: Tensor) -> Any:
        if isinstance(x, DTensor) or not x.numel():
            return x
        ref, p = _whole.get(x.untyped_storage().data_ptr(), (None, None))
        if ref is None or p is None or ref.expired():  # type: ignore[no-untyped-call]
            return x
        return p, x.shape, x.stride(), x.storage_offset()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        p, shape, stride, offset = packed
        with torch.no_grad():
            W: Tensor = p.detach().full_tensor()
            _note(W, p)
            return W.as_strided(shape, stride, offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def shard_at_rest(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard every parameter along dimension 0 as a DTensor, and gather it where its module reads it.

    FSDP2's ``fully_shard`` does the same, but cannot be differentiated twice. Names in ``state_dict()`` do not change.
    Every rank calls the model on its own rows:

        z = all_rows(model(own_rows(x, mesh)), len(x), mesh)
        return nn.functional.cross_entropy(z, y), z

    Args:
        model: the model, equal on every rank; changed in place, and returned.
        mesh: a mesh of one dimension.
    """
    if mesh.ndim != 1:
        raise ValueError(f"The mesh has {mesh.ndim} dimensions; shard_at_rest needs one of them: mesh['name'].")
    for module in model.modules():
        names = [name for name, p in module._parameters.items() if p is not None]
        for name in names:
            p = module._parameters[name]
            assert p is not None
            spread = distribute_tensor(p.detach(), mesh, [Shard(0)])
            module._parameters[name] = nn.Parameter(spread, p.requires_grad)
        if names:
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {name: _read(name) for name in names})
    return model


def _read(name: str) -> property:
    return property(lambda module: _gathered(module._parameters[name]))


def own_rows(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows of a batch that every rank has."""
    size, rank = -(-len(x) // mesh.size()), mesh.get_local_rank()
    return x[rank * size : (rank + 1) * size]


def all_rows(z: Tensor, n: int, mesh: DeviceMesh) -> Tensor:
    """Return the n rows of all ranks on every rank; differentiable."""
    shape = torch.Size((n, *z.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    spread = DTensor.from_local(z, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    return spread.full_tensor()
