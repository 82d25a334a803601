"""Steps that shrink the residuals of a sketch straight, to all orders, by corrections with its own factorisation.

Letters: J [m, P] sketch, ρ [m] its residuals, z outputs of its rows, λ damping, φ [P] direction, η the fraction of φ
that a step follows, d [P] a step.

Along ηφ the outputs change by ηJφ and by terms of higher order. Late in training these terms limit η. Newton's method
with the J of the sketch removes them: d ← d − Jᵀ(JJᵀ + λ)⁻¹e with e = z(θ + d) − z(θ) − ηJφ, from d = ηφ. Each
correction costs a forward pass; the first is geodesic acceleration (Transtrum & Sethna 2012).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from krylov_descent.vectors.products import numbers_of

_SETTLED, _LEFT = 0.1, 0.1  # ‖e‖ relative to the residuals that are to be left, and those at least, relative to ρ
_SLOWLY = 0.7  # ratio of successive ‖e‖ beyond which corrections end
_BEND = 1.0  # largest length of all corrections, relative to ηφ
_MOST, _FEW = 5, 3  # corrections of a step, and those of a step that settles quickly


@dataclass(frozen=True, eq=False)
class Step:
    """A corrected step.

    Attributes:
        fraction: η.
        d: d.
        loss: the loss there.
        promised: the share of the sketch's loss that it removes by the linear model.
        corrections: the number that e took to settle; None if it did not.
    """

    fraction: float
    d: Tensor
    loss: float
    promised: float
    corrections: int | None

    @property
    def quick(self) -> bool:
        """Whether a longer step is likely to settle, too."""
        return self.corrections is not None and self.corrections <= _FEW


@dataclass(frozen=True, eq=False)
class StraightSteps:
    """The corrected step of each fraction.

    Attributes:
        phi: φ.
        length: ‖φ‖.
        rho: ρ.
        straight: Jφ.
        correct: maps e [m] to −Jᵀ(JJᵀ + λ)⁻¹e [P].
        look: maps d to the loss and the change of the outputs from θ to θ + d [m].
        norm: the length of a vector [P].
    """

    phi: Tensor
    length: float
    rho: Tensor
    straight: Tensor
    correct: Callable[[Tensor], Tensor]
    look: Callable[[Tensor], tuple[float, Tensor]]
    norm: Callable[[Tensor], float]

    def at(self, eta: float, near: Step | None = None) -> Step:
        """Return the lowest iterate of fraction η, from the corrections of a step ``near`` it if there is one."""
        plain = eta * self.phi
        d = plain if near is None else plain + (eta / near.fraction) ** 2 * (near.d - near.fraction * self.phi)
        wanted = (self.rho + eta * self.straight).norm(), self.rho.norm()
        room = _BEND * eta * self.length
        best, last, corrections, promised = (math.inf, d), math.inf, None, 0.0
        for k in range(_MOST + 1):
            loss, change = self.look(d)
            best = min(best, (loss, d), key=lambda found: found[0])
            e = change - eta * self.straight
            size, left, all_of_rho = numbers_of([e.norm(), *wanted])
            promised = 1 - (left / all_of_rho) ** 2 if all_of_rho > 0 else 0.0
            if size < _SETTLED * max(left, _LEFT * all_of_rho):
                corrections = k
            if corrections is not None or not size <= _SLOWLY * last or k == _MOST:
                break
            last = size
            d = d + self.correct(e)
            if not self.norm(d - plain) <= room:
                break
        return Step(eta, best[1], best[0], promised, corrections)

    def lowest(self, fractions: Sequence[float], first: int, before: float) -> Step:
        """Return the lowest step of some fractions, longest first: from the first, as long as others are lower.

        Longer ones are tried if it settles quickly. If it settles at all and lowers the loss, it is taken; otherwise
        shorter ones are tried.
        """
        best = begin = self.at(fractions[first])
        if begin.quick:
            for eta in reversed(fractions[:first]):
                longer = self.at(eta, best)
                best = min(best, longer, key=_loss)
                if best is not longer or not longer.quick:
                    break
            return best
        if begin.corrections is not None and begin.loss < before:
            return begin
        for eta in fractions[first + 1 :]:
            shorter = self.at(eta, best if math.isfinite(best.loss) else None)
            if shorter.loss >= best.loss and math.isfinite(best.loss):  # a long step may overflow
                break
            best = shorter
        if best is begin and first:
            best = min(best, self.at(fractions[first - 1], best), key=_loss)
        return best


def _loss(step: Step) -> float:
    return step.loss
