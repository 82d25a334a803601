"""The command line of the PINN study: ``python -m experiments pinn {run,study,ablate,tune,table,figure} --help``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

RESULTS = Path("results")
MARKS = ("<!-- pinn-table -->", "<!-- /pinn-table -->")


@dataclasses.dataclass(frozen=True)
class Run:
    """Solve one problem with one method; a run that is finished is not repeated."""

    problem: tyro.conf.Positional[str]
    """An equation, poisson2d, poisson5d, burgers, convection30, …, or a fit, image64, regression, deeponet, …"""
    method: tyro.conf.Positional[str]
    """ksd-rational, lm, ssbroyden, …"""
    seconds: float = 60.0
    """CPU seconds, evaluations not counted."""
    seed: int = 0
    network: str = "3x32"
    """Hidden layers and their width."""
    dtype: Literal["float64", "float32"] = "float64"
    resample: int | None = None
    """Draw new collocation points after every so many steps; a fit has no others."""
    points: int | None = None
    """Collocation points inside the domain, or samples of a fit; as many as usual unless given."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A setting of the method in place of the tuned one: --set rows=400."""
    tuned: bool = True
    """Use the settings that tuning chose, if it did."""
    label: str = ""
    """Name of the run; method and budget unless given."""
    results: Path = Path("runs")
    """Where the run is written, as pinn/<problem>/<network>/<label>-seed<seed>.jsonl. The study's runs are in
    results."""
    quiet: bool = False
    """No progress bar."""


@dataclasses.dataclass(frozen=True)
class Study:
    """All runs of the study, the first seed of everything first; goes on where it was cut off."""

    problems: tyro.conf.Positional[tuple[str, ...]] = ()
    """The nine equations unless given; others and fits are run when named: fisher, image64, deeponet, …"""
    methods: tuple[str, ...] = ()
    """All unless given."""
    seeds: int = 3
    seconds: float = 60.0
    """CPU seconds of a run."""
    networks: tuple[str, ...] = ("3x32",)
    jobs: int = 2
    """Runs at a time, one thread each."""
    results: Path = RESULTS


@dataclasses.dataclass(frozen=True)
class Ablate:
    """Runs of the rational basis that lacks a part, or is changed in one thing; `pinn table` compares them."""

    problems: tyro.conf.Positional[tuple[str, ...]] = ()
    """All equations unless given."""
    changes: tuple[str, ...] = ()
    """without-bend, without-gathering, …, rows-100, …; each of all in turn unless given."""
    seeds: int = 1
    seconds: float = 60.0
    """CPU seconds of a run."""
    networks: tuple[str, ...] = ("3x32",)
    jobs: int = 2
    """Runs at a time, one thread each."""
    results: Path = RESULTS


@dataclasses.dataclass(frozen=True)
class Tune:
    """Try each method's grid on short budgets, and write the best settings to experiments/pinn/tuned.json."""

    methods: tyro.conf.Positional[tuple[str, ...]] = ()
    """All that have a grid unless given."""
    problems: tuple[str, ...] = ("poisson2d", "convection30", "burgers")
    """The settings with the lowest geometric mean of errors over these are taken, for all problems."""
    seconds: float = 30.0
    """CPU seconds of a trial."""
    network: str = "3x32"
    jobs: int = 2
    """Runs at a time, one thread each."""
    results: Path = RESULTS / "tuning"


@dataclasses.dataclass(frozen=True)
class Table:
    """Print tables of the runs found; trains nothing."""

    methods: tuple[str, ...] = ()
    """Only these columns, methods or labels without their budget; all methods unless given."""
    results: Path = RESULTS
    into: Path | None = None
    """Put them into this file instead, between the lines <!-- pinn-table --> and <!-- /pinn-table -->."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """Draw the runs found, as PNG; trains nothing."""

    methods: tuple[str, ...] = ()
    """Only these, methods or labels without their budget; all methods unless given."""
    results: Path = RESULTS
    out: Path = Path("figures")


Command = (
    Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Study, tyro.conf.subcommand("study")]
    | Annotated[Ablate, tyro.conf.subcommand("ablate")]
    | Annotated[Tune, tyro.conf.subcommand("tune")]
    | Annotated[Table, tyro.conf.subcommand("table")]
    | Annotated[Figure, tyro.conf.subcommand("figure")]
)


@dataclasses.dataclass(frozen=True)
class Pinn:
    """Optimizers on physics-informed networks at equal CPU time: run, study, ablate, tune, table or figure."""

    command: Annotated[Command, tyro.conf.arg(name="")]


def execute(options: Pinn) -> None:
    """Do what the command line says."""
    _COMMANDS[type(options.command)](options.command)


def _run(options: Run) -> None:
    import torch
    from tqdm import tqdm

    from experiments.pinn.loop import RunConfig, run
    from experiments.pinn.records import Point
    from experiments.pinn.study import settings
    from experiments.settings import pair

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    chosen = settings(options.method, options.network) if options.tuned else {}
    pairs = dict(pair(text) for text in options.set)
    named = ("problem", "method", "seconds", "seed", "network", "dtype", "resample", "points", "label")
    config = RunConfig(settings={**chosen, **pairs}, **{name: getattr(options, name) for name in named})
    title = f"{config.problem}, {config.name}, seed {config.seed}"
    layout = "{l_bar}{bar}| {n:.0f}/{total:g} s {postfix}"
    try:
        with tqdm(total=options.seconds, desc=title, bar_format=layout, disable=options.quiet) as bar:

            def watch(spent: float, point: Point | None) -> None:
                bar.update(min(spent, options.seconds) - bar.n)
                if point is not None:
                    bar.set_postfix_str(f"step {point.steps}, loss {point.loss:.3g}, error {point.error:.3g}")

            path = run(config, options.results, watch=watch)
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted; nothing was written.") from None
    if not options.quiet:
        sys.stdout.write(f"{path}\n")


def _study(options: Study) -> None:
    from experiments.pinn.study import Plan, study

    plan = Plan(options.problems, options.methods, options.seeds, options.seconds, options.networks)
    study(plan, options.results, options.jobs)


def _ablate(options: Ablate) -> None:
    from experiments.pinn.study import Plan, ablate

    plan = Plan(options.problems, (), options.seeds, options.seconds, options.networks)
    ablate(plan, options.changes, options.results, options.jobs)


def _tune(options: Tune) -> None:
    from experiments.pinn.study import tune

    tune(
        options.methods,
        options.results,
        options.jobs,
        problems=options.problems,
        seconds=options.seconds,
        network=options.network,
    )


def _table(options: Table) -> None:
    from experiments.pages import put
    from experiments.pinn.table import table

    text = table(options.results, options.methods)
    if options.into is None:
        sys.stdout.write(text + "\n")
    else:
        put(text, options.into, MARKS)


def _figure(options: Figure) -> None:
    from experiments.pinn.figures import figures

    paths = figures(options.results, options.out, options.methods)
    sys.stdout.writelines(f"{path}\n" for path in paths)
    if not any("-fields-" in path.name for path in paths):
        sys.stdout.write(
            "No pictures of solutions: they need the .npz files beside runs of seed 0, which git does not keep. "
            "Make those with `python -m experiments pinn study --results mine`.\n"
        )


_COMMANDS: dict[type, Callable[[Any], None]] = {
    Run: _run,
    Study: _study,
    Ablate: _ablate,
    Tune: _tune,
    Table: _table,
    Figure: _figure,
}
