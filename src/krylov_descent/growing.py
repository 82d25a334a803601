"""Sets that begin small and grow when steps found on them go too far for other samples."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from krylov_descent.data import Draw, Subsets
from krylov_descent.loading import Device
from krylov_descent.sample_set import SampleSet

_FACTOR = 1.5  # of one growth
_PART = 8  # C is an eighth of A: enough to tell whether a step holds there, while its slope is no less than noise
_LEAST = 64  # samples in B and C, if A has as many, while the model does not promise too much
_MOST = 512  # samples in B: averages over steps, and few directions, need no more


class Growing(Subsets):
    """Draws, at every step, a fresh set A, and parts of it as B and C: few samples at first, more when noise demands.

    For deep networks and much data, with ``KSD(model.parameters(), **DEEP)``. A step that was found on few samples is
    in part a fit to these alone: what the next step's samples say of it tells (``krylov_descent.confirmation``). Where
    on average they confirm less than half of it (more, the more of all samples is in A), the sets grow by half; at all
    samples they stay. B and C, an eighth of A but no fewer than 64, are doubled, up to 512, when the loss on C falls by
    less than half of what the quadratic model on B promised. No schedule, nothing to set. ``report.set_sizes`` has the
    sizes, ``report.notes`` says why they changed. The sets depend on ``seed``, the iteration and the numbers of growths
    and doublings, which the optimizer remembers.

    Args:
        data: as for ``Subsets``.
        batch_size: the largest number of samples in a micro-batch.
        start: the samples of the first A; all of them where there are fewer.
        seed: any integer.
        collate_fn, num_workers, device: as for ``Subsets``.

    Example:
        >>> import torch
        >>> from krylov_descent import DEEP, KSD, Growing
        >>> x = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
        >>> y = torch.sin(x.sum(1, keepdim=True))
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
        >>> optimizer, sets = KSD(model.parameters(), **DEEP), Growing((x, y), batch_size=1000, seed=0)
        >>> def closure(batch):
        ...     r = model(batch[0]) - batch[1]
        ...     return r.square().mean(), r
        >>> reports = [optimizer.step(closure, sets) for _ in range(50)]
        >>> reports[0].set_sizes
        {'A': 500, 'B': 64, 'C': 64}
        >>> reports[-1].loss < 0.2 * reports[0].loss
        True
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int,
        start: int = 500,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        device: Device = None,
    ) -> None:
        super().__init__(
            data, batch_size=batch_size, seed=seed, collate_fn=collate_fn, num_workers=num_workers, device=device
        )
        if not isinstance(start, int) or isinstance(start, bool) or start < 1:
            raise ValueError(f"start is {start!r}, not a whole number ≥ 1. Pass the samples of the first A, 500 say.")
        self._start = start

    def __repr__(self) -> str:
        return f"Growing({self._size} samples, batch_size={self._batch_size}, start={self._start}, seed={self._seed})"

    def draw(
        self,
        iteration: int,
        *,
        krylov_dim: int,
        search_growth: int = 0,
        model_growth: int = 0,
        shard: int = 0,
        of_shards: int = 1,
    ) -> Draw:
        """Choose the sets of one step; nothing is loaded yet.

        Args:
            iteration: the number of the step: the same number gives the same sets.
            krylov_dim: has no influence here.
            search_growth: how often the sets grew.
            model_growth: how often B and C were doubled.
            shard: which shard of each set is wanted, from 0.
            of_shards: into how many shards each set is cut.

        Example:
            >>> import torch
            >>> Growing(torch.arange(10_000), batch_size=500, seed=0).draw(7, krylov_dim=1, search_growth=2).sizes
            {'A': 1125, 'B': 141, 'C': 141}
        """
        n = self._size
        enough = math.log(max(1.0, n / self._start)) / math.log(_FACTOR)  # growths that reach all samples
        size = n if search_growth >= enough else round(self._start * _FACTOR**search_growth)
        cut = functools.partial(
            SampleSet,
            population=n,
            batch_size=self._batch_size,
            shard=shard,
            of_shards=of_shards,
            key=(self._seed, iteration),
        )
        usual = min(size, max(_LEAST, -(-size // _PART)))
        doubled = min(size, _MOST, _LEAST << min(model_growth, 8))
        c = cut(0, max(usual, doubled))
        b = c if c.size <= _MOST else cut(0, _MOST)
        # The preconditioner's averages over steps have samples enough without the doublings.
        statistics = cut(0, usual) if usual < b.size else b
        return Draw(self._source, cut(0, size), b, c, statistics=statistics, grows=True)


__all__ = ["Growing"]
