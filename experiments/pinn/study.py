"""The PINN study: which processes to run for tuning and for the final runs, and what tuning chose.

Settings of a method are the same for all problems. They are tried with a seed that the study does not use.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.pinn.ablations import CHANGES
from experiments.pinn.loop import RunConfig, checked
from experiments.pinn.problems import PROBLEMS
from experiments.pinn.records import geometric_mean, path_of, read_run, read_runs
from experiments.pinn.rivals import GRIDS, METHODS
from experiments.pinn.style import BASE
from experiments.processes import Task, run_all

#: What tuning chose, network → method → settings and trials; ``tune`` writes it, ``run`` and ``study`` read it.
TUNED = Path(__file__).with_name("tuned.json")
TUNING_SEED = 100
TUNING_PROBLEMS = ("poisson2d", "convection30", "burgers")

#: The network whose settings serve others that were not tuned.
_USUAL = "3x32"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What of the study is to be run: all equations and methods unless named; fits only if named."""

    problems: Sequence[str] = ()
    methods: Sequence[str] = ()
    seeds: int = 3
    seconds: float = 60.0
    networks: Sequence[str] = (_USUAL,)


def study(plan: Plan, results: Path, jobs: int) -> None:
    """The runs that are not finished, the first seed of everything before the next.

    Raises:
        SystemExit: some failed; the others were run.
    """
    configs = [
        RunConfig(problem, method, settings(method, network), plan.seconds, seed, network)
        for seed in range(plan.seeds)
        for network in plan.networks
        for problem in plan.problems or PROBLEMS
        for method in plan.methods or METHODS
    ]
    _end(_run(configs, results, jobs))


def ablate(plan: Plan, changes: Sequence[str], results: Path, jobs: int) -> None:
    """The rational basis with each of these changes, or with each of all.

    Raises:
        ValueError: there is no such change.
        SystemExit: some runs failed; the others were run.
    """
    unknown = [change for change in changes if change not in CHANGES]
    if unknown:
        raise ValueError(f"There is no change {unknown[0]!r}; there are {', '.join(CHANGES)}.")
    configs = [
        RunConfig(
            problem,
            BASE,
            seconds=plan.seconds,
            seed=seed,
            network=network,
            label=f"{change}-{plan.seconds:g}s",
            **CHANGES[change],
        )
        for seed in range(plan.seeds)
        for network in plan.networks
        for problem in plan.problems or PROBLEMS
        for change in changes or CHANGES
    ]
    _end(_run(configs, results, jobs))


def tune(
    methods: Sequence[str],
    results: Path,
    jobs: int,
    *,
    problems: Sequence[str] = TUNING_PROBLEMS,
    seconds: float = 30.0,
    network: str = _USUAL,
) -> None:
    """Try the grids of every method, and keep the settings of the lowest geometric mean of errors over the problems.

    Trials that the tuned file has are not made again; those of other grids or budgets stay in it, and choose nothing.

    Raises:
        SystemExit: some trials failed; settings are chosen among the others.
    """
    missing = [method for method in methods if not GRIDS.get(method)]
    if missing:
        raise ValueError(f"{missing[0]} has nothing to tune; {', '.join(m for m in GRIDS if GRIDS[m])} have.")
    tuned = {method: list(grid(method)) for method in methods or METHODS if GRIDS.get(method)}
    known = json.loads(TUNED.read_text()) if TUNED.exists() else {}
    done = {method: known.get(network, {}).get(method, {}).get("trials", []) for method in tuned}
    trials = {
        method: [[_trial(problem, method, tried, seconds, network) for problem in problems] for tried in several]
        for method, several in tuned.items()
    }
    # The first settings of all methods before the next ones: a tuning that is cut off has tried something of each.
    rounds = itertools.zip_longest(*trials.values(), fillvalue=[])
    wanted = [tried for several in rounds for tried in several if tried and not _known(tried, done[tried[0].method])]
    failed = _run([config for tried in wanted for config in tried], results, jobs)
    for method, several in trials.items():
        outcome = [_known(tried, done[method]) or _outcome(tried, results) for tried in several]
        best = min(outcome, key=lambda trial: math.inf if trial["error"] is None else float(trial["error"]))
        if best["error"] is not None:
            made = [(trial["settings"], trial["seconds"]) for trial in outcome]
            before = [trial for trial in done[method] if (trial["settings"], trial["seconds"]) not in made]
            known.setdefault(network, {})[method] = {"settings": best["settings"], "trials": [*outcome, *before]}
    TUNED.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    _end(failed)


