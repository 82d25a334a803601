"""The collectives that the algorithms use, and errors that all ranks raise together.

Letters: P parameters, R ranks, P_local the length of one rank's part of a vector, padded by zeros to the same length on
every rank. Every rank holds θ whole; V, g, D, d_prev and the point before it are kept in parts. In one process every
collective is the identity, so there is one Algorithm 2 and one Algorithm 3 for any R.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class RankError(RuntimeError):
    """Is raised on every rank if one of them failed or cannot be reached.

    Attributes:
        connected: whether ranks can still communicate.
    """

    def __init__(self, message: str, *, connected: bool) -> None:
        super().__init__(message)
        self.connected = connected
        self._message, self._phase = message, ""

    def during(self, phase: str) -> RankError:
        """Return the error with the phase of the step in its message, unless it has one."""
        if self._phase:
            return self
        told = RankError(f"During the {phase}: {self._message}", connected=self.connected)
        told._phase = phase
        return told


class Comm(Protocol):
    """Collectives over the ranks that share one optimisation.

    Attributes:
        rank: the number of this process, from 0.
        ranks: R.
        shard_of_sets: the shard of the sets that this rank evaluates, and the number of shards.
        as_parameters: whether vectors are placed like the parameters: whole in one process, or on their mesh.
        sent: the bytes sent to other ranks so far.
    """

    rank: int
    ranks: int
    shard_of_sets: tuple[int, int]
    as_parameters: bool
    sent: int

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of a small tensor over ranks, which completes inner products of parts."""
        ...

    def total(self, x: Tensor, failure: Exception | None = None) -> Tensor:
        """Return the sum of a small tensor over all samples: losses, weights, counts.

        Raises:
            Exception: ``failure``, an error of this rank before the call.
            RankError: another rank had an error.
        """
        ...

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x·y of vectors [P], x of this rank's samples: a term for ``total``."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of a small tensor over ranks."""
        ...

    def reduce_scatter(
        self, x: Tensor, out: Tensor | None = None, *, exact: bool = False, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """[P] → [P_local]: this rank's part of the sum over ranks.

        Args:
            x: a vector of this rank.
            out: the memory of the result.
            exact: whether x is sent in its own dtype.
            sizes: the lengths of the ranks' parts; by default those of all vectors.
        """
        ...

    def all_gather(self, x: Tensor, numel: int, *, row: bool = False) -> Tensor:
        """[P_local] → [P]: the parts concatenated on every rank; ``row``: x is a row of V."""
        ...

    def shard(self, x: Tensor) -> Tensor:
        """[P] → [P_local]: this rank's part of a vector that every rank holds whole."""
        ...

    def bounds(self, numel: int) -> tuple[int, int] | None:
        """Return the start and end of this rank's part of a vector [P], with padding beyond P; None if scattered."""
        ...


class SingleProcess:
    """One rank: every collective is the identity."""

    rank = 0
    ranks = 1
    shard_of_sets = 0, 1
    as_parameters = True
    sent = 0

    def sum(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def total(self, x: Tensor, failure: Exception | None = None) -> Tensor:
        """Return ``x``."""
        if failure is not None:
            raise failure
        return x

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x·y."""
        return x @ y

    def max(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def reduce_scatter(
        self, x: Tensor, out: Tensor | None = None, *, exact: bool = False, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return ``x``."""
        return x

    def all_gather(self, x: Tensor, numel: int, *, row: bool = False) -> Tensor:
        """Return ``x``."""
        return x

    def shard(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def bounds(self, numel: int) -> tuple[int, int]:
        """Return the bounds of the whole vector."""
        return 0, numel


def part_length(comm: Comm, numel: int) -> int:
    """Return P_local."""
    return comm.shard(torch.empty(numel, device="meta")).numel()


def stacked(comm: Comm, x: Tensor) -> Tensor:
    """Return the small tensors of all ranks, stacked in their order: [R, …].

    Example:
        >>> stacked(SingleProcess(), torch.tensor([3.0, 4.0]))
        tensor([[3., 4.]])
    """
    everyone = x.new_zeros(comm.ranks, *x.shape)
    everyone[comm.rank] = x
    return comm.sum(everyone)


def added(comm: Comm, x: float, failure: Exception | None = None) -> float:
    """Return the sum of a number over ranks; raises a failure of any rank, like ``comm.total``."""
    return float(comm.total(torch.tensor(x, dtype=torch.float64, device="cpu"), failure))


def defer_error(comm: Comm, work: Callable[[], T], results: list[T] | None = None) -> Exception | None:
    """Do this rank's work and append its result to ``results``.

    On several ranks an error is returned, for the next ``comm.total`` to raise on all: a rank that raised by itself
    would leave the others waiting.
    """
    results = [] if results is None else results
    if comm.ranks == 1:
        results.append(work())
        return None
    try:
        results.append(work())
    except RankError:
        raise  # all ranks raise it
    except Exception as error:
        return error
    return None


def run_on_all(comm: Comm, work: Callable[[], T]) -> T:
    """Do this rank's work and return its result; a failure on one rank is raised on all."""
    results: list[T] = []
    failure = defer_error(comm, work, results)
    if comm.ranks > 1:
        comm.total(torch.zeros(0, dtype=torch.float64, device="cpu"), failure)
    return results[0]
