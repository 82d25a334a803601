"""The paper's experiments: ``python -m experiments {run,tune,study,pack,table,figure,pca,pinn,deep} --help``."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments.deep.commands import Deep
from experiments.deep.commands import execute as _deep
from experiments.pinn.commands import Pinn
from experiments.pinn.commands import execute as _pinn

RESULTS = Path("results")
MARKS = ("<!-- table -->", "<!-- /table -->")


@dataclasses.dataclass(frozen=True)
class Run:
    """Train one problem with one optimizer; the same command again continues a run that was cut off."""

    problem: tyro.conf.Positional[str]
    """curves, curves5, mnist-ae, mnist-class, mnist-pretrained, spoken-digits, starcraft, adding-50, …"""
    optimizer: str = "ksd"
    """ksd, ksd-paper, ksd-hessian, hf, hf-hessian, cg, lbfgs, sgd, nesterov, adam, adamw or soap."""
    budget: str = "60s"
    """Seconds (60s), minutes (5m), hours (1h), or gradients over the training set (100g)."""
    seed: int = 0
    threads: int | None = None
    """Threads of torch; its own choice unless given."""
    clock: Literal["wall", "cpu"] = "wall"
    """Whose seconds count: the wall's, or the process's, which do not run while others have the core."""
    data: Path | None = None
    """Directory of the data sets; the environment variable KRYLOV_DESCENT_DATA unless given."""
    results: Path = Path("runs")
    """Where the run is written, as <problem>/<label>-seed<seed>.jsonl with a checkpoint beside it. The study's own runs
    are in results."""
    label: str = ""
    """Name of the run; that of the optimizer unless given."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A setting of the optimizer in place of the tuned one: --set krylov_dim=40 --set floor=1e-4."""
    samples: int | None = None
    """Only so many training samples, for a trial."""
    patience: int | None = None
    """End after so many evaluations without a better held-out error."""
    tensorboard: Path | None = None
    """Also write scalars for TensorBoard to this directory."""
    quiet: bool = False
    """No progress bar."""


@dataclasses.dataclass(frozen=True)
class Tune:
    """Try each method's grid on a short budget, and write the best settings to experiments/tuned.json."""

    problems: tyro.conf.Positional[tuple[str, ...]] = ()
    """Rows of the study; all unless given."""
    methods: tuple[str, ...] = ()
    """Only these; all that have a grid unless given."""
    data: Path | None = None
    results: Path = RESULTS / "tuning"
    jobs: int = 2
    """Runs at a time, one thread each."""
    samples: int | None = None
    """Only so many training samples, for a trial."""


@dataclasses.dataclass(frozen=True)
class Study:
    """The final runs of the study; continues where it was cut off."""

    problems: tyro.conf.Positional[tuple[str, ...]] = ()
    """Rows of the study; all unless given."""
    methods: tuple[str, ...] = ()
    """Only these; all of the plan unless given."""
    seeds: int | None = None
    """At most so many seeds; those of the plan unless given."""
    data: Path | None = None
    results: Path = RESULTS
    jobs: int = 2
    """Runs at a time, one thread each."""
    samples: int | None = None
    """Only so many training samples, for a trial."""


@dataclasses.dataclass(frozen=True)
class Pack:
    """Put the runs of all studies in a folder, one file each, into the few files that git keeps; trains nothing."""

    results: Path = RESULTS


