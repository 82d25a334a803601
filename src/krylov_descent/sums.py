"""Sums of vectors over micro-batches, and over the shares of a rank in a fixed order.

The order is a binary tree: neighbours first, then pairs of neighbours. Ranks that hold half of the shares each build
half of the tree, and ``comm.reduce_scatter`` the rest: the same bits, whoever holds which. With one share there is
nothing to add.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from krylov_descent.distributed import Comm
from krylov_descent.distributed.sharded import local_part
from krylov_descent.parameters import ParameterVector

T = TypeVar("T")


class WeightedSum:
    """Σ_b w_b x_b over micro-batches, x_b in the shapes of the parameters, as one vector [P].

    It is kept in units of the first weight, so that the first term is a copy, and equal weights cost no product.
    """

    def __init__(self, parameters: ParameterVector, out: Tensor | None = None) -> None:
        self._parameters = parameters
        self._total = parameters.empty() if out is None else out
        self._unit = 0.0  # nothing added yet

    def add(self, tensors: Sequence[Tensor | None], weight: float) -> None:
        """Add weight · tensors, with None for zeros."""
        views = self._parameters.views(self._total)
        params = self._parameters.params
        pairs = [
            (out, local_part(t.detach(), p)) for out, t, p in zip(views, tensors, params, strict=True) if t is not None
        ]
        outs, given = [out for out, _ in pairs], [t for _, t in pairs]
        if self._unit:
            if outs:
                torch._foreach_add_(outs, given, alpha=weight / self._unit)
            return
        self._unit = weight
        if outs:
            torch._foreach_copy_(outs, given)
        for out, t in zip(views, tensors, strict=True):
            if t is None:
                out.zero_()

    def dot(self, x: Tensor, comm: Comm) -> float:
        """The sum's inner product with a vector [P]: a term for ``comm.total``."""
        return self._unit * float(comm.dot(self._total, x)) if self._unit else 0.0

    def in_units(self) -> tuple[Tensor, float]:
        """A vector, and what it has to be multiplied with to be the sum; ends the use of this object."""
        return (self._total, self._unit) if self._unit else (self._total.zero_(), 1.0)

    def times(self, scale: float) -> Tensor:
        """The sum times ``scale``; ends the use of this object."""
        if not self._unit:
            return self._total.zero_()
        return self._total if self._unit * scale == 1 else self._total.mul_(self._unit * scale)


class TreeSum(ABC, Generic[T]):
    """Collects one share after the other, each in a collector of its own, which ends as a vector [P].

    No function of a subclass is kept here: a cycle of references would keep vectors alive.
    """

    def __init__(self, shares: int) -> None:
        self.shares = shares
        self._current, self._collector = 0, self.begin()
        self._sums: list[tuple[int, Tensor]] = []  # (how many shares, their sum), larger ones first

    @abstractmethod
    def begin(self) -> T:
        """An empty collector."""

    @abstractmethod
    def end(self, share: int, collector: T) -> Tensor:
        """What was collected."""

    def of(self, share: int) -> T:
        """The collector of a share; those before it are closed."""
        while self._current < share:
            self._close()
            self._current, self._collector = self._current + 1, self.begin()
        return self._collector

    def total(self) -> Tensor:
        """The sum over all shares; ends the use of this object."""
        self.of(self.shares - 1)
        self._close()
        del self._collector
        ((_, total),) = self._sums
        self._sums = []
        return total

    def _close(self) -> None:
        count, x = 1, self.end(self._current, self._collector)
        while self._sums and self._sums[-1][0] == count:
            _, before = self._sums.pop()
            count, x = 2 * count, before.add_(x)
        self._sums.append((count, x))


class VectorSums(TreeSum[Tensor]):
    """Shares collected in vectors of zeros."""

    def __init__(self, parameters: ParameterVector, shares: int) -> None:
        self._parameters = parameters
        super().__init__(shares)

    def begin(self) -> Tensor:
        """Zeros [P]."""
        return self._parameters.zeros()

    def end(self, share: int, collector: Tensor) -> Tensor:
        """The same vector."""
        return collector


class ShareSums(TreeSum[WeightedSum]):
    """Σ_b w_b x_b over the micro-batches of all shares of a rank, and its inner product with a direction, by share.

    Args:
        parameters: whose shapes the terms have.
        comm: knows this rank's shares, and adds up those of others.
        along: the direction [P], if one is asked for.
        out: room for the sum [P]; used where there is one share.
    """

    def __init__(
        self, parameters: ParameterVector, comm: Comm, along: Tensor | None = None, out: Tensor | None = None
    ) -> None:
        self.slopes = [0.0] * comm.shares
        self._parameters, self._comm = parameters, comm
        self._along, self._out = along, out if comm.shares == 1 else None
        self._alone = comm.ranks * comm.shares == 1
        self._unit = 1.0
        self._total: Tensor | None = None
        super().__init__(comm.shares)

    def begin(self) -> WeightedSum:
        """Nothing yet."""
        return WeightedSum(self._parameters, self._out)

    def end(self, share: int, collector: WeightedSum) -> Tensor:
        """The sum over a share."""
        if self._along is not None:
            self.slopes[share] = collector.dot(self._along, self._comm)
        if not self._alone:
            return collector.times(1.0)
        x, self._unit = collector.in_units()  # one multiplication for this unit and for what follows
        return x

    def add(self, share: int, tensors: Sequence[Tensor | None], weight: float) -> None:
        """Add weight · tensors to a share; shares come in order."""
        self.of(share).add(tensors, weight)

    def close(self) -> None:
        """Nothing more is to be added."""
        self._total = self.total()
        self._along = None

    def over_ranks(self, scale: float, out: Tensor | None = None) -> Tensor:
        """The sum over all ranks times ``scale``, of which this one keeps its part [P_local]; ends the use of this."""
        assert self._total is not None
        total, self._total = self._total, None
        scale *= self._unit
        # Scaled after the sum, so that rounding is the same whoever adds.
        part = self._comm.reduce_scatter(total, out)
        return part if scale == 1 else part.mul_(scale)


def exact_sum(values: Iterable[float]) -> float:
    """Σ, rounded once; of numbers that are not finite, or too large together, what addition gives: fsum would raise.

    Example:
        >>> exact_sum([1e16, 1.0, -1e16]), exact_sum([math.inf, -math.inf])
        (1.0, nan)
    """
    values = tuple(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)
