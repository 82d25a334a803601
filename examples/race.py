"""What the examples compare with: a watch that counts CPU seconds, and Adam with the best of three learning rates.

Seconds are CPU seconds of this process: the wall clock depends on what else the machine does.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

RATES = (1e-3, 3e-3, 1e-2)
Curve = list[tuple[float, float]]


class Stopwatch:
    """CPU seconds, and what was measured at them; it stands still while it measures."""

    def __init__(self, measure: Callable[[], float]) -> None:
        self.seconds, self.curve = 0.0, [(0.0, measure())]
        self._measure, self._begin = measure, time.process_time()

    def mark(self, every: float = 0.0) -> float:
        """Measure, if ``every`` seconds have passed since the last time; return the seconds spent so far."""
        now = time.process_time()
        self.seconds, self._begin = self.seconds + now - self._begin, now
        if self.seconds >= self.curve[-1][0] + every:
            self.curve.append((self.seconds, self._measure()))
            self._begin = time.process_time()
        return self.seconds

    @property
    def last(self) -> float:
        """What was measured last."""
        return self.curve[-1][1]


def minibatches(data: tuple[Tensor, ...], size: int) -> Iterator[tuple[Tensor, ...]]:
    """Epoch after epoch in a new order, without end."""
    while True:
        for chosen in torch.split(torch.randperm(len(data[0])), size):
            yield tuple(x[chosen] for x in data)


def tuned_adam(
    model: nn.Module, loss: Callable[[], Tensor], measure: Callable[[], float], seconds: float, clip: float = 1e9
) -> tuple[float, Stopwatch]:
    """Run Adam with each learning rate from where the model is, and leave the model where the best of them ended.

    Args:
        model: what to train.
        loss: called once a step; draws its own mini-batch.
        measure: what is compared at the end; lower is better.
        seconds: for each learning rate, which falls linearly to 0 within them.
        clip: the largest norm of a gradient.

    Returns:
        The best learning rate, and its watch.
    """
    start = copy.deepcopy(model.state_dict())
    runs: list[tuple[float, Stopwatch, dict[str, Any]]] = []
    for rate in RATES:
        model.load_state_dict(start)
        adam, watch = torch.optim.Adam(model.parameters(), lr=rate, fused=True), Stopwatch(measure)
        while (left := 1 - watch.mark(every=seconds / 40) / seconds) > 0:
            adam.param_groups[0]["lr"] = rate * left
            adam.zero_grad()
            loss().backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            adam.step()
        watch.mark()
        runs.append((rate, watch, copy.deepcopy(model.state_dict())))
    rate, watch, best = min(runs, key=lambda run: run[1].last)
    model.load_state_dict(best)
    return rate, watch
