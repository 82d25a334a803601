"""The progress bar, as the real tqdm draws it."""

from __future__ import annotations

import io
import itertools
import re
import time
from collections.abc import Callable
from contextlib import redirect_stderr

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Progress

Closure = Callable[[], tuple[Tensor, Tensor]]


@pytest.fixture
def slow() -> tuple[KSD, Closure, list[Progress]]:
    """An optimizer whose steps take about 0.3 s, with dozens of events in each, and the events."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    events: list[Progress] = []

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - torch.sin(3 * x)
        return r.square().mean(), r

    def wait(progress: Progress) -> None:
        time.sleep(0.005)
        events.append(progress)

    optimizer = KSD(model.parameters(), krylov_dim=20)
    optimizer.on_progress = wait
    return optimizer, closure, events


def rate(line: str) -> float:
    """The steps per second that a line of the bar shows."""
    found = re.search(r"([0-9.]+)(step/s|s/step)", line)
    assert found, line
    return float(found[1]) ** (1 if found[2] == "step/s" else -1)


def test_rate_and_remaining_time_are_those_of_steps(slow: tuple[KSD, Closure, list[Progress]]) -> None:
    optimizer, closure, events = slow
    screen, ends = io.StringIO(), [time.perf_counter()]
    with redirect_stderr(screen):
        for _ in optimizer.run(closure, max_steps=20, progress=True):
            ends.append(time.perf_counter())
            if len(ends) == 6:
                break
    took = [b - a for a, b in itertools.pairwise(ends)]
    lines = screen.getvalue().split("\r")
    assert len(events) > 5 * 20
    assert len(lines) < sum(took) / 0.1 + 5 + 4  # at tqdm's pace, at each step, and at both ends
    assert sum(" 4/20 " in line for line in lines) > 1  # the bar moves inside a step, too
    for line in (line for line in lines if re.search(" [1-5]/20 ", line)):
        found = re.search(r"(\d)/20 .*<(\d+):(\d+),", line)
        assert found, line
        steps, minutes, seconds = map(int, found.groups())
        assert 0.9 * min(took) < 1 / rate(line) < 1.1 * max(took), line
        assert (20 - steps) * 0.9 * min(took) - 1 < 60 * minutes + seconds < (20 - steps) * 1.1 * max(took), line


def test_a_run_of_seconds_shows_how_many_have_passed(slow: tuple[KSD, Closure, list[Progress]]) -> None:
    optimizer, closure, _ = slow
    screen = io.StringIO()
    with redirect_stderr(screen):
        steps = len(list(optimizer.run(closure, seconds=1, progress=True)))
    last = screen.getvalue().split("\r")[-1]
    assert re.match(rf"{steps}step \[00:0\d of 00:01, .*loss", last), last
