"""The study: which processes to run for tuning and for the final runs, and what tuning chose."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import plan
from experiments.budget import Budget
from experiments.files import finished
from experiments.methods import settings_of
from experiments.problems import PROBLEMS
from experiments.processes import Task, run_all


@dataclasses.dataclass(frozen=True)
class Where:
    """Where the data is and results go, how many runs go at a time, and how many samples they see."""

    data: Path | None
    results: Path
    jobs: int = 2
    samples: int | None = None


def tune(problems: Sequence[str], where: Where, methods: Sequence[str] = ()) -> None:
    """Try every grid point on a short budget, and keep the settings of the lowest training loss.

    Trials whose outcome is recorded are not made again. Those on fewer samples than the plan's are for trying this out:
    they choose nothing.
    """
    tuned = [problem for problem in problems if not plan.ROWS[problem].tuned_as]
    tasks = [
        _trial(problem, method, where, settings)
        for problem in tuned
        for method in plan.MAIN
        for settings in plan.grid(problem, method)
        if (not methods or method in methods) and not _recorded(problem, method, settings, where)
    ]
    failed = run_all([task for task in tasks if task is not None], where.jobs)
    for problem in tuned:
        found = trials(problem, where)
        _write(problem, found, where)
        if where.samples is None:
            _choose(problem, found)
    _end(failed)


def study(problems: Sequence[str], where: Where, methods: Sequence[str] = (), seeds: int | None = None) -> None:
    """The final runs, in the order of the plan; those that are finished are passed over, others continue."""
    tasks = [
        _final(problem, label, seed, where)
        for problem in problems
        for seed in range(min(plan.ROWS[problem].seeds, seeds or plan.ROWS[problem].seeds))
        for label in (*plan.MAIN, *(plan.ROWS[problem].extra if seed == 0 else ()))
        if not methods or label in methods
    ]
    _end(run_all([task for task in tasks if task is not None], where.jobs))


def trials(problem: str, where: Where) -> dict[str, list[dict[str, Any]]]:
    """Grid points of each method that were tried, with the lowest training loss of each; None where it diverged."""
    found: dict[str, list[dict[str, Any]]] = {}
    for method in plan.MAIN:
        for settings in plan.grid(problem, method):
            path = where.results / problem / f"{_label(method, settings)}-seed0.jsonl"
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


def _choose(problem: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write the best settings of each method to the tuned file."""
    tuned = json.loads(plan.TUNED.read_text()) if plan.TUNED.exists() else {}
    for method, tried in found.items():
        known = [trial for trial in tried if trial["loss"] is not None]
        if known:
            best = min(known, key=lambda trial: float(trial["loss"]))
            tuned.setdefault(problem, {})[method] = best["settings"]
    plan.TUNED.write_text(json.dumps(tuned, indent=2, sort_keys=True) + "\n")


def _write(problem: str, found: Mapping[str, Sequence[Mapping[str, Any]]], where: Where) -> None:
    """All trials of a problem, a line each."""
    lines = [
        json.dumps({**_facts(problem, method, where), **trial}) for method, tried in found.items() for trial in tried
    ]
    where.results.mkdir(parents=True, exist_ok=True)
    (where.results / f"tuning-{problem}.jsonl").write_text("\n".join(lines) + "\n")


def _final(problem: str, label: str, seed: int, where: Where) -> Task | None:
    method, settings = plan.run_of(problem, label)
    return _task(problem, method, seed, 60 * plan.ROWS[problem].minutes, where, settings, label)


def _trial(problem: str, method: str, where: Where, settings: Mapping[str, Any]) -> Task | None:
    where = dataclasses.replace(where, samples=where.samples or plan.ROWS[problem].trial_samples)
    return _task(problem, method, 0, plan.trial(problem, method), where, settings, _label(method, settings))


def _label(method: str, settings: Mapping[str, Any]) -> str:
    return "-".join([method, *(f"{key}={value:g}" for key, value in settings.items())])


def _lowest(path: Path, seconds: float) -> float | None:
    """The lowest training loss of a trial; None if it diverged or does not exist.

    A trial may have gone on for longer, and its last step may end a little after the others'.
    """
    if not path.exists():
        return None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "point" and line["seconds"] <= 1.2 * seconds]
    return None if not losses or None in losses else float(min(losses))


def _task(
    problem: str,
    method: str,
    seed: int,
    seconds: float,
    where: Where,
    settings: Mapping[str, Any],
    label: str,
) -> Task | None:
    """The command of a run; None if it is finished, with just these settings."""
    samples = min(where.samples or math.inf, PROBLEMS[problem].samples)
    expected = {
        "settings": dataclasses.asdict(settings_of(method, settings)),
        "samples": samples,
        "clock": "cpu",
        "threads": 1,
    }
    if finished(where.results / problem / f"{label}-seed{seed}.jsonl", Budget(seconds, "seconds"), **expected):
        return None
    command = [sys.executable, "-m", "experiments", "run", problem, "--optimizer", method, "--seed", str(seed)]
    command += ["--budget", str(Budget(seconds, "seconds")), "--threads", "1", "--clock", "cpu", "--quiet"]
    command += ["--results", str(where.results), "--label", label]
    command += ["--data", str(where.data)] if where.data else []
    command += ["--samples", str(where.samples)] if where.samples else []
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return Task(f"{problem} {label} seed {seed}", command)


def _end(failed: Sequence[str]) -> None:
    if failed:
        raise SystemExit("These runs failed:\n" + "\n".join(failed))
