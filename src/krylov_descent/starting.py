"""Where the search begins, for a basis that has points to begin from: the best of them, by values of the loss alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from krylov_descent.basis import Family, Starts
from krylov_descent.carry import Carry


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
