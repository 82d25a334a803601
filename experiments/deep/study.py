"""The processes of the study of deep networks: trials for tuning, final runs and ablations."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.budget import Budget
from experiments.deep import plan
from experiments.files import finished
from experiments.loop import Pace
from experiments.methods import settings_of
from experiments.problems import PROBLEMS
from experiments.processes import Task, run_all
from experiments.records import final, read_run
from experiments.study import Where

ABLATIONS = "ablations"  # folder of results, beside those of the tasks


@dataclasses.dataclass(frozen=True)
class DeepRun:
    """One run: of a task with a method, and how long; ``trial`` is evaluated four times only."""

    task: str
    method: str
    settings: Mapping[str, Any]
    seconds: float
    seed: int
    label: str
    marks: tuple[float, ...] = ()
    trial: bool = False

    def path(self, results: Path) -> Path:
        """Its file."""
        return results / self.task / f"{self.label}-seed{self.seed}.jsonl"


def pace(seconds: float, marks: Sequence[float] = (), *, trial: bool = False) -> Pace:
    """When a run of so many seconds is evaluated: at most 60 times.

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
    runs = [
        DeepRun(task, method, plan.settings(task, method, seconds), seconds, seed, plan.label(method, seconds), marks)
        for seed in range(seeds)
        for task in plan.checked_tasks(tasks)
        for method in plan.checked_methods(methods)
        for seconds, marks in _lengths(method, budgets)
    ]
    _end(_run(runs, where))


def ablate(
    tasks: Sequence[str], labels: Sequence[str], where: Where, *, seconds: float = 300.0, seeds: int = 1
) -> None:
    """The ablations named, or all, in a folder of their own.

    Raises:
        ValueError: there is no such ablation.
        SystemExit: some runs failed; the others were run.
    """
    unknown = [label for label in labels if label not in plan.ABLATIONS]
    if unknown:
        raise ValueError(f"There is no ablation {unknown[0]!r}; there are {', '.join(plan.ABLATIONS)}.")
    runs = [
        DeepRun(task, method, changes, seconds, seed, label)
        for seed in range(seeds)
        for task in plan.checked_tasks(tasks)
        for label, (method, changes) in plan.ABLATIONS.items()
        if not labels or label in labels
    ]
    _end(_run(runs, dataclasses.replace(where, results=where.results / ABLATIONS)))


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
    for task in plan.checked_tasks(tasks):
        for method in plan.checked_methods(methods):
            lengths = [seconds for seconds, _ in _lengths(method, budgets)]
            for seconds in lengths if plan.grid(task, method) else ():
                failed += _halve(task, method, seconds, where)
    _end(failed)


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
        failed += _run(runs, where)
        losses = [(_loss(run, where), dict(run.settings)) for run in runs]
        tried += [{"settings": chosen, "seconds": length, "loss": loss} for loss, chosen in losses]
        known = [(loss, chosen) for loss, chosen in losses if loss is not None]
        left = [chosen for _, chosen in sorted(known, key=lambda pair: pair[0])]
    if left and where.samples is None:  # trials on fewer samples are for trying this out: they choose nothing
        _choose(task, method, seconds, left[0], tried)
    return failed


def _choose(task: str, method: str, seconds: float, best: dict[str, Any], tried: list[dict[str, Any]]) -> None:
    key = f"{seconds:g}" if plan.scheduled(method) else "any"
    tuned = json.loads(plan.TUNED.read_text()) if plan.TUNED.exists() else {}
    tuned.setdefault(task, {}).setdefault(method, {})[key] = {"settings": best, "trials": tried}
    plan.TUNED.write_text(json.dumps(tuned, indent=1, sort_keys=True) + "\n")


def _trial(task: str, method: str, chosen: Mapping[str, Any], seconds: float) -> DeepRun:
    label = "-".join([method, *(f"{key}={value}" for key, value in chosen.items()), f"{seconds:g}s"])
    return DeepRun(task, method, chosen, seconds, plan.TUNING_SEED, label, trial=True)


def _loss(run: DeepRun, where: Where) -> float | None:
    """Training loss at the end of a trial; None if it is not finite, or the trial failed."""
    path = run.path(where.results)
    point = final(read_run(path)) if path.exists() else None
    return point.loss if point is not None and math.isfinite(point.loss) else None


def _run(runs: Iterable[DeepRun], where: Where) -> list[str]:
    if where.jobs < 1:
        raise ValueError(f"--jobs {where.jobs}: must be at least 1.")
    return run_all([_task(run, where) for run in runs if not _finished(run, where)], where.jobs)


def _finished(run: DeepRun, where: Where) -> bool:
    """Whether the file is there, of just these settings; if of others, the run itself says so."""
    samples = min(where.samples or math.inf, PROBLEMS[run.task].samples)
    expected = {"settings": dataclasses.asdict(settings_of(run.method, run.settings)), "samples": samples}
    return finished(run.path(where.results), Budget(run.seconds, "seconds"), **expected)


def _task(run: DeepRun, where: Where) -> Task:
    command = [sys.executable, "-m", "experiments", "deep", "run", run.task, run.method, "--quiet"]
    command += ["--seconds", f"{run.seconds:g}", "--seed", str(run.seed), "--label", run.label]
    command += ["--results", str(where.results)]
    command += ["--data", str(where.data)] if where.data else []
    command += ["--samples", str(where.samples)] if where.samples else []
    command += ["--marks", *(f"{mark:g}" for mark in run.marks)] if run.marks else []
    command += ["--trial"] if run.trial else []
    for key, value in run.settings.items():
        command += ["--set", f"{key}={value}"]
    return Task(f"{run.task} {run.label} seed {run.seed}", command)


def _end(failed: Sequence[str]) -> None:
    if failed:
        raise SystemExit("These runs failed:\n" + "\n".join(failed))
