"""The only words the maths may say to other ranks.

Letters: P parameters, R ranks, P_local the part of a vector that one rank keeps, padded by zeros to the same length on
every rank. Every rank holds θ whole; V, g, D, d_prev and the point before it are kept in parts. On one process all of
this is the identity, so there is one Algorithm 2 and one Algorithm 3 for any R.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class RankError(RuntimeError):
    """Another rank failed, or cannot be reached: raised on every rank, so that all end in the same place.

    Attributes:
        connected: whether ranks still hear each other.
    """

    def __init__(self, message: str, *, connected: bool) -> None:
        super().__init__(message)
        self.connected = connected
        self._message, self._phase = message, ""

    def during(self, phase: str) -> RankError:
        """The same error with the phase of the step in its message, unless it has one."""
        if self._phase:
            return self
        told = RankError(f"During the {phase}: {self._message}", connected=self.connected)
        told._phase = phase
        return told


class Comm(Protocol):
    """Collectives over the ranks that share one optimisation.

    Attributes:
        rank: of this process, from 0.
        ranks: R.
        shard_of_sets: which shard of the sets this rank evaluates, and into how many they are cut.
        as_parameters: whether vectors are kept as the parameters are: whole in one process, or in the parameters' own
            placements.
        sent: bytes sent to other ranks so far.
    """

    rank: int
    ranks: int
    shard_of_sets: tuple[int, int]
    as_parameters: bool
    sent: int

    def sum(self, x: Tensor) -> Tensor:
        """The sum of a small tensor over ranks: completes inner products of parts."""
        ...

    def total(self, x: Tensor, failure: Exception | None = None) -> Tensor:
        """The sum over all samples of a small tensor: losses, weights, counts.

        Raises:
            Exception: ``failure``, what went wrong on this rank before the call.
            RankError: something went wrong on another.
        """
        ...

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """x·y of vectors [P], x of this rank's samples: a term for ``total``."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Elementwise maximum of a small tensor over ranks."""
        ...

    def reduce_scatter(self, x: Tensor, out: Tensor | None = None, *, exact: bool = False) -> Tensor:
        """[P] → [P_local]: the sum over ranks, of which each keeps its part; ``exact``: sent in the dtype of x."""
        ...

    def all_gather(self, x: Tensor, numel: int, *, row: bool = False) -> Tensor:
        """[P_local] → [P]: the parts put together on every rank; ``row``: x is a row of V."""
        ...

    def shard(self, x: Tensor) -> Tensor:
        """[P] → [P_local]: this rank's part of a vector that every rank holds whole."""
        ...

    def bounds(self, numel: int) -> tuple[int, int] | None:
        """Where this rank's part of a vector [P] begins and ends; its padding lies beyond P. None: in many places."""
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
        """x·y."""
        return x @ y

    def max(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def reduce_scatter(self, x: Tensor, out: Tensor | None = None, *, exact: bool = False) -> Tensor:
        """Return ``x``."""
        return x

    def all_gather(self, x: Tensor, numel: int, *, row: bool = False) -> Tensor:
        """Return ``x``."""
        return x

    def shard(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def bounds(self, numel: int) -> tuple[int, int]:
        """All of it."""
        return 0, numel


def part_length(comm: Comm, numel: int) -> int:
    """P_local."""
    return comm.shard(torch.empty(numel, device="meta")).numel()


def stacked(comm: Comm, x: Tensor) -> Tensor:
    """[R, …]: the small tensors of all ranks, in their order.

    Example:
        >>> stacked(SingleProcess(), torch.tensor([3.0, 4.0]))
        tensor([[3., 4.]])
    """
    everyone = x.new_zeros(comm.ranks, *x.shape)
    everyone[comm.rank] = x
    return comm.sum(everyone)


def added(comm: Comm, x: float, failure: Exception | None = None) -> float:
    """The sum of a number over the ranks; raises a failure of any of them, as ``comm.total`` does."""
    return float(comm.total(torch.tensor(x, dtype=torch.float64, device="cpu"), failure))


def attempt(comm: Comm, work: Callable[[], T], results: list[T] | None = None) -> Exception | None:
    """Do what concerns this rank only; with others around, what goes wrong is for the next ``comm.total`` to raise.

    A rank that raised by itself would leave the others waiting for it. What ``work`` returns is added to ``results``.
    """
    results = [] if results is None else results
    if comm.ranks == 1:
        results.append(work())
        return None
    try:
        results.append(work())
    except RankError:
        raise  # known to all
    except Exception as error:
        return error
    return None


def together(comm: Comm, work: Callable[[], T]) -> T:
    """Do what concerns this rank only, and return its result; if it fails on one rank, it fails on all."""
    results: list[T] = []
    failure = attempt(comm, work, results)
    if comm.ranks > 1:
        comm.total(torch.zeros(0, dtype=torch.float64, device="cpu"), failure)
    return results[0]
