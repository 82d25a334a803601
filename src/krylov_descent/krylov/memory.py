"""What a step of KSD hands to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from krylov_descent.krylov.candidates import Carry
from krylov_descent.samples.growing import Confirmation, Promise

Factors = Mapping[str, Tensor]
"""What a preconditioner remembers, by name."""


@dataclass(frozen=True, eq=False)
class Memory:
    """What a step hands to the next: everything a resumed run needs.

    Attributes:
        iteration: of the step to come, from 0.
        seed: of the sign probes.
        d_prev: the last step [P_local], or None; or what a builder wants remembered in its place, if none was taken.
        earlier: the steps before d_prev, the newest first, where the builder has use for them.
        accepted: the point [P_local] from which it was taken, or None if there is nothing to go back to.
        accepted_loss: f on A there.
        search_growth: how often C was doubled.
        growths: how often sets grew that are made to.
        carry: for the builder, where it adapts.
        confirmation: of the last steps by samples that they have not seen, where sets grow.
        promise: of the quadratic model, kept or not, where sets grow.
        factors: of a preconditioner that remembers, by name.
    """

    iteration: int
    seed: int
    d_prev: Tensor | None = None
    accepted: Tensor | None = None
    accepted_loss: float = math.inf
    search_growth: int = 0
    growths: int = 0
    carry: Carry | None = None
    confirmation: Confirmation | None = None
    promise: Promise | None = None
    factors: Factors | None = None
    earlier: tuple[Tensor, ...] = ()
