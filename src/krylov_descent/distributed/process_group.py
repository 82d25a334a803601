"""Collectives by torch.distributed: θ is replicated, all other vectors are kept in parts.

Letters: P parameters, R ranks, s = ⌈P/R⌉ the length of a rank's part, rank r keeping positions [r·s, (r+1)·s).

Sums of P numbers use all-to-all: every rank receives R pieces of its own part and adds them itself, in a fixed order.
That moves (R−1)/R·P numbers per rank, half of an all-reduce; gloo's own reduce-scatter moves as many as an all-reduce.
Buckets bound the memory for the R pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from krylov_descent.distributed.comm import Comm, RankError, SingleProcess

ProcessGroup = dist.ProcessGroup
T = TypeVar("T")

_BUCKET = 1 << 20  # elements sent at a time
_MESSAGE = 2048  # bytes of an error's text

# PyTorch 2.13 renamed it.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Ranks:
    """Sets options for several ranks, beyond the plain ``process_group=group``.

    Args:
        group: the process group; None for a single process.
        wire: the dtype in which gradients, products and rows of V are sent; None is their own. ``torch.bfloat16``
            halves the bytes for float32 parameters; sums are still taken in float32. Rows of V are then stored in it,
            too, so that all ranks have the same row. Steps and search directions are sent in their own dtype.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD
        >>> from krylov_descent.distributed import Ranks
        >>> optimizer = KSD([torch.nn.Parameter(torch.ones(3))], process_group=Ranks(None, wire=torch.bfloat16))
    """

    group: Any = None
    wire: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.wire is not None and not (isinstance(self.wire, torch.dtype) and self.wire.is_floating_point):
            raise ValueError(f"Ranks(wire={self.wire!r}): must be a floating-point torch.dtype or None.")

    def comm(self) -> Comm:
        """Return the collectives of these ranks.

        Raises:
            ValueError: ``group`` is no process group, or does not contain this process.
        """
        if self.group is None:
            return SingleProcess()
        if not isinstance(self.group, ProcessGroup):
            raise ValueError(
                f"process_group={self.group!r}: must be a torch.distributed process group, krylov_descent.distributed."
                "Ranks(...), or None. After init_process_group, that of all ranks is torch.distributed.group.WORLD."
            )
        return SingleProcess() if dist.get_world_size(self.group) == 1 else GroupComm(self.group, self.wire)


class GroupComm:
    """Collectives over the ranks of a process group."""

    def __init__(self, group: Any, wire: torch.dtype | None = None) -> None:
        self.group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.shard_of_sets = self.rank, self.ranks
        self.as_parameters = False
        self.sent = 0
        self._wire = wire
        # NCCL accepts only tensors on its device.
        nccl = "nccl" in dist.get_backend(group)
        self._device = torch.device("cuda", torch.cuda.current_device()) if nccl else None

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, by ``total``."""
        return self.total(x)

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x·y of this rank's samples."""
        return x @ y

    def total(self, x: Tensor, failure: Exception | None = None) -> Tensor:
        """Return the sum in float64, and raise if any rank has a failure."""
        numbers = x.detach().reshape(-1).to(self._device or "cpu", torch.float64)
        total = torch.cat([numbers, numbers.new_full((1,), float(failure is not None))])
        self._call(dist.all_reduce, total)
        self.sent += 2 * total.nbytes * (self.ranks - 1) // self.ranks
        if float(total[-1]) != 0:
            self._fail(failure)
        return total[:-1].reshape(x.shape).to(x.device, x.dtype)

    def max(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum; NaN on any rank gives NaN on all."""
        rows = self._gathered(x.detach().to(self._device or "cpu", torch.float64).reshape(1, -1))
        return rows.amax(0).reshape(x.shape).to(x.device, x.dtype)

    def reduce_scatter(
        self, x: Tensor, out: Tensor | None = None, *, exact: bool = False, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return this rank's part of the sum, by all-to-all in buckets."""
        P, R = x.numel(), self.ranks
        s = -(-P // R)
        ends = [s * (r + 1) for r in range(R)] if sizes is None else list(itertools.accumulate(sizes))
        starts = [0, *ends[:-1]]
        out = x.new_empty(ends[self.rank] - starts[self.rank]) if out is None else out
        wire = x.dtype if exact else self._wire or x.dtype
        step = max(1, _BUCKET // R)
        for i in range(0, max(b - a for a, b in zip(starts, ends, strict=True)), step):
            pieces = [x[a + i : min(a + i + step, b, P)] for a, b in zip(starts, ends, strict=True)]
            outgoing, lengths = torch.cat(pieces).to(wire), [len(piece) for piece in pieces]
            own = lengths[self.rank]
            incoming = outgoing.new_empty(R, own)
            self._call(dist.all_to_all_single, incoming.view(-1), outgoing, [own] * R, lengths)
            self.sent += (len(outgoing) - own) * outgoing.itemsize
            out[i : i + own] = _ordered_sum(incoming.to(x.dtype))
        out[max(0, P - starts[self.rank]) :] = 0  # padding
        return out

    def all_gather(self, x: Tensor, numel: int, *, row: bool = False) -> Tensor:
        """Return the concatenated parts without padding; rows of V are sent in the wire's dtype."""
        given = x.to(self._wire) if row and self._wire else x
        whole = given.new_empty(self.ranks * given.numel())
        self._call(all_gather, whole, given.contiguous())
        self.sent += given.nbytes * (self.ranks - 1)
        return whole[:numel].to(x.dtype)

    def shard(self, x: Tensor) -> Tensor:
        """Return a padded copy of this rank's part."""
        start, stop = self.bounds(x.numel())
        part = x[start:stop]
        return torch.cat([part, part.new_zeros(stop - start - part.numel())])

    def bounds(self, numel: int) -> tuple[int, int]:
        """Return r·s and (r+1)·s."""
        s = -(-numel // self.ranks)
        return self.rank * s, (self.rank + 1) * s

    def _gathered(self, rows: Tensor) -> Tensor:
        """[n, k] → [R·n, k]."""
        gathered = rows.new_empty(self.ranks * rows.shape[0], rows.shape[1])
        self._call(all_gather, gathered, rows.contiguous())
        self.sent += rows.nbytes * (self.ranks - 1)
        return gathered

    def _fail(self, failure: Exception | None) -> None:
        """Raise, on every rank, an error that names the failed ranks and the first message."""
        text = f"{type(failure).__name__}: {failure}".encode()[:_MESSAGE] if failure is not None else b""
        padded = torch.zeros(1, _MESSAGE, dtype=torch.uint8)
        padded[0, : len(text)] = torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)[: len(text)]
        texts = self._gathered(padded.to(self._device or "cpu")).cpu()
        if failure is not None:
            raise failure
        said = [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in texts]
        which = {r: message for r, message in enumerate(said) if message}
        first = min(which, default=-1)
        raise RankError(
            f"Rank {', '.join(map(str, which))} of {self.ranks} failed, so that rank {self.rank} cannot go on: "
            f"{which.get(first, '')}",
            connected=True,
        )

    def _call(self, collective: Callable[..., Any], *args: Any) -> None:
        with explained(self.rank, self.ranks):
            collective(*args, group=self.group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("An optimizer with a process group cannot be copied or pickled: save its state_dict().")


def gather(comm: Comm, value: T, *, onto_first: bool = False) -> list[T]:
    """Return the values of all ranks, by rank; ``onto_first``: on rank 0 only, elsewhere none."""
    if not isinstance(comm, GroupComm):
        return [value]
    values: list[Any] = [None] * comm.ranks if comm.rank == 0 or not onto_first else []
    with explained(comm.rank, comm.ranks):
        if onto_first:
            dist.gather_object(value, values or None, group=comm.group, group_dst=0)
        else:
            dist.all_gather_object(values, value, group=comm.group)
    return values


def _ordered_sum(rows: Tensor) -> Tensor:
    """[n, …] → […]: the sum by pairs of neighbours, then pairs of pairs."""
    while rows.shape[0] > 1:
        n = rows.shape[0] // 2 * 2
        rows = torch.cat([rows[0:n:2] + rows[1:n:2], rows[n:]])
    return rows[0]


@contextmanager
def explained(rank: int, ranks: int) -> Iterator[None]:
    """Turn errors of torch.distributed into RankError."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"Rank {rank} of {ranks} lost the others: one of them died, hung longer than the process group's timeout, "
            "or takes another path. Look at the output of each rank for the first error "
            f"({(str(error).splitlines() or [''])[0]}).",
            connected=False,
        ) from error
