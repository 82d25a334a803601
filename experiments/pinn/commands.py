"""The command line of the PINN study: ``python -m experiments pinn {run,study,ablate,tune,table,figure} --help``."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from experiments.common.budget import Budget
from experiments.common.markdown import show
from experiments.common.progress import follow
from experiments.common.settings import pair
from experiments.pinn.figures import figures
from experiments.pinn.run import RunConfig, run
from experiments.pinn.study import Plan, ablate, settings, study, tune
from experiments.pinn.table import table

RESULTS = Path("results")
MARKS = ("<!-- pinn-table -->", "<!-- /pinn-table -->")


@dataclasses.dataclass(frozen=True)
class Run:
    """Solve one problem with one method; a run that is finished is not repeated."""

    problem: tyro.conf.Positional[str]
    """An equation, poisson2d, poisson5d, burgers, convection30, …, or a fit, image64, regression, deeponet, …"""
    method: tyro.conf.Positional[str]
    """flow, lm, ssbroyden, …"""
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

    def execute(self) -> None:
        """Solve it."""
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        chosen = settings(self.method, self.network) if self.tuned else {}
        pairs = dict(pair(text) for text in self.set)
        names = ("problem", "method", "seconds", "seed", "network", "dtype", "resample", "points", "label")
        config = RunConfig(settings={**chosen, **pairs}, **{name: getattr(self, name) for name in names})
        follow(
            lambda watch: run(config, self.results, watch=watch),
            f"{config.problem}, {config.name}, seed {config.seed}",
            Budget(config.seconds, "seconds"),
            ("steps", "loss", "error"),
            interrupted="nothing was written",
            quiet=self.quiet,
        )


@dataclasses.dataclass(frozen=True)
class _Runs:
    seconds: float = 60.0
    """CPU seconds of a run."""
    networks: tuple[str, ...] = ("3x32",)
    jobs: int = 2
    """Runs at a time, one thread each."""
    results: Path = RESULTS

    def _plan(self, problems: tuple[str, ...], methods: tuple[str, ...], seeds: int) -> Plan:
        return Plan(problems, methods, seeds, self.seconds, self.networks)


@dataclasses.dataclass(frozen=True)
class Study(_Runs):
    """All runs of the study, the first seed of everything first; goes on where it was cut off."""

    problems: tyro.conf.Positional[tuple[str, ...]] = ()
    """Those that nothing was chosen on unless given; others and fits when named: wave, image64, deeponet, …"""
    methods: tuple[str, ...] = ()
    """All unless given."""
    seeds: int = 3

    def execute(self) -> None:
        """Make the runs."""
        study(self._plan(self.problems, self.methods, self.seeds), self.results, self.jobs)


@dataclasses.dataclass(frozen=True)
class Ablate(_Runs):
    """Runs of the Gauss–Newton flow that lacks a part, or is changed in one thing; `pinn table` compares them."""

    problems: tyro.conf.Positional[tuple[str, ...]] = ()
    """Those that constants are chosen on unless given."""
    changes: tuple[str, ...] = ()
    """without-corrections, without-momentum, …, rows-100, …; each of all in turn unless given."""
    seeds: int = 1

    def execute(self) -> None:
        """Make the runs."""
        ablate(self._plan(self.problems, (), self.seeds), self.changes, self.results, self.jobs)


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

    def execute(self) -> None:
        """Run the trials."""
        problems, seconds, network = self.problems, self.seconds, self.network
        tune(self.methods, self.results, self.jobs, problems=problems, seconds=seconds, network=network)


@dataclasses.dataclass(frozen=True)
class Table:
    """Print tables of the runs found; trains nothing."""

    methods: tuple[str, ...] = ()
    """Only these columns, methods or labels without their budget; unless given all methods, without the runs that
    pinn/left_out.json in the results lists."""
    results: Path = RESULTS
    into: Path | None = None
    """Put them into this file instead, between the lines <!-- pinn-table --> and <!-- /pinn-table -->."""

    def execute(self) -> None:
        """Print, or put them in."""
        show(table(self.results, self.methods), self.into, MARKS)


@dataclasses.dataclass(frozen=True)
class Figure:
    """Draw the figures of the pages from the runs found, as PNG; trains nothing."""

    results: Path = RESULTS
    out: Path = Path("figures")

    def execute(self) -> None:
        """Draw."""
        sys.stdout.writelines(f"{path}\n" for path in figures(self.results, self.out))


@dataclasses.dataclass(frozen=True)
class Pinn:
    """Optimizers on physics-informed networks at equal CPU time: run, study, ablate, tune, table or figure."""

    command: Annotated[Run | Study | Ablate | Tune | Table | Figure, tyro.conf.arg(name="")]

    def execute(self) -> None:
        """Do what the command says."""
        self.command.execute()
