"""What a step of any method needs: the pass over A, a point to come back to if something fails, and a clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from krylov_descent.data import Microbatch
from krylov_descent.distributed import Comm
from krylov_descent.objective import BatchLosses, Objective, PassAgain, Statistics

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


@contextmanager
def restoring(objective: Objective, theta: Callable[[], Tensor]) -> Iterator[None]:
    """θ as it is now, given by this rank's part [P_local], is put back if anything inside fails."""
    try:
        yield
    except BaseException as error:
        if together_still(objective.comm, error):
            objective.move_to(theta())
        raise


def together_still(comm: Comm, error: BaseException) -> bool:
    """Whether all ranks have met this error, so that they can put θ back together."""
    if comm.ranks == 1:
        return True
    return isinstance(error, Exception) and getattr(error, "connected", True)


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
