"""What ranks must have in common, and parts of vectors as a checkpoint wants them: of ⌈P/R⌉, whatever the ranks use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from krylov_descent.distributed.comm import Comm, SingleProcess
from krylov_descent.distributed.process_group import GroupComm
from krylov_descent.parameters import ParameterVector

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT = 1 << 52  # whole numbers below it are exact in float64


def require_same(comm: Comm, parameters: ParameterVector, numbers: Sequence[int]) -> None:
    """All ranks must stand at the same point of the same run.

    Raises:
        ValueError: they do not; on all of them.
    """
    if comm.ranks == 1:
        return
    bits = 0
    for p in parameters.local if not comm.as_parameters else ():  # those in parts differ
        bits += int(p.detach().contiguous().view(_BITS[p.element_size()]).sum(dtype=torch.int64))
    own = torch.tensor(
        [parameters.count, bits % _EXACT, *(n % _EXACT for n in numbers)], dtype=torch.float64, device="cpu"
    )
    largest, smallest = comm.max(own), -comm.max(-own)
    if torch.equal(largest, smallest):
        return
    what = ["number of parameters", "values of the parameters", "iteration", "seed", "krylov_dim", "other settings"]
    differ = [name for name, a, b in zip(what, largest.tolist(), smallest.tolist(), strict=True) if a != b]
    raise ValueError(
        f"The ranks do not start from the same state: they differ in {', '.join(differ)}. Build the model from the "
        "same seed on every rank (torch.manual_seed) or broadcast it from rank 0, give KSD and Subsets the same "
        "arguments, and load the same checkpoint everywhere. Subsets is given all samples on every rank, and hands "
        "each its share."
    )


def require_parts(comm: Comm, numel: int) -> None:
    """Vectors must be in parts, one after the other.

    Raises:
        ValueError: they are spread as DTensor parameters are.
    """
    if comm.bounds(numel) is None:
        raise ValueError(
            "The parameters are DTensors, and so is the optimizer's state: save both with torch.distributed."
            "checkpoint and its get_state_dict, which krylov_descent.distributed.checkpoint does not replace there."
        )


def even_part(x: Tensor, numel: int, comm: Comm) -> Tensor:
    """A part as this rank uses it → as a checkpoint keeps it."""
    even = _even(comm)
    if comm.bounds(numel) == even.bounds(numel):
        return x
    return even.shard(comm.all_gather(x, numel))


def own_part(x: Tensor, parameters: ParameterVector, comm: Comm) -> Tensor:
    """The other way round."""
    even = _even(comm)
    x = x.to(parameters.device, parameters.dtype)
    if comm.bounds(parameters.numel) == even.bounds(parameters.numel):
        return x
    return comm.shard(even.all_gather(x, parameters.numel))


def _even(comm: Comm) -> Comm:
    return GroupComm(comm.group) if isinstance(comm, GroupComm) and comm.ranks > 1 else SingleProcess()
