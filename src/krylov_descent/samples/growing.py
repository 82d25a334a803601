"""Sets that begin small and grow when other samples confirm too little of a step found on them.

Letters: g the gradient on A and d the step found there; g′ and H′ the gradient and the curvature on the next A and B,
drawn without regard to d, where d has led.

A step begins with the slope gᵀd on its own samples. On others it began with g′ᵀd − dᵀH′d: the slope with which it ends,
followed back by their curvature. The ratio of the two is the share of the direction that is no fit to A alone. H′ costs
nothing, as d is the next step's d_prev; g′ᵀd is an inner product. (Own samples cannot tell: they are bent along d many
times as much as others, d being made of their gradients.)

While the share is below one half, the noise of the gradient is larger than the gradient, in the metric of the step: a
direction from twice the samples is about twice as good, so that larger sets cost nothing per sample, and save what a
step costs beside them. Above it they would begin to cost, unless they are soon all samples: noise ends there. (At the
minimum of a sum of squares every step undoes the noise of the last, and half of it is confirmed whatever the size.)

B and C are parts of A, and C is what the quadratic model is tried on. Where the loss falls there by less than half of
what the model promised, it bends otherwise than the model says, or C has another slope than A: twice the samples are of
help against both. (Curvature that B shares with C is not judged by this.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from krylov_descent.samples.loading import Device
from krylov_descent.samples.subsets import Draw, SampleSet, Subsets

_FEWEST = 20  # steps before a mean is believed: one slope scatters as those of a few hundred samples do
_SOME = 5  # steps before damping follows it
_MEMORY = 0.95
_MOST = 10.0  # times the usual damping
_HELD = 0.5  # of a promised fall of the loss: with less, the model needs more samples


@dataclass(frozen=True)
class Confirmation:
    """Running means since the sets last grew, plain numbers that a state can hold.

    Attributes:
        slope: −gᵀd of the last step, not judged yet; 0 if there was none.
        expected: the mean of −gᵀd.
        confirmed: the mean of what other samples say of it.
        judged: steps in these means.
        wanted: the share below which larger sets pay.
        caution: how many times its usual damping a preconditioner should have.
    """

    slope: float = 0.0
    expected: float = 0.0
    confirmed: float = 0.0
    judged: float = 0.0
    wanted: float = 0.5
    caution: float = 1.0

    def after(self, confirmed: float) -> Confirmation:
        """With the last step judged: ``confirmed`` is dᵀH′d − g′ᵀd.

        Example:
            >>> known = Confirmation(slope=2.0).after(0.5)
            >>> known.slope, known.judged, known.share
            (0.0, 1.0, 0.25)
        """
        if not 0 < self.slope < math.inf or not math.isfinite(confirmed):
            return replace(self, slope=0.0)
        judged = self.judged + 1
        e = min(_MEMORY, 1 - 1 / judged)
        seen = max(-self.slope, min(self.slope, confirmed))  # a step far from the quadratic model counts no more
        new = replace(
            self,
            slope=0.0,
            expected=e * self.expected + (1 - e) * self.slope,
            confirmed=e * self.confirmed + (1 - e) * seen,
            judged=judged,
        )
        return new if judged < _SOME else replace(new, caution=_caution(new.share))

    @property
    def share(self) -> float:
        """Of the expected slope that other samples confirm."""
        return self.confirmed / self.expected if self.expected > 0 else 1.0

    @property
    def too_little(self) -> bool:
        """Whether larger sets pay."""
        return self.judged >= _FEWEST and self.share < self.wanted


@dataclass(frozen=True)
class Promise:
    """What became of the quadratic model's promises, on sets that grow.

    Attributes:
        agreement: what the loss on C fell by at the model's minimum, of what was promised; of the last step.
        doublings: of B and C, because that was too little at earlier ones.
    """

    agreement: float = 1.0
    doublings: float = 0.0

    @property
    def broken(self) -> bool:
        """Whether the model needs more samples."""
        return self.agreement < _HELD


def wanted(coverage: float) -> float:
    """The share below which larger sets pay, where A is this part of all samples: one half of few, all of nearly all.

    Example:
        >>> wanted(0.0), wanted(0.5)
        (0.5, 0.75)
    """
    return (1 + coverage) / 2


def _caution(share: float) -> float:
    """1 where half of a step is confirmed, more with less: noise is strongest in directions of little curvature."""
    return _MOST if share <= 0 else min(_MOST, max(1.0, (0.5 / share) ** 2))


_FACTOR = 1.5  # of one growth
_PART = 8  # C is an eighth of A: enough to tell whether a step holds there, while its slope is no less than noise
_LEAST = 64  # samples in B and C, if A has as many, while the model does not promise too much
_MOST_SAMPLES = 512  # samples in B: averages over steps, and few directions, need no more


class Growing(Subsets):
    """Draws, at every step, a fresh set A, and parts of it as B and C: few samples at first, more when noise demands.

    For deep networks and much data, with ``KSD(model.parameters(), **DEEP)``. A step that was found on few samples is
    in part a fit to these alone: what the next step's samples say of it tells. Where
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
        doubled = min(size, _MOST_SAMPLES, _LEAST << min(model_growth, 8))
        c = cut(0, max(usual, doubled))
        b = c if c.size <= _MOST_SAMPLES else cut(0, _MOST_SAMPLES)
        # The preconditioner's averages over steps have samples enough without the doublings.
        statistics = cut(0, usual) if usual < b.size else b
        return Draw(self._source, cut(0, size), b, c, statistics=statistics, grows=True)
