"""Ctrl-C at any moment of a step leaves it undone, or done: never between."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import krylov_descent
from tests.reliability.atomic_world import KINDS, World, difference, ready

pytestmark = pytest.mark.nightly

SOURCE = str(Path(krylov_descent.__file__).parent)
#: Interrupts of each kind, for each method and each kind of data.
TRIALS = int(os.environ.get("KRYLOV_DESCENT_TEST_INTERRUPTS", "15"))


class Lines:
    """Counts the lines that the package runs, and interrupts before the one of a given number."""

    def __init__(self, stop: int | None) -> None:
        self.seen: list[tuple[str, int]] = []
        self._stop = stop

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "line":
            if len(self.seen) == self._stop:
                raise KeyboardInterrupt
            self.seen.append((frame.f_code.co_filename, frame.f_lineno))
        return self


@pytest.fixture
def traced() -> Iterator[Callable[[World, int | None], Lines]]:
    before = sys.gettrace()

    def step(world: World, stop: int | None) -> Lines:
        lines = Lines(stop)
        sys.settrace(lines)
        try:
            world.step()
        except KeyboardInterrupt:
            assert len(lines.seen) == stop
        finally:
            sys.settrace(before)
        return lines

    yield step
    sys.settrace(before)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("method", ["ksd", "flow"])
def test_an_interrupt_before_any_line(method: str, kind: str, traced: Callable[[World, int | None], Lines]) -> None:
    world, before, after, _ = ready(method, kind, "later" if kind == "full batch" else "undoing")
    seen = traced(world, None).seen
    world.put(before)
    last = {line: n for n, line in enumerate(seen)}  # windows are at the end of things more often than at their start
    outcomes = {"before": 0, "after": 0}
    chosen = random.Random(0).sample(sorted(last.values()), min(TRIALS, len(last)))
    for n in (*chosen, *range(len(seen) - 15, len(seen))):
        traced(world, n)
        left = world.snapshot()
        outcome = "before" if difference(before, left) == [] else "after"
        if outcome == "after":
            assert difference(after, left) == [], f"line {seen[n]}, number {n} of {len(seen)}"
            world.put(before)
        outcomes[outcome] += 1
    assert outcomes["before"] > TRIALS // 2
    world.step()
    assert difference(after, world.snapshot()) == []


# Python swallows an exception that is raised where an object is collected: the step then goes on to its end.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["ksd", "flow"])
def test_a_signal_at_any_moment(method: str, kind: str) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    world, before, after, seconds = ready(method, kind, "later" if kind == "full batch" else "undoing")
    generator = random.Random(0)
    outcomes = {"before": 0, "after": 0}
    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        for trial in range(TRIALS):
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(1e-5, 1.2 * seconds))
                world.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
            left = world.snapshot()
            outcome = "before" if difference(before, left) == [] else "after"
            if outcome == "after":
                assert difference(after, left) == [], f"trial {trial}"
                world.put(before)
            outcomes[outcome] += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert outcomes["before"] > 0, outcomes
    world.step()
    assert difference(after, world.snapshot()) == []
