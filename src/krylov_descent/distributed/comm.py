"""The only words the maths may say to other ranks.

Letters: P parameters, R ranks, P_local = P/R the part of a vector that one rank keeps.
Every rank holds θ whole; V, g, D and d_prev are kept in parts. On one process all of this is the identity,
so there is one Algorithm 2 and one Algorithm 3 for any R.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Comm(Protocol):
    """Collectives over the ranks that share one optimisation."""

    def sum(self, x: Tensor) -> Tensor:
        """Sum of a small tensor (inner products, losses, counts) over ranks, the same on each."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Elementwise maximum of a small tensor over ranks."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[P] → [P_local]: sum over ranks, of which each keeps its part."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[P_local] → [P]: the parts put together on every rank."""
        ...

    def shard(self, x: Tensor) -> Tensor:
        """[P] → [P_local]: this rank's part of a vector that every rank holds whole."""
        ...


class SingleProcess:
    """One rank: every collective is the identity."""

    def sum(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def max(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x

    def shard(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return x
