"""Runs of the study of deep networks by task and method, and which of them compare at a budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.common.records import OVER, Run, ordered, read_runs
from experiments.deep.plan import BUDGETS, TASKS
from experiments.deep.style import NAMES
from experiments.supervised.methods import KINDS


def by_task(results: Path, *, required: bool = True) -> dict[str, list[Run]]:
    """The runs of each task that has some, in the order of the plan.

    Raises:
        ValueError: there are none, though they are required.
    """
    runs = [run for run in read_runs(results) if run.points]
    if not runs and required:
        raise ValueError(f"There are no runs in {results}: make some with `python -m experiments deep study`.")
    tasks = ordered((run.problem for run in runs), TASKS)
    return {task: [run for run in runs if run.problem == task] for task in tasks}


def scheduled(run: Run) -> bool:
    """Whether it depends on its budget."""
    return run.method in KINDS and KINDS[run.method].scheduled


def budgets_of(runs: Sequence[Run]) -> list[float]:
    """Those of the plan that some run serves, and those of runs with a schedule, shortest first."""
    own = {run.seconds for run in runs if scheduled(run)}
    longest = max((run.points[-1].seconds for run in runs if not scheduled(run)), default=0.0)
    return sorted(own | {seconds for seconds in BUDGETS if seconds <= longest})


def serving(runs: Sequence[Run], seconds: float) -> dict[str, list[Run]]:
    """By method, the runs that can be compared at a budget: of this budget, or, without a schedule, at least as long.

    Each is cut to what counts: the budget and a fortieth beyond it, since steps are whole.
    """
    found: dict[str, list[Run]] = {}
    for run in runs:
        enough = run.seconds == seconds if scheduled(run) else _reaches(run, seconds)
        if enough and run.method in NAMES:
            found.setdefault(run.method, []).append(run.cut(OVER * seconds))
    return {method: found[method] for method in NAMES if method in found}


def _reaches(run: Run, seconds: float) -> bool:
    """Also a run that ended before, because it had diverged or could go no further, counts with its last point."""
    return run.points[-1].seconds >= seconds or (run.end not in (None, "budget") and run.seconds >= seconds)