def settings(method: str, network: str) -> dict[str, Any]:
    """What tuning chose for a method; for a network that was not tuned, that for the usual one."""
    known = json.loads(TUNED.read_text()) if TUNED.exists() else {}
    chosen = known.get(network, known.get(_USUAL, {}))
    return dict(chosen.get(method, {}).get("settings", {}))


def grid(method: str) -> Iterator[dict[str, Any]]:
    """The settings that a method is tried with."""
    for values in GRIDS[method]:
        for chosen in itertools.product(*values.values()):
            yield dict(zip(values, chosen, strict=True))


def _trial(problem: str, method: str, tried: Mapping[str, Any], seconds: float, network: str) -> RunConfig:
    label = "-".join([method, *(f"{key}={value}" for key, value in tried.items()), f"{seconds:g}s"])
    return RunConfig(problem, method, tried, seconds, TUNING_SEED, network, label=label)


def _known(tried: Sequence[RunConfig], done: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What came of just these trials, if that was written down."""
    first, problems = tried[0], {config.problem for config in tried}
    settings = dict(first.settings)
    for trial in done:
        if trial["settings"] == settings and trial["seconds"] == first.seconds and set(trial["errors"]) == problems:
            return None if None in trial["errors"].values() else trial
    return None


def _outcome(tried: Sequence[RunConfig], results: Path) -> dict[str, Any]:
    """Settings, errors by problem and their geometric mean; None where a trial failed."""
    paths = {config.problem: _path(config, results) for config in tried}
    errors = {name: read_run(path).final.error if path.exists() else None for name, path in paths.items()}
    mean = geometric_mean(math.nan if error is None else error for error in errors.values())
    return {
        "settings": dict(tried[0].settings),
        "error": mean if math.isfinite(mean) else None,
        "errors": errors,
        "seconds": tried[0].seconds,
    }


def _run(configs: Sequence[RunConfig], results: Path, jobs: int) -> list[str]:
    if jobs < 1:
        raise ValueError(f"--jobs {jobs}: must be at least 1.")
    configs = [checked(config) for config in configs]  # all mistakes are found before anything runs
    # What is recorded with just these settings is not run again.
    done = {run.path: run.settings for run in read_runs(results)}
    wanted = [config for config in configs if done.get(_path(config, results)) != _read_back(config.settings)]
    return run_all([_task(config, results) for config in wanted], jobs)


def _read_back(settings: Mapping[str, Any]) -> Any:
    """Settings as a file has them."""
    return json.loads(json.dumps(settings))


def _path(config: RunConfig, results: Path) -> Path:
    return path_of(results, config.problem, config.network, config.name, config.seed)


def _task(config: RunConfig, results: Path) -> Task:
    command = [sys.executable, "-m", "experiments", "pinn", "run", config.problem, config.method, "--no-tuned"]
    command += ["--seconds", f"{config.seconds:g}", "--seed", str(config.seed), "--network", config.network]
    command += ["--label", config.name, "--results", str(results), "--quiet"]
    command += ["--dtype", config.dtype]
    for name in ("resample", "points"):
        if value := getattr(config, name):
            command += [f"--{name}", str(value)]
    for key, value in config.settings.items():
        command += ["--set", f"{key}={value}"]
    return Task(f"{config.problem} {config.network} {config.name} seed {config.seed}", command)


def _end(failed: Sequence[str]) -> None:
    if failed:
        raise SystemExit("These runs failed:\n" + "\n".join(failed))
