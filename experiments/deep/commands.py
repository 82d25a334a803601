"""The command line of the study of deep networks: ``python -m experiments deep {run,tune,study,…} --help``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro

RESULTS = Path("results/deep")
MARKS = ("<!-- deep-table -->", "<!-- /deep-table -->")


@dataclasses.dataclass(frozen=True)
class Run:
    """Train one task with one method on CPU time, one thread; the same command again continues a run cut off."""

    task: tyro.conf.Positional[str]
    """curves, mnist-ae, spoken-digits, fashion-conv, char-lstm or char-transformer."""
    method: tyro.conf.Positional[str]
    """ksd, hf, nesterov, adamw, soap, …"""
    seconds: float = 60.0
    """CPU seconds, evaluations not counted."""
    seed: int = 0
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A setting of the method: --set lr=1e-3 --set schedule=linear. Its own unless given, not the tuned ones."""
    marks: tuple[float, ...] = ()
    """Shorter budgets that the run serves too: it has a point at each."""
    trial: bool = False
    """Evaluate four times only."""
    label: str = ""
    """Name of the run; that of the method unless given."""
    data: Path | None = None
    """Directory of the data sets; the environment variable KRYLOV_DESCENT_DATA unless given."""
    samples: int | None = None
    """Only so many training samples."""
    results: Path = Path("runs/deep")
    """Where the run is written, as <task>/<label>-seed<seed>.jsonl. The study's runs are in results/deep."""
    quiet: bool = False
    """No progress bar."""


@dataclasses.dataclass(frozen=True)
class _Runs:
    tasks: tyro.conf.Positional[tuple[str, ...]] = ()
    """All unless given."""
    jobs: int = 2
    """Runs at a time, one thread each."""
    data: Path | None = None
    """Directory of the data sets; the environment variable KRYLOV_DESCENT_DATA unless given."""
    samples: int | None = None
    """Only so many training samples, to try the command out."""


@dataclasses.dataclass(frozen=True)
class Tune(_Runs):
    """Tune each method for each task and budget; the best settings go to experiments/deep/tuned.json."""

    methods: tuple[str, ...] = ()
    """All that have a grid unless given."""
    budgets: tuple[float, ...] = (60.0, 300.0, 1200.0)
    """CPU seconds."""
    results: Path = Path("results/tuning/deep")


@dataclasses.dataclass(frozen=True)
class Study(_Runs):
    """All runs of the study, the first seed of everything first; goes on where it was cut off."""

    methods: tuple[str, ...] = ()
    """All unless given."""
    budgets: tuple[float, ...] = (60.0, 300.0, 1200.0)
    """CPU seconds. A method without a schedule has one run, of the longest."""
    seeds: int = 3
    results: Path = RESULTS


@dataclasses.dataclass(frozen=True)
class Ablate(_Runs):
    """Runs of KSD with one thing changed at a time."""

    labels: tuple[str, ...] = ()
    """All ablations unless given."""
    seconds: float = 300.0
    """CPU seconds."""
    seeds: int = 1
    results: Path = RESULTS


@dataclasses.dataclass(frozen=True)
class Table:
    """Print tables of the runs found; trains nothing."""

    results: Path = RESULTS
    into: Path | None = None
    """Put them into this file instead, between the lines <!-- deep-table --> and <!-- /deep-table -->."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """Draw the training loss over CPU seconds, a panel for each task, as PNG; trains nothing."""

    results: Path = RESULTS
    out: Path = Path("figures")


Command = (
    Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Tune, tyro.conf.subcommand("tune")]
    | Annotated[Study, tyro.conf.subcommand("study")]
    | Annotated[Ablate, tyro.conf.subcommand("ablate")]
    | Annotated[Table, tyro.conf.subcommand("table")]
    | Annotated[Figure, tyro.conf.subcommand("figure")]
)


@dataclasses.dataclass(frozen=True)
class Deep:
    """Deep networks, KSD and tuned rivals at equal CPU time: run, tune, study, ablate, table or figure."""

    command: Annotated[Command, tyro.conf.arg(name="")]


def execute(options: Deep) -> None:
    """Do what the command line says."""
    _COMMANDS[type(options.command)](options.command)


def _run(options: Run) -> None:
    import torch

    from experiments.budget import Budget
    from experiments.deep.study import pace
    from experiments.loop import RunConfig, run
    from experiments.methods import settings_of
    from experiments.problems import load_problem
    from experiments.progress import watching
    from experiments.settings import pair

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    budget = Budget(options.seconds, "seconds")
    config = RunConfig(
        options.method,
        settings_of(options.method, dict(pair(text) for text in options.set)),
        budget,
        options.seed,
        clock="cpu",
        label=options.label,
        pace=pace(options.seconds, options.marks, trial=options.trial),
    )
    problem = load_problem(options.task, options.data, options.samples)
    title = f"{problem.name}, {config.label or config.method}, seed {config.seed}"
    try:
        with watching(title, budget, quiet=options.quiet, tensorboard=None) as watch:
            path = run(problem, config, options.results, watch)
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted; the same command continues from the last checkpoint.") from None
    if not options.quiet:
        sys.stdout.write(f"{path}\n")


def _tune(options: Tune) -> None:
    from experiments.deep.study import tune
    from experiments.study import Where

    where = Where(options.data, options.results, options.jobs, options.samples)
    tune(options.tasks, options.methods, where, budgets=options.budgets)


def _study(options: Study) -> None:
    from experiments.deep.study import study
    from experiments.study import Where

    where = Where(options.data, options.results, options.jobs, options.samples)
    study(options.tasks, options.methods, where, budgets=options.budgets, seeds=options.seeds)


def _ablate(options: Ablate) -> None:
    from experiments.deep.study import ablate
    from experiments.study import Where

    where = Where(options.data, options.results, options.jobs, options.samples)
    ablate(options.tasks, options.labels, where, seconds=options.seconds, seeds=options.seeds)


def _table(options: Table) -> None:
    from experiments.deep.table import table
    from experiments.pages import put

    text = table(options.results)
    if options.into is None:
        sys.stdout.write(text + "\n")
    else:
        put(text, options.into, MARKS)


def _figure(options: Figure) -> None:
    from experiments.deep.figures import figure

    for path in figure(options.results, options.out):
        sys.stdout.write(f"{path}\n")


_COMMANDS: dict[type, Callable[[Any], None]] = {
    Run: _run,
    Tune: _tune,
    Study: _study,
    Ablate: _ablate,
    Table: _table,
    Figure: _figure,
}
