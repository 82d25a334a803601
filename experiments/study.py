"""The study: every run of the plan as a process of its own, one thread each, as many at a time as there are cores."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments import plan
from experiments.budget import Budget
from experiments.files import finished

#: glibc keeps what it has instead of returning large blocks to the system at every pass: the page faults cost every
#: method about a fifth on the larger layers (docs/performance.md).
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(8 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}


def trials(problem: str, results: Path, methods: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Grid points of each method, with the lowest training loss that each reached; infinite where it failed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for method in methods:
        for settings in plan.grid(problem, method):
            path = results / problem / f"{_label(method, settings)}-seed0.jsonl"
            lowest = _lowest(path, plan.trial(problem, method))
            found.setdefault(method, []).append({"settings": settings, "loss": lowest})
    return found


@dataclasses.dataclass(frozen=True)
class Where:
    """Where the data is and results go, how many runs go at a time, and how many samples they see."""

    data: Path | None
    results: Path
    jobs: int = 2
    samples: int | None = None


def tune(problems: Sequence[str], where: Where, methods: Sequence[str] = ()) -> None:
    """Try every grid point on a short budget, and keep the settings of the lowest training loss."""
    tasks = [
        _trial(problem, method, where, settings)
        for problem in problems
        for method in plan.MAIN
        for settings in plan.grid(problem, method)
        if not plan.ROWS[problem].tuned_as and (not methods or method in methods)
    ]
    _run_all(tasks, where.jobs)
    for problem in problems:
        if not plan.ROWS[problem].tuned_as:
            choose(problem, where.results)


def choose(problem: str, results: Path) -> None:
    """Write the best settings of each method to the tuned file, and all trials to one small file of lines."""
    found = trials(problem, results, plan.MAIN)
    tuned = json.loads(plan.TUNED.read_text()) if plan.TUNED.exists() else {}
    for method, tried in found.items():
        best = min(tried, key=lambda trial: trial["loss"])
        if math.isfinite(best["loss"]):
            tuned.setdefault(problem, {})[method] = best["settings"]
    plan.TUNED.write_text(json.dumps(tuned, indent=2, sort_keys=True) + "\n")
    lines = [
        json.dumps(
            {
                "problem": problem,
                "method": method,
                "budget": f"{plan.trial(problem, method):g}s",
                "samples": plan.ROWS[problem].trial_samples,
                "settings": trial["settings"],
                "loss": trial["loss"] if math.isfinite(trial["loss"]) else None,
            }
        )
        for method, tried in found.items()
        for trial in tried
    ]
    (results / f"tuning-{problem}.jsonl").write_text("\n".join(lines) + "\n")


def study(problems: Sequence[str], where: Where, methods: Sequence[str] = (), seeds: int | None = None) -> None:
    """The final runs, in the order of the plan; those that are finished are passed over, others continue."""
    tasks = [
        _task(problem, method, seed, f"{60 * plan.ROWS[problem].minutes:g}s", where, None)
        for problem in problems
        for seed in range(min(plan.ROWS[problem].seeds, seeds or plan.ROWS[problem].seeds))
        for method in (*plan.MAIN, *(plan.ROWS[problem].extra if seed == 0 else ()))
        if not methods or method in methods
    ]
    _run_all(tasks, where.jobs)


def _trial(problem: str, method: str, where: Where, settings: Mapping[str, Any]) -> Task | None:
    row = plan.ROWS[problem]
    where = dataclasses.replace(where, samples=where.samples or row.trial_samples)
    return _task(problem, method, 0, f"{plan.trial(problem, method):g}s", where, settings)


def _label(method: str, settings: Mapping[str, Any]) -> str:
    return "-".join([method, *(f"{key}={value:g}" for key, value in settings.items())])


def _lowest(path: Path, seconds: float) -> float:
    """The lowest training loss of a trial; infinite if it diverged or does not exist.

    A trial may have gone on for longer, and its last step may end a little after the others'.
    """
    if not path.exists():
        return math.inf
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "point" and line["seconds"] <= 1.2 * seconds]
    return math.inf if not losses or None in losses else float(min(losses))


Task = tuple[str, list[str]]


def _task(
    problem: str,
    method: str,
    seed: int,
    budget: str,
    where: Where,
    settings: Mapping[str, Any] | None,
) -> Task | None:
    label = method if settings is None else _label(method, settings)
    if finished(where.results / problem / f"{label}-seed{seed}.jsonl", Budget.parse(budget)):
        return None
    command = [sys.executable, "-m", "experiments", "run", problem, "--optimizer", method, "--seed", str(seed)]
    command += ["--budget", budget, "--threads", "1", "--clock", "cpu", "--results", str(where.results), "--quiet"]
    command += ["--label", label] + (["--data", str(where.data)] if where.data else [])
    command += ["--samples", str(where.samples)] if where.samples else []
    if settings:
        command += ["--set", *(f"{key}={value}" for key, value in settings.items())]
    return f"{problem} {label} seed {seed}", command


def _run_all(tasks: Sequence[Task | None], jobs: int) -> None:
    """As many at a time as asked for; one that fails is named, and does not stop the others."""
    waiting = [task for task in tasks if task is not None]
    failed: list[str] = []
    running: list[tuple[str, subprocess.Popen[str]]] = []
    with tqdm(total=len(waiting), desc="runs", unit="run") as bar:
        for name, command in _as_room_allows(waiting, running, jobs, failed, bar):
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**_ALLOCATOR, **os.environ})
            running.append((name, process))
            bar.set_postfix_str(", ".join(name for name, _ in running))
    if failed:
        raise SystemExit("These runs failed:\n" + "\n".join(failed))


def _as_room_allows(
    waiting: Sequence[Task],
    running: list[tuple[str, subprocess.Popen[str]]],
    jobs: int,
    failed: list[str],
    bar: Any,
) -> Iterator[Task]:
    for task in [*waiting, None]:
        while len(running) >= jobs or (task is None and running):
            time.sleep(0.2)
            for entry in list(running):
                name, process = entry
                if process.poll() is None:
                    continue
                running.remove(entry)
                bar.update()
                errors = process.communicate()[1]
                if process.returncode:
                    failed.append(
                        f"{name}: {errors.strip().splitlines()[-1] if errors.strip() else process.returncode}"
                    )
        if task is not None:
            yield task
