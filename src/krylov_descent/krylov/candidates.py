"""Candidate points for a search, and the best of them by values of the loss alone.

A subspace may come with candidates (``Starts``); ``Carry`` is what such a subspace adapts from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class Carry:
    """What a builder that adapts hands to itself at the next step: plain numbers, which a state can hold.

    Attributes:
        damping: λ of the flow.
        length: η, of the last piece of it that was followed.
        scale: what makes of the last step the rest of its direction, 1/η − 1; 0 if it was not along the flow.
        damped: λ of the last damped step.
        lost: steps in a row that took nothing.
        waits: the share of such steps lately.
        rows: m, if more are wanted than at first.
        longest: of the pieces that might be followed in the last step; 0 for what is usual.
        fell: the loss on C at the last candidate that was taken, of that before.
    """

    damping: float
    length: float
    scale: float
    damped: float
    lost: float = 0.0
    waits: float = 0.0
    rows: float = 0.0
    longest: float = 0.0
    fell: float = 1.0


@dataclass(frozen=True, eq=False)
class Family:
    """Points in a row, along which the loss is expected to have one minimum.

    Attributes:
        points: [l, m], coefficients in the rows of V; towards the end they are nearer to zero.
        first: the one to look at first.
        then: for each point, what is carried to the next step if it is taken.
    """

    points: Tensor
    first: int
    then: tuple[Carry, ...]


@dataclass(frozen=True)
class Starts:
    """Points at which the search may begin.

    Attributes:
        families: in the order in which they are asked; the first that has a better point than zero is taken.
        otherwise: what is carried to the next step if none has.
        kept: [m], what is then remembered in place of the last step, and nothing more is searched; None to search on.
    """

    families: tuple[Family, ...]
    otherwise: Carry
    kept: Tensor | None = None


def best_start(starts: Starts, value: Callable[[Tensor], float], before: float) -> tuple[Tensor, Carry, float] | None:
    """The best point of the first family that has one below ``before``, what is carried from it, and the loss there."""
    for family in starts.families:
        i, lowest = climb(family, value)
        if lowest < before:
            return family.points[i], replace(family.then[i], fell=lowest / before if before > 0 else 1.0), lowest
    return None


def climb(family: Family, value: Callable[[Tensor], float]) -> tuple[int, float]:
    """From the point to look at first as far as the loss falls: towards zero, or else away from it."""
    seen: dict[int, float] = {}

    def at(i: int) -> float:
        if not 0 <= i < len(family.points):
            return math.inf
        if i not in seen:
            v = value(family.points[i])
            seen[i] = v if math.isfinite(v) else math.inf
        return seen[i]

    i = family.first
    while i + 1 < len(family.points) and (at(i + 1) < at(i) or math.isinf(at(i))):  # a long step may overflow
        i += 1
    while i <= family.first and at(i - 1) < at(i):
        i -= 1
    return i, at(i)
