"""The processes of the study of deep networks: trials for tuning, final runs and ablations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.common.loop import Pace
from experiments.common.records import read_run
from experiments.common.study import Planned, end, named, read_tuned, run_missing, write_tuned
from experiments.deep import plan
from experiments.supervised.study import Training, Where

ABLATIONS = "ablations"  # folder of results, beside those of the tasks


def pace(seconds: float, marks: Sequence[float] = (), *, trial: bool = False) -> Pace:
    """When a run of so many seconds is evaluated: at most 60 times, of a trial four times.

    A long run that serves shorter budgets too has points from the beginning of the shortest on.
    """
    if trial:
        return Pace(least=0.25, most=0.25)
    if not marks:
        return Pace()
    return Pace(growth=0.15, least=0.02 * min(marks) / seconds, marks=tuple(marks))


def study(
    tasks: Sequence[str],
    methods: Sequence[str],
    where: Where,
    *,
    budgets: Sequence[float] = plan.BUDGETS,
    seeds: int = 3,
) -> None:
    """The runs that are not finished, the first seed of everything before the next; those cut off continue.

    Raises:
        SystemExit: some failed; the others were run.
    """
    wanted = [
        _planned(
            Training(task, method, plan.settings(task, method, seconds), seconds, seed, plan.label(method, seconds)),
            where,
            marks,
        )
        for seed in range(seeds)
        for task in named("task", tasks, plan.TASKS)
        for method in named("method", methods, plan.METHODS)
        for seconds, marks in _lengths(method, budgets)
    ]
    end(run_missing(wanted, where.jobs))


def ablate(
    tasks: Sequence[str], labels: Sequence[str], where: Where, *, seconds: float = 300.0, seeds: int = 1
) -> None:
    """The ablations named, or all, in a folder of their own.

    Raises:
        ValueError: there is no such ablation.
        SystemExit: some runs failed; the others were run.
    """
    where = dataclasses.replace(where, results=where.results / ABLATIONS)
    wanted = [
        _planned(Training(task, *plan.ABLATIONS[label], seconds, seed, label), where)
        for seed in range(seeds)
        for task in named("task", tasks, plan.TASKS)
        for label in named("ablation", labels, plan.ABLATIONS)
    ]
    end(run_missing(wanted, where.jobs))


def tune(
    tasks: Sequence[str], methods: Sequence[str], where: Where, *, budgets: Sequence[float] = plan.BUDGETS
) -> None:
    """Successive halving for every task, method and budget; what is best goes to the tuned file, with all trials.

    Raises:
        ValueError: there are no rungs for a budget, or a method has no grid.
        SystemExit: some trials failed; settings are chosen among the others.
    """
    for seconds in budgets:
        if seconds not in plan.RUNGS:
            known = ", ".join(f"{b:g}" for b in plan.RUNGS)
            raise ValueError(f"There are no trials for a budget of {seconds:g} s: there are for {known}.")
    for method in methods:
        if not plan.grid(plan.TASKS[0], method):
            raise ValueError(f"{method} has nothing to tune.")
    failed: list[str] = []
    for task in named("task", tasks, plan.TASKS):
        for method in named("method", methods, plan.METHODS):
            for seconds, _ in _lengths(method, budgets) if plan.grid(task, method) else ():
                failed += _halve(task, method, seconds, where)
    end(failed)


def _lengths(method: str, budgets: Sequence[float]) -> list[tuple[float, tuple[float, ...]]]:
    """Seconds and marks of the runs that a method needs: one for each budget, or the longest with all as marks."""
    if plan.scheduled(method):
        return [(seconds, ()) for seconds in budgets]
    return [(max(budgets), tuple(sorted(budgets)))]


def _halve(task: str, method: str, seconds: float, where: Where) -> list[str]:
    """Rung by rung; returns a line for each trial that failed."""
    left = plan.grid(task, method)
    tried: list[dict[str, Any]] = []
    failed: list[str] = []
    for length, count in plan.RUNGS[seconds]:
        runs = [_trial(task, method, chosen, length) for chosen in left[:count]]
        failed += run_missing([_planned(run, where, trial=True) for run in runs], where.jobs)
        losses = [(_loss(run, where), dict(run.settings)) for run in runs]
        tried += [{"settings": chosen, "seconds": length, "loss": loss} for loss, chosen in losses]
        known = [(loss, chosen) for loss, chosen in losses if loss is not None]
        left = [chosen for _, chosen in sorted(known, key=lambda pair: pair[0])]
    if left and where.samples is None:  # trials on fewer samples are for trying this out: they choose nothing
        _choose(task, method, seconds, left[0], tried)
    return failed


def _choose(task: str, method: str, seconds: float, best: dict[str, Any], tried: list[dict[str, Any]]) -> None:
    key = f"{seconds:g}" if plan.scheduled(method) else "any"
    tuned = read_tuned(plan.TUNED)
    tuned.setdefault(task, {}).setdefault(method, {})[key] = {"settings": best, "trials": tried}
    write_tuned(plan.TUNED, tuned)


def _trial(task: str, method: str, chosen: Mapping[str, Any], seconds: float) -> Training:
    label = "-".join([method, *(f"{key}={value}" for key, value in chosen.items()), f"{seconds:g}s"])
    return Training(task, method, chosen, seconds, plan.TUNING_SEED, label)


def _loss(run: Training, where: Where) -> float | None:
    """Training loss at the end of a trial; None if it is not finite, or the trial failed."""
    path = run.path(where.results)
    points = read_run(path).points if path.exists() else ()
    return points[-1].loss if points and math.isfinite(points[-1].loss) else None


def _planned(run: Training, where: Where, marks: Sequence[float] = (), *, trial: bool = False) -> Planned:
    command = ["deep", "run", run.problem, run.method, "--seconds", f"{run.seconds:g}"]
    command += ["--marks", *(f"{mark:g}" for mark in marks)] if marks else []
    return run.planned(where, [*command, *(["--trial"] if trial else [])])
