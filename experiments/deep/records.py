"""Runs of the study of deep networks by task and method, and where each stood at the end of a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.deep.plan import BUDGETS, TASKS
from experiments.deep.style import NAMES
from experiments.methods import KINDS
from experiments.records import OVER, Point, Run, read_runs

ByMethod = Mapping[str, Sequence[Run]]


def by_task(results: Path) -> dict[str, list[Run]]:
    """The runs of each task that has some, in the order of the plan."""
    runs = [run for run in read_runs(results) if run.points]
    names = [*TASKS, *sorted({run.problem for run in runs} - set(TASKS))]
    found = {name: [run for run in runs if run.problem == name] for name in names}
    return {name: several for name, several in found.items() if several}


def budgets_of(runs: Sequence[Run]) -> list[float]:
    """Those of the plan that some run serves, and those of runs with a schedule, shortest first."""
    scheduled = {run.allowed.amount for run in runs if _scheduled(run)}
    longest = max((run.points[-1].seconds for run in runs if not _scheduled(run)), default=0.0)
    return sorted(scheduled | {seconds for seconds in BUDGETS if seconds <= longest})


def serving(runs: Sequence[Run], seconds: float) -> dict[str, list[Run]]:
    """By method, the runs that can be compared at a budget: of this budget, or, without a schedule, at least as long.

    Each is cut to what counts.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        enough = run.allowed.amount == seconds if _scheduled(run) else _reaches(run, seconds)
        if enough and run.method in NAMES:
            found.setdefault(run.method, []).append(cut(run, seconds))
    return {method: sorted(found[method], key=lambda run: run.seed) for method in NAMES if method in found}


def cut(run: Run, seconds: float) -> Run:
    """The run up to a budget and a fortieth beyond it, since steps are whole."""
    points = tuple(point for point in run.points if point.seconds <= OVER * seconds)
    return dataclasses.replace(run, points=points)


def at_end(run: Run) -> Point:
    """Where a run stood at the end of the budget that it was cut to."""
    return run.points[-1]


def _scheduled(run: Run) -> bool:
    return run.method in KINDS and KINDS[run.method].scheduled


def _reaches(run: Run, seconds: float) -> bool:
    """Also a run that ended before, because it had diverged or could go no further, counts with its last point."""
    return run.points[-1].seconds >= seconds or (run.end not in (None, "budget") and run.allowed.amount >= seconds)
