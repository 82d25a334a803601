"""Sums over micro-batches: weighted sums of vectors, and sums of numbers rounded once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from krylov_descent.distributed import Comm
from krylov_descent.distributed.sharded import local_part
from krylov_descent.vectors.devices import wide
from krylov_descent.vectors.parameters import ParameterVector


class WeightedSum:
    """Σ_b w_b x_b over micro-batches, x_b in the shapes of the parameters, as one vector [P].

    The sum is kept in units of the first weight, so that the first term is a copy and equal weights need no product.
    """

    def __init__(self, parameters: ParameterVector, out: Tensor | None = None) -> None:
        self._parameters = parameters
        self._total = parameters.empty() if out is None else out
        self._unit = 0.0  # nothing added yet

    def add(self, tensors: Sequence[Tensor | None], weight: float) -> None:
        """Add weight · tensors, where None stands for zeros."""
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

    def dot(self, x: Tensor, comm: Comm) -> Tensor:
        """Return the sum's inner product with a vector [P], float64, a term for ``comm.total``."""
        return self._unit * wide(comm.dot(self._total, x)) if self._unit else wide(x.new_zeros(()))

    def times(self, scale: float) -> Tensor:
        """Return the sum times ``scale``; this object must not be used afterwards."""
        total, unit = self._end()
        return total if unit * scale == 1 else total.mul_(unit * scale)

    def over_ranks(self, comm: Comm, scale: float, out: Tensor | None = None) -> Tensor:
        """Return this rank's part [P_local] of ``scale`` times the sum over all ranks; not to be used afterwards."""
        total, unit = self._end()
        if comm.ranks > 1 and unit != 1:  # units differ between ranks
            total, unit = total.mul_(unit), 1.0
        part = comm.reduce_scatter(total, out)
        return part if scale * unit == 1 else part.mul_(scale * unit)

    def _end(self) -> tuple[Tensor, float]:
        """Release the vector, and return it with the factor that makes it the sum."""
        total = self._total
        del self._total
        return (total, self._unit) if self._unit else (total.zero_(), 1.0)


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum, rounded once; ordinary addition if it overflows or a number is not finite, where fsum raises.

    Example:
        >>> exact_sum([1e16, 1.0, -1e16]), exact_sum([math.inf, -math.inf])
        (1.0, nan)
    """
    values = tuple(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)
