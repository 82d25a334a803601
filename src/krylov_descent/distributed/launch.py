"""Joining the ranks that ``torchrun`` started."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


def init_process_group(
    backend: str | None = None, timeout: timedelta = timedelta(minutes=10)
) -> dist.ProcessGroup | None:
    """Join the other ranks, also after a restart by ``torchrun --max-restarts``.

    ``torch.distributed.init_process_group()`` alone may fail after a restart. torchrun keeps its store, and in it the
    addresses of ranks that died; a rank that reads an old address fails to connect ("Gloo connectFullMesh failed",
    after the timeout). With torch 2.13 and gloo, restarts without this function fail under each of torchrun's
    rendezvous backends, and use up ``--max-restarts``. Here every attempt has its own names in the store.

    Args:
        backend: the backend of torch.distributed; by default "nccl" with CUDA, and "gloo" without.
        timeout: the time after which a hanging rank is an error on the others (a dead one is noticed at once). It must
            exceed the longest time for which one rank computes while others wait.

    Returns:
        The group of all ranks, for ``KSD(..., process_group=group)``; None without torchrun's environment.

    Example:
        >>> from krylov_descent.distributed.launch import init_process_group
        >>> init_process_group() is None  # not started by torchrun
        True
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if "nccl" in backend:
        # NCCL sends objects through the current device; every process of a host needs its own.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, ranks = next(rendezvous("env://", timeout=timeout))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt_{attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    return dist.group.WORLD
