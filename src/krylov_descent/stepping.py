"""What a step of any method needs: the pass over A, a refusal where nothing is known, and a clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from krylov_descent.data import Microbatch
from krylov_descent.objective import BatchLosses, Objective, PassAgain, Statistics
from krylov_descent.precondition import Precondition, Preconditioner
from krylov_descent.progress import Counted

S = TypeVar("S", bound=Statistics)


def pass_with_statistics(
    objective: Objective, batches: Iterable[Microbatch], start: Callable[[], S]
) -> tuple[BatchLosses, Tensor, S]:
    """f, ∇f and statistics from one pass, or from another if the first was void; ``start`` makes fresh statistics."""
    while True:
        statistics = start()
        try:
            losses, g = objective.value_and_gradient(batches, statistics)
        except PassAgain:
            continue
        return losses, g, statistics


@dataclass(eq=False)
class OnA:
    """What the pass over A gave; its vectors are let go as soon as the basis is built."""

    losses: BatchLosses
    g: Tensor | None
    precondition: Precondition | None


def pass_over_A(
    objective: Objective, batches: Iterable[Microbatch], preconditioner: Preconditioner | None, key: tuple[int, ...]
) -> OnA:
    """f, ∇f and D⁻¹ on A; ``key`` seeds what is random in D."""
    counted = Counted(batches, objective.tell)
    if preconditioner is None:
        return OnA(*objective.value_and_gradient(counted), None)
    start = preconditioner.start
    losses, g, statistics = pass_with_statistics(objective, counted, lambda: start(objective, *key))
    return OnA(losses, g, statistics.solver(objective.comm))


def require_finite(loss: float, grad_norm: float) -> None:
    """Refuse to step from where nothing is known.

    Raises:
        ValueError: f or its gradient on A is not finite.
    """
    for what, value in (("loss", loss), ("gradient's norm", grad_norm)):
        if not math.isfinite(value):
            raise ValueError(
                f"The {what} on A is {value} at the current parameters, and there is no earlier point to return to. "
                "Look for NaN or inf in the data, labels out of range, logarithms or divisions by zero in the "
                "closure, or an initialisation that overflows."
            )


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """End a phase."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
