"""The paper's study: which processes to run for tuning and for the final runs, and what tuning chose."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.budget import Budget
from experiments.common.records import read_run
from experiments.common.study import Planned, end, read_tuned, run_missing, write_tuned
from experiments.paper import plan
from experiments.supervised.problems import PROBLEMS
from experiments.supervised.study import Training, Where

_Trials = Mapping[str, Sequence[Mapping[str, Any]]]  # by method


def tune(problems: Sequence[str], where: Where, methods: Sequence[str] = ()) -> None:
    """Try every grid point on a short budget, and keep the settings of the lowest training loss.

    Trials whose outcome is recorded are not made again. Those on fewer samples than the plan's are for trying this out:
    they choose nothing.
    """
    tuned = [problem for problem in problems if not plan.ROWS[problem].tuned_as]
    wanted = [
        _trial(problem, method, where, settings)
        for problem in tuned
        for method in plan.MAIN
        for settings in plan.grid(problem, method)
        if (not methods or method in methods) and not _recorded(problem, method, settings, where)
    ]
    failed = run_missing(wanted, where.jobs)
    for problem in tuned:
        found = trials(problem, where)
        _write(problem, found, where)
        if where.samples is None:
            _choose(problem, found)
    end(failed)


def study(problems: Sequence[str], where: Where, methods: Sequence[str] = (), seeds: int | None = None) -> None:
    """The final runs, in the order of the plan; those that are finished are passed over, others continue."""
    wanted = [
        _planned(Training(problem, *plan.run_of(problem, label), 60 * plan.ROWS[problem].minutes, seed, label), where)
        for problem in problems
        for seed in range(min(plan.ROWS[problem].seeds, seeds or plan.ROWS[problem].seeds))
        for label in (*plan.MAIN, *(plan.ROWS[problem].extra if seed == 0 else ()))
        if not methods or label in methods
    ]
    end(run_missing(wanted, where.jobs))


def long(problems: Sequence[str], where: Where, methods: Sequence[str] = ()) -> None:
    """The long runs, towards the paper's errors; those that are finished are passed over, others continue."""
    wanted = [
        _planned(Training(problem, *plan.run_of(problem, label), 60 * minutes, 0, label), where)
        for problem, minutes in plan.LONG.items()
        for label, (method, _) in plan.LONG_RUNS.items()
        if problem in problems and (not methods or method in methods)
    ]
    end(run_missing(wanted, where.jobs))


def trials(problem: str, where: Where) -> dict[str, list[dict[str, Any]]]:
    """Grid points of each method that were tried, with the lowest training loss of each; None where it diverged."""
    found: dict[str, list[dict[str, Any]]] = {}
    for method in plan.MAIN:
        for settings in plan.grid(problem, method):
            path = _training(problem, method, settings).path(where.results)
            if path.exists():
                outcome = {"settings": settings, "loss": _lowest(path, plan.trial(problem, method))}
            elif known := _recorded(problem, method, settings, where):
                outcome = {"settings": settings, "loss": known["loss"]}
            else:
                continue
            found.setdefault(method, []).append(outcome)
    return found


def _recorded(problem: str, method: str, settings: Mapping[str, Any], where: Where) -> Mapping[str, Any] | None:
    """The line of a trial like this one, whose own files may be gone."""
    path = where.results / f"tuning-{problem}.jsonl"
    wanted = {**_facts(problem, method, where), "settings": settings}
    lines = (json.loads(line) for line in path.read_text().splitlines()) if path.exists() else ()
    return next((line for line in lines if {key: line[key] for key in wanted} == wanted), None)


def _facts(problem: str, method: str, where: Where) -> dict[str, Any]:
    """Of a trial, beside its settings and its outcome."""
    samples = where.samples or plan.ROWS[problem].trial_samples or PROBLEMS[problem].samples
    return {"problem": problem, "method": method, "seconds": plan.trial(problem, method), "samples": samples}


def _choose(problem: str, found: _Trials) -> None:
    """Write the best settings of each method to the tuned file."""
    tuned = read_tuned(plan.TUNED)
    for method, tried in found.items():
        known = [trial for trial in tried if trial["loss"] is not None]
        if known:
            best = min(known, key=lambda trial: float(trial["loss"]))
            tuned.setdefault(problem, {})[method] = best["settings"]
    write_tuned(plan.TUNED, tuned)


def _write(problem: str, found: _Trials, where: Where) -> None:
    """All trials of a problem, a line each."""
    lines = [
        json.dumps({**_facts(problem, method, where), **trial}) for method, tried in found.items() for trial in tried
    ]
    where.results.mkdir(parents=True, exist_ok=True)
    (where.results / f"tuning-{problem}.jsonl").write_text("\n".join(lines) + "\n")


def _trial(problem: str, method: str, where: Where, settings: Mapping[str, Any]) -> Planned:
    where = dataclasses.replace(where, samples=where.samples or plan.ROWS[problem].trial_samples)
    return _planned(_training(problem, method, settings), where)


def _training(problem: str, method: str, settings: Mapping[str, Any]) -> Training:
    """Of a trial."""
    label = "-".join([method, *(f"{key}={value:g}" for key, value in settings.items())])
    return Training(problem, method, settings, plan.trial(problem, method), 0, label)


def _planned(run: Training, where: Where) -> Planned:
    budget = str(Budget(run.seconds, "seconds"))
    command = ["run", run.problem, "--optimizer", run.method, "--budget", budget, "--threads", "1", "--clock", "cpu"]
    return run.planned(where, command)


def _lowest(path: Path, seconds: float) -> float | None:
    """The lowest training loss of a trial; None if it diverged.

    A trial may have gone on for longer, and its last step may end a little after the others'.
    """
    losses = [point.loss for point in read_run(path).cut(1.2 * seconds).points]
    return min(losses) if losses and all(map(math.isfinite, losses)) else None
