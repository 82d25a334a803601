"""Sets that begin small and grow when held-out samples confirm too little of a step.

Letters: g the gradient on A and d the step found there; g′ and H′ the gradient and the curvature at the end of d, on
the next A and B, which are drawn independently of d.

At its start, a step has the slope gᵀd on its own samples and g′ᵀd − dᵀH′d on fresh ones: their slope at its end,
extrapolated back by their curvature. The ratio of the two is the fraction of the step that generalises beyond A. H′
costs nothing, as d is the next step's d_prev; g′ᵀd is one inner product. (The step's own samples cannot serve: their
curvature along d is many times larger, as d is made of their gradients.)

While the ratio is below one half, the gradient's noise exceeds the gradient, in the metric of the step: twice the
samples give a direction about twice as good, so that larger sets cost nothing per sample and save the fixed cost of
steps. Above one half they would cost more, unless they soon hold all samples, where noise ends. (At the minimum of a
sum of squares every step undoes the noise of the last, and the ratio is one half for any size.)

Half of B and of C is outside of A, as long as there are samples, and the quadratic model has the slope of C. On
samples of A alone the step would be too long, as it is made from their gradients; on others alone too short: the
length that is best for one step is set by noise along directions of large curvature, which later steps remove, and
those of little curvature need longer steps (Wu et al. 2018).

The model is tested on C. If the loss there falls by less than half of the prediction, averaged over recent steps, its
curvature differs from the model's: twice the samples help. (Curvature that B and C share is not tested.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from krylov_descent.samples.interface import Choice, StepWatch
from krylov_descent.samples.loading import Device
from krylov_descent.samples.subsets import Draw, SampleSet, Subsets

_FEWEST = 20  # steps before the sets may grow: the slope of one step is noisy
_SOME = 5  # steps before sets grow that are far too small
_FAR = 0.5  # part of the threshold below which they are
_MEMORY = 0.95  # of the running means
_FACTOR = 1.5  # of one growth
_MOST_GROWTHS = 4  # at a time: few steps tell little
_HELD = 0.5  # agreement below which B and C are doubled
_WEIGHT = 0.2  # of one step in it: on any samples, a step may be too long for a quadratic model


@dataclass(frozen=True)
class HoldoutSlope:
    """The mean slopes of recent steps on their own and on held-out samples, since the sets last grew.

    Attributes:
        slope: −gᵀd of the last step, not judged yet; 0 if there was none.
        expected: the mean of −gᵀd.
        holdout: the mean of dᵀH′d − g′ᵀd, the same slope on held-out samples.
        judged: the number of steps in these means.
        threshold: the ratio below which larger sets pay.
    """

    slope: float = 0.0
    expected: float = 0.0
    holdout: float = 0.0
    judged: float = 0.0
    threshold: float = 0.5

    def after(self, holdout: float) -> HoldoutSlope:
        """Judge the last step: ``holdout`` is dᵀH′d − g′ᵀd.

        Example:
            >>> known = HoldoutSlope(slope=2.0).after(0.5)
            >>> known.slope, known.judged, known.ratio
            (0.0, 1.0, 0.25)
        """
        if not 0 < self.slope < math.inf or not math.isfinite(holdout):
            return replace(self, slope=0.0)
        judged = self.judged + 1
        e = min(_MEMORY, 1 - 1 / judged)
        seen = max(-self.slope, min(self.slope, holdout))  # bounds the weight of a step far from the quadratic model
        return replace(
            self,
            slope=0.0,
            expected=e * self.expected + (1 - e) * self.slope,
            holdout=e * self.holdout + (1 - e) * seen,
            judged=judged,
        )

    @property
    def ratio(self) -> float:
        """The fraction of the expected slope that held-out samples confirm."""
        return self.holdout / self.expected if self.expected > 0 else 1.0

    @property
    def growths(self) -> int:
        """How often the sets should grow by half.

        The gradient's noise falls as the sets grow, the signal does not: sets (1/ratio − 1)/(1/threshold − 1) times as
        large would have a ratio at the threshold. They grow by the root of that, as large sets make few steps.

        Example:
            >>> HoldoutSlope(expected=1.0, holdout=0.4, judged=20.0).growths
            1
            >>> HoldoutSlope(expected=1.0, holdout=0.1, judged=5.0).growths  # three times as large
            2
        """
        low = self.ratio < self.threshold and self.judged >= _FEWEST
        if not low and not (self.ratio < _FAR * self.threshold and self.judged >= _SOME):
            return 0
        wanted = (1 / max(self.ratio, 1e-3) - 1) / max(1 / self.threshold - 1, 1e-3)
        return min(_MOST_GROWTHS, max(1, int(math.log(wanted) / 2 / math.log(_FACTOR))))


def threshold(coverage: float) -> float:
    """Return the ratio below which larger sets pay if A holds this fraction of all samples: from one half to one.

    Example:
        >>> threshold(0.0), threshold(0.5)
        (0.5, 0.75)
    """
    return (1 + coverage) / 2


@dataclass(frozen=True)
class GrowingState:
    """The state of growing sets.

    Attributes:
        growths: how often the sets grew by half.
        doublings: how often B and C were doubled, because the quadratic model predicted too much.
        agreement: the running mean of the ratio of actual to predicted decrease of the loss on C.
        slope: the slopes of recent steps on held-out samples.
    """

    growths: int = 0
    doublings: int = 0
    agreement: float = 1.0
    slope: HoldoutSlope = HoldoutSlope()


class GrowthWatch(StepWatch):
    """Observes how much of the last step fresh samples confirm, and whether the loss on C falls as predicted."""

    def __init__(self, sets: Draw, state: GrowingState, last_step: Tensor | None) -> None:
        super().__init__(state)
        self.needs_gradient = not sets.covers_all
        self._last = last_step if self.needs_gradient else None
        self._slope_at_end = math.nan
        self._slope = HoldoutSlope()
        if self.needs_gradient:
            self._slope = replace(state.slope, threshold=threshold(sets.coverage))
        self.gradient_noise = 1 - sets.coverage

    def see_gradient(self, slope: Callable[[Tensor], float]) -> None:
        """Compute the slope on the new A at the end of the last step."""
        if self._last is not None:
            self._slope_at_end = slope(self._last)

    def see_curvature(self, curvature: Callable[[Tensor], float]) -> None:
        """Compute the curvature on the new B along the last step, and judge the step."""
        if self.needs_gradient:
            along = math.nan if self._last is None else curvature(self._last)
            self._slope = self._slope.after(along - self._slope_at_end)

    def see_step(self, slope: Callable[[], float] | None, agreement: float) -> None:
        """Keep the step's slope, to be judged on the next samples, and its agreement with the model."""
        if self.needs_gradient and slope is not None:
            self._slope = replace(self._slope, slope=-slope())
        if not math.isnan(agreement):
            known = self._state.agreement
            self._state = replace(self._state, agreement=known + _WEIGHT * (max(-1.0, min(1.0, agreement)) - known))

    def after(self) -> Any:
        """Return the state with this step's evidence; the sizes stay."""
        return replace(self._state, slope=self._slope)


