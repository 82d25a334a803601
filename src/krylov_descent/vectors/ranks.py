"""Checks that ranks agree, and the gathering of their states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from krylov_descent.distributed.comm import Comm
from krylov_descent.distributed.process_group import gather
from krylov_descent.distributed.sharded import is_sharded
from krylov_descent.vectors.parameters import ParameterVector

N = TypeVar("N")

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_EXACT = 1 << 52  # whole numbers below it are exact in float64


def require_same(comm: Comm, parameters: ParameterVector, numbers: Sequence[int]) -> None:
    """Require all ranks to be at the same point of the same run.

    Raises:
        ValueError: they are not; raised on all ranks.
    """
    if comm.ranks == 1:
        return
    bits = 0
    for p in parameters.local if not comm.as_parameters else ():  # ranks of a mesh have different parts
        words = p.detach().contiguous().view(_BITS[p.element_size()])
        bits += int((words ^ (words >> 4 * p.element_size())).sum(dtype=torch.int64))
    own = torch.tensor(
        [parameters.count, bits % _EXACT, *(n % _EXACT for n in numbers)], dtype=torch.float64, device="cpu"
    )
    largest, smallest = comm.max(own), -comm.max(-own)
    if torch.equal(largest, smallest):
        return
    what = ["number of parameters", "values of the parameters", "iteration", "seed", "krylov_dim", "other settings"]
    what.append("samples")
    differ = [name for name, a, b in zip(what, largest.tolist(), smallest.tolist(), strict=True) if a != b]
    raise ValueError(
        f"The ranks do not start from the same state: they differ in {', '.join(differ)}. Build the model from the "
        "same seed on every rank (torch.manual_seed) or broadcast it from rank 0, give KSD and Subsets the same "
        "arguments, and load the same checkpoint everywhere. Give Subsets all samples on every rank; it divides them."
    )


def require_plain(params: Sequence[Tensor]) -> None:
    """Require plain parameters, whose state can be gathered.

    Raises:
        ValueError: some parameters are DTensors.
    """
    if any(map(is_sharded, params)):
        raise ValueError(
            "The parameters are DTensors, and so is the optimizer's state. Save the model with torch.distributed."
            "checkpoint, and optimizer.state_dict() with torch.save on each rank, as in docs/appendix/scale.md. Load "
            "such a checkpoint only if you trust it: its metadata is a pickle."
        )


def gathered(
    comm: Comm,
    parameters: ParameterVector,
    vectors: Mapping[str, Tensor | None],
    numbers: Mapping[str, N],
    factors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, N], dict[str, Tensor]]:
    """Return the whole vectors [P], and the numbers and factors of all ranks. A collective.

    Tensors are in host memory of rank 0 only. Of what several ranks have, the first one's counts.

    Raises:
        ValueError: the parameters are DTensors, or the ranks are not at the same step; raised on all ranks.
    """
    require_plain(parameters.params)
    parts = {name: part for name, part in vectors.items() if part is not None}
    said = gather(comm, (numbers["iteration"], sorted(parts), sorted(factors), dict(numbers)))
    if any(other[:2] != said[0][:2] for other in said):
        raise ValueError(
            f"The ranks are at iterations {[other[0] for other in said]} and remember {[other[1] for other in said]}: "
            "save after the same step on every rank."
        )
    whole = {}
    for name, part in parts.items():
        x = comm.all_gather(part, parameters.numel)
        if comm.rank == 0:
            whole[name] = x.cpu()
    new = [name for name in factors if not any(name in other[2] for other in said[: comm.rank])]
    sent = gather(comm, {name: factors[name].cpu() for name in new} if comm.rank else {}, onto_first=True)
    every_number = {name: x for other in reversed(said) for name, x in other[3].items()}
    if comm.rank:
        return {}, every_number, {}
    every = {name: x.cpu() for name, x in factors.items()}
    for of_rank in sent:
        every |= of_rank
    return whole, every_number, every
