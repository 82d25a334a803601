"""The PINN study: which processes to run for tuning and for the final runs, and what tuning chose.

Settings of a method are the same for all problems. They are tried with a seed that the study does not use.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.records import read_run
from experiments.common.study import Planned, end, named, options, product, read_tuned, run_missing, write_tuned
from experiments.pinn.ablations import CHANGES
from experiments.pinn.problems import CHOOSING, SHOWN
from experiments.pinn.records import FOLDER, geometric_mean
from experiments.pinn.rivals import GRIDS, METHODS
from experiments.pinn.run import RunConfig, checked
from experiments.pinn.style import BASE

#: What tuning chose, network → method → settings and trials; ``tune`` writes it, ``run`` and ``study`` read it.
TUNED = Path(__file__).with_name("tuned.json")
TUNING_SEED = 100
TUNING_PROBLEMS = ("poisson2d", "convection30", "burgers")

#: The network whose settings serve others that were not tuned.
_USUAL = "3x32"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What of the study is to be run, unless named: all methods, and the equations of the study or of ablations."""

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
        for problem in plan.problems or SHOWN
        for method in plan.methods or METHODS
    ]
    end(_run(configs, results, jobs))


def ablate(plan: Plan, changes: Sequence[str], results: Path, jobs: int) -> None:
    """The Gauss–Newton flow with each of these changes, or with each of all.

    Raises:
        ValueError: there is no such change.
        SystemExit: some runs failed; the others were run.
    """
    configs = [
        dataclasses.replace(
            RunConfig(problem, BASE, {}, plan.seconds, seed, network, label=f"{change}-{plan.seconds:g}s"),
            **CHANGES[change],
        )
        for seed in range(plan.seeds)
        for network in plan.networks
        for problem in plan.problems or CHOOSING
        for change in named("change", changes, CHANGES)
    ]
    end(_run(configs, results, jobs))


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
    known = read_tuned(TUNED)
    tuned = [method for method in methods or METHODS if GRIDS.get(method)]
    done = {method: known.get(network, {}).get(method, {}).get("trials", []) for method in tuned}
    trials = {
        method: [[_trial(problem, method, tried, seconds, network) for problem in problems] for tried in grid(method)]
        for method in tuned
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
    write_tuned(TUNED, known)
    end(failed)


def settings(method: str, network: str) -> dict[str, Any]:
    """What tuning chose for a method; for a network that was not tuned, that for the usual one."""
    known = read_tuned(TUNED)
    chosen = known.get(network, known.get(_USUAL, {}))
    return dict(chosen.get(method, {}).get("settings", {}))


def grid(method: str) -> list[dict[str, Any]]:
    """The settings that a method is tried with."""
    return [chosen for values in GRIDS[method] for chosen in product(**values)]


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
    paths = {config.problem: config.path(results) for config in tried}
    errors = {name: read_run(path).final.error if path.exists() else None for name, path in paths.items()}
    mean = geometric_mean(math.nan if error is None else error for error in errors.values())
    return {
        "settings": dict(tried[0].settings),
        "error": mean if math.isfinite(mean) else None,
        "errors": errors,
        "seconds": tried[0].seconds,
    }


def _run(configs: Sequence[RunConfig], results: Path, jobs: int) -> list[str]:
    configs = [checked(config) for config in configs]  # all mistakes are found before anything runs
    return run_missing([_planned(config, results) for config in configs], jobs)


def _planned(config: RunConfig, results: Path) -> Planned:
    arguments = ["pinn", "run", config.problem, config.method, "--no-tuned", "--seconds", f"{config.seconds:g}"]
    arguments += ["--seed", str(config.seed), "--network", config.network, "--dtype", config.dtype]
    arguments += ["--label", config.name, "--results", str(results), "--quiet"]
    for name in ("resample", "points"):
        if value := getattr(config, name):
            arguments += [f"--{name}", str(value)]
    return Planned(
        f"{config.problem} {config.network} {config.name} seed {config.seed}",
        results / FOLDER,
        config.path(results),
        config.seconds,
        {"settings": dict(config.settings)},
        [*arguments, *options(config.settings)],
    )