_PART = 8  # C is an eighth of A: enough to judge a step, while the slope on C is not below the noise
_LEAST = 64  # first size of B and C, if A has as many samples
_MOST_SAMPLES = 512  # largest size of B: averages over steps, and few directions, need no more


class Growing(Subsets):
    """Draws a fresh set A at every step, with half of B and C outside of it; sets begin small and grow with noise.

    It is meant for deep networks and much data, with ``KSD(model.parameters(), **DEEP)``. A step found on few samples
    partly overfits them, which the next step's samples reveal. If these confirm on average less than half of a step
    (the threshold rises to all of it as A approaches all samples), the sets grow by half, or more where they confirm
    little, up to all samples. B and C are an eighth of A but at least 64 samples, half of them other samples than A's.
    They are doubled, up to 512, when the loss on C falls by less than half of the quadratic model's
    prediction, averaged over recent steps. There is no schedule to set. ``report.set_sizes`` has the sizes,
    ``report.notes`` the reasons for changes. The sets depend on ``seed``, the iteration and the numbers of growths and
    doublings, which the optimizer remembers.

    Args:
        data: as for ``Subsets``.
        batch_size: the largest number of samples in a micro-batch.
        start: the size of the first A, at most the number of samples.
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
        >>> reports = [optimizer.step(closure, sets) for _ in range(100)]
        >>> reports[0].set_sizes
        {'A': 500, 'B': 64, 'C': 64}
        >>> reports[-1].loss < 0.2 * reports[0].loss
        True
    """

    State = GrowingState

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int = 512,
        start: int = 500,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        device: Device = None,
    ) -> None:
        super().__init__(
            data, batch_size=batch_size, seed=seed, collate_fn=collate_fn, num_workers=num_workers, device=device
        )
        if not isinstance(start, int) or isinstance(start, bool) or start < 1:
            raise ValueError(f"start is {start!r}, not a whole number ≥ 1. Pass the size of the first A, such as 500.")
        self._start = start

    def choose(self, iteration: int, state: Any, *, krylov_dim: int, shard: int, of_shards: int) -> Choice:
        """Choose the sets of one step, larger if recent steps demand it."""
        cut = functools.partial(self.draw, iteration, krylov_dim=krylov_dim, shard=shard, of_shards=of_shards)
        notes: tuple[str, ...] = ()
        known = state.slope
        if known.growths:
            state = replace(state, growths=state.growths + known.growths, slope=HoldoutSlope(slope=known.slope))
        sets = cut(search_growth=state.growths, model_growth=state.doublings)
        if known.growths:
            notes = (
                f"A now has {sets.sizes['A']} samples: fresh samples confirmed {known.ratio:.0%} of the slope of the "
                f"last {known.judged:.0f} steps.",
            )
        if state.agreement >= _HELD:
            return Choice(sets, state, notes)
        for more in range(1, 4):  # one doubling may be below the present size
            doublings = state.doublings + more
            larger = cut(search_growth=state.growths, model_growth=doublings)
            if larger.sizes["B"] > sets.sizes["B"]:
                part = f"fell by {state.agreement:.0%} of" if state.agreement > 0 else "rose in place of"
                size = larger.sizes["B"]
                note = f"B now has {size} samples: in recent steps the loss on C {part} the predicted decrease."
                return Choice(larger, replace(state, doublings=doublings, agreement=1.0), (*notes, note))
        return Choice(sets, replace(state, agreement=1.0), notes)

    def rolled_back(self, state: Any) -> Any:
        """Grow all sets by half."""
        return replace(state, growths=state.growths + 1)

    def watch(self, sets: Any, state: Any, last_step: Tensor | None) -> StepWatch:
        """Return an observer that judges the last step by the new samples."""
        return GrowthWatch(sets, state, last_step)

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
            krylov_dim: not used.
            search_growth: how often the sets grew.
            model_growth: how often B and C were doubled.
            shard: the index of the shard of each set, from 0.
            of_shards: the number of shards of each set.

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

        def around(k: int) -> SampleSet:
            """Cut k samples, half of them of A, or more if too few others are left."""
            stop = min(n, size + k // 2)
            return cut(stop - k, stop)

        usual = min(size, max(_LEAST, -(-size // _PART)))
        doubled = min(size, _MOST_SAMPLES, _LEAST << min(model_growth, 8))
        c = around(max(usual, doubled))
        b = c if c.size <= _MOST_SAMPLES else around(_MOST_SAMPLES)
        # The preconditioner averages over steps, and needs no doublings.
        statistics = around(usual) if usual < b.size else b
        return Draw(self._source, cut(0, size), b, c, statistics=statistics, grows=True)
