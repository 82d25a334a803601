"""Times that compare on a noisy machine: candidates take turns within each round, and ratios are taken there."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Median over rounds, and the quartiles as its spread."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def interleaved(candidates: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of each candidate in each round; every round calls all of them once, in a new order."""
    order = list(candidates)
    shuffle = random.Random(0).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in order}
    for turn in range(-warmup, rounds):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            candidates[name]()
            elapsed = time.perf_counter() - start
            if turn >= 0:
                seconds[name].append(elapsed)
    return seconds


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Of times of the same rounds, pair by pair."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def spread(values: Sequence[float]) -> Ratio:
    """Median and quartiles; the extremes where there are fewer than four."""
    if len(values) < 4:
        return Ratio(statistics.median(values), min(values), max(values))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Ratio(median, low, high)