@dataclasses.dataclass(frozen=True)
class Table:
    """Print the paper's Table 2 with ours beside it, from the runs found; trains nothing."""

    results: Path = RESULTS
    into: Path | None = None
    """Put it into this file instead, between the lines <!-- table --> and <!-- /table -->."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """Draw a figure from the runs found, as PNG; trains nothing."""

    kind: tyro.conf.Positional[Literal["convergence", "held-out", "anatomy", "ritz", "all"]] = "all"
    problems: tyro.conf.Positional[tuple[str, ...]] = ()
    """Which; all that have runs unless given."""
    results: Path = RESULTS
    out: Path = Path("figures")


@dataclasses.dataclass(frozen=True)
class Pca:
    """Check the error metric: what PCA leaves of the test images, by the error function of the autoencoders."""

    problem: tyro.conf.Positional[str] = "mnist-ae"
    components: int = 30
    data: Path | None = None


def _run(options: Run) -> None:
    import torch

    from experiments import plan
    from experiments.budget import Budget
    from experiments.loop import RunConfig, run
    from experiments.methods import settings_of
    from experiments.problems import load_problem
    from experiments.progress import watching
    from experiments.settings import pair

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    # Saturated units have gradients below the normal range of float32, on which a pass takes up to eight times as long.
    torch.set_flush_denormal(True)
    budget = Budget.parse(options.budget)
    changes = dict(pair(text) for text in options.set)
    settings = settings_of(options.optimizer, {**plan.settings(options.problem, options.optimizer), **changes})
    problem = load_problem(options.problem, options.data, options.samples)
    config = RunConfig(
        options.optimizer, settings, budget, options.seed, options.clock, options.label, options.patience
    )
    title = f"{problem.name}, {config.label or config.method}, seed {config.seed}"
    try:
        with watching(title, budget, quiet=options.quiet, tensorboard=options.tensorboard) as watch:
            path = run(problem, config, options.results, watch)
    except KeyboardInterrupt:
        raise SystemExit("\nInterrupted; the same command continues from the last checkpoint.") from None
    if not options.quiet:
        sys.stdout.write(f"{path}\n")


def _rows(options: Tune | Study) -> tuple[str, ...]:
    """The rows asked for; all mistakes are found before anything runs."""
    from experiments import plan
    from experiments.methods import settings_of

    for name in options.methods:
        settings_of(plan.CHANGED[name][0] if name in plan.CHANGED else name, {})
    counts = {"jobs": options.jobs, "samples": options.samples, "seeds": getattr(options, "seeds", None)}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"--{name} {count}: must be at least 1.")
    problems = options.problems
    unknown = [name for name in problems if name not in plan.ROWS]
    if unknown:
        raise ValueError(f"There is no problem {unknown[0]!r} in the study; there are {', '.join(plan.ROWS)}.")
    return problems or tuple(plan.ROWS)


def _tune(options: Tune) -> None:
    from experiments.study import Where, tune

    where = Where(options.data, options.results, options.jobs, options.samples)
    tune(_rows(options), where, options.methods)


def _study(options: Study) -> None:
    from experiments.study import Where, study

    where = Where(options.data, options.results, options.jobs, options.samples)
    study(_rows(options), where, options.methods, options.seeds)


def _pack(options: Pack) -> None:
    from experiments.packed import pack

    for path in pack(options.results):
        sys.stdout.write(f"{path}\n")


def _table(options: Table) -> None:
    from experiments.pages import put
    from experiments.table import table

    text = table(options.results)
    if options.into is None:
        sys.stdout.write(text + "\n")
    else:
        put(text, options.into, MARKS)


def _figure(options: Figure) -> None:
    from experiments.figures import KINDS, figure

    for kind in KINDS if options.kind == "all" else (options.kind,):
        for path in figure(kind, options.results, options.out, options.problems):
            sys.stdout.write(f"{path}\n")


def _pca(options: Pca) -> None:
    from experiments.losses import pca_error
    from experiments.problems import load_problem

    problem = load_problem(options.problem, options.data)
    if problem.error_name != "squared error":
        raise ValueError(f"{options.problem} has no images to reconstruct; mnist-ae, curves and curves5 have.")
    left = pca_error(problem.train[0], problem.held_out[0], options.components)
    sys.stdout.write(f"PCA-{options.components} leaves {left:.2f} per test image.\n")


_COMMANDS: dict[type, Callable[[Any], None]] = {
    Run: _run,
    Tune: _tune,
    Study: _study,
    Pack: _pack,
    Table: _table,
    Figure: _figure,
    Pca: _pca,
    Pinn: _pinn,
    Deep: _deep,
}

Command = (
    Annotated[Run, tyro.conf.subcommand("run")]
    | Annotated[Tune, tyro.conf.subcommand("tune")]
    | Annotated[Study, tyro.conf.subcommand("study")]
    | Annotated[Pack, tyro.conf.subcommand("pack")]
    | Annotated[Table, tyro.conf.subcommand("table")]
    | Annotated[Figure, tyro.conf.subcommand("figure")]
    | Annotated[Pca, tyro.conf.subcommand("pca")]
    | Annotated[Pinn, tyro.conf.subcommand("pinn")]
    | Annotated[Deep, tyro.conf.subcommand("deep")]
)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and do it; mistakes of the user end with their message alone."""
    options = tyro.cli(Command, prog="python -m experiments", description=__doc__, args=arguments)
    try:
        _COMMANDS[type(options)](options)
    except (ValueError, FileNotFoundError) as error:
        if os.environ.get("KRYLOV_DESCENT_TRACEBACK"):
            raise
        raise SystemExit(f"{error}") from None


if __name__ == "__main__":
    main()
