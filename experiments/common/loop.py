"""The loop that drives every run: it advances, evaluates where a point is due, and ends.

The clock and the cost counter run inside ``advance`` alone: evaluations and files are on the house.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

from experiments.common.budget import Budget

Watch = Callable[[dict[str, Any] | None, float], None]
"""Called after every advance with the share of the budget that is spent, and with the point where there is one."""


@dataclasses.dataclass(frozen=True)
class Advance:
    """What one advance came to.

    Attributes:
        sample_gradients: its cost, in gradients of one sample.
        report: of the step, if the method gives one.
        end: why the method goes no further, if it does not; one that says "diverged" is not evaluated any more.
        steps: how many it took.
    """

    sample_gradients: float = 0.0
    report: Any = None
    end: str | None = None
    steps: int = 1


@dataclasses.dataclass
class Progress:
    """Where a run is; all of it goes into a checkpoint."""

    step: int = 0
    seconds: float = 0.0
    sample_gradients: float = 0.0
    due: float = 0.0
    best: float = math.inf
    since_best: int = 0
    lines: int = 1  # of the file, the header among them
    reason: str | None = None  # why it is to end, if it is


class Work(Protocol):
    """A method at work on a problem."""

    @property
    def samples(self) -> int:
        """Gradients of one sample that are a gradient over the training set."""
        ...

    def advance(self, share: float) -> Advance:
        """Go on by one step; ``share`` ∈ [0, 1] of the budget is spent, for schedules."""
        ...

    def point(self, progress: Progress, report: Any) -> dict[str, Any]:
        """The line of a point: the cost so far, and what it gave, its "loss" among that."""
        ...

    def save(self, progress: Progress) -> None:
        """Keep what a run that is cut off here continues from."""
        ...


@dataclasses.dataclass(frozen=True)
class Pace:
    """When points are due: close together at first, when most happens, and farther apart as the budget is spent.

    Attributes:
        growth: distance to the next point, as a share of what is spent.
        least: the shortest distance, as a share of the budget.
        most: the longest one.
        marks: amounts that runs are compared at. A point is due before the step that is likely to pass one, since a
            step of a second-order method may be long, and after it.
        times: set amounts in place of those distances.
    """

    growth: float = 0.1
    least: float = 0.01
    most: float = 0.04
    marks: tuple[float, ...] = ()
    times: tuple[float, ...] = ()

    def next(self, spent: float, amount: float) -> float:
        """What will be spent when the next point is due."""
        if self.times:
            return next((time for time in self.times if time > spent), amount)
        return spent + min(max(self.growth * spent, self.least * amount), self.most * amount)

    def passing(self, before: float, spent: float) -> bool:
        """Whether the last step passed a mark, or one as long as that would."""
        return any(before < mark <= spent + (spent - before) for mark in self.marks)


@dataclasses.dataclass
class Loop:
    """A run that is going on.

    Attributes:
        work: what is driven.
        budget: where it ends.
        pace: when points are due.
        write: takes the line of every point.
        clock: whose seconds count.
        progress: where it is; at the beginning unless given.
        watch: is told what happens.
        patience: evaluations without a better held-out error after which it ends; None for never.
    """

    work: Work
    budget: Budget
    pace: Pace
    write: Callable[[dict[str, Any]], None]
    clock: Callable[[], float] = time.process_time
    progress: Progress = dataclasses.field(default_factory=Progress)
    watch: Watch | None = None
    patience: int | None = None

    def run(self) -> str:
        """Go on until an end, and return why it is one; the first point is that of the initial weights."""
        progress, amount = self.progress, self.budget.amount
        reason = progress.reason if progress.step else self._evaluate(None)
        if self._spent() >= amount:
            reason = "budget"
        while reason is None:
            began, before = self.clock(), self._spent()
            advance = self.work.advance(before / amount)
            progress.seconds += self.clock() - began
            progress.sample_gradients += advance.sample_gradients
            progress.step += advance.steps
            spent = self._spent()
            self._tell(None)
            over, ending = spent >= amount, advance.end
            if ending == "diverged":
                reason = ending
            elif over or ending or spent >= progress.due or self.pace.passing(before, spent):
                reason = self._evaluate(advance.report) or ("budget" if over else ending)
        return reason

    def _spent(self) -> float:
        return self.budget.spent(self.progress.seconds, self.progress.sample_gradients / self.work.samples)

    def _tell(self, point: dict[str, Any] | None) -> None:
        if self.watch is not None:
            self.watch(point, min(self._spent() / self.budget.amount, 1.0))

    def _evaluate(self, report: Any) -> str | None:
        """Write a point, and save; returns why the run should end, if it should."""
        progress = self.progress
        point = self.work.point(progress, report)
        self.write(point)
        progress.lines += 1
        progress.due = self.pace.next(self._spent(), self.budget.amount)
        if not math.isfinite(point["loss"]):
            progress.reason = "diverged"
        elif self.patience is not None:
            improved = point["held_out_error"] < progress.best
            progress.best = min(point["held_out_error"], progress.best)
            progress.since_best = 0 if improved else progress.since_best + 1
            progress.reason = "early stop" if progress.since_best >= self.patience else None
        self.work.save(progress)
        self._tell(point)
        return progress.reason
