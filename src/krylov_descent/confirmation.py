"""How much of what a step expects do other samples confirm? What tells sets when to grow.

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

import math
from dataclasses import dataclass, replace

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
