"""The command line of the study of deep networks: ``python -m experiments deep {run,tune,study,…} --help``."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import torch
import tyro

from experiments.common.budget import Budget
from experiments.common.markdown import show
from experiments.common.settings import pair
from experiments.deep import costs, plan
from experiments.deep.figures import figures
from experiments.deep.study import ablate, pace, study, tune
from experiments.deep.table import table
from experiments.supervised.commands import train
from experiments.supervised.methods import settings_of
from experiments.supervised.run import RunConfig
from experiments.supervised.study import Where

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

    def execute(self) -> None:
        """Train."""
        torch.set_num_threads(1)
        config = RunConfig(
            self.method,
            settings_of(self.method, dict(pair(text) for text in self.set)),
            Budget(self.seconds, "seconds"),
            self.seed,
            clock="cpu",
            label=self.label,
            pace=pace(self.seconds, self.marks, trial=self.trial),
        )
        train(self.task, config, self.results, data=self.data, samples=self.samples, quiet=self.quiet)


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
    results: Path = RESULTS

    def _where(self) -> Where:
        return Where(self.data, self.results, self.jobs, self.samples)


@dataclasses.dataclass(frozen=True)
class Tune(_Runs):
    """Tune each method for each task and budget; the best settings go to experiments/deep/tuned.json."""

    methods: tuple[str, ...] = ()
    """All that have a grid unless given."""
    budgets: tuple[float, ...] = plan.BUDGETS
    """CPU seconds."""
    results: Path = Path("results/tuning/deep")

    def execute(self) -> None:
        """Run the trials."""
        tune(self.tasks, self.methods, self._where(), budgets=self.budgets)


@dataclasses.dataclass(frozen=True)
class Study(_Runs):
    """All runs of the study, the first seed of everything first; goes on where it was cut off."""

    methods: tuple[str, ...] = ()
    """All unless given."""
    budgets: tuple[float, ...] = plan.BUDGETS
    """CPU seconds. A method without a schedule has one run, of the longest."""
    seeds: int = 3

    def execute(self) -> None:
        """Make the runs."""
        study(self.tasks, self.methods, self._where(), budgets=self.budgets, seeds=self.seeds)


@dataclasses.dataclass(frozen=True)
class Ablate(_Runs):
    """Runs of KSD with one thing changed at a time."""

    labels: tuple[str, ...] = ()
    """All ablations unless given."""
    seconds: float = 300.0
    """CPU seconds."""
    seeds: int = 1

    def execute(self) -> None:
        """Make the runs."""
        ablate(self.tasks, self.labels, self._where(), seconds=self.seconds, seeds=self.seeds)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Measure what a step of KSD costs by phase, in gradients over A; needs a quiet machine."""

    tasks: tyro.conf.Positional[tuple[str, ...]] = ("mnist-ae", "char-transformer")
    sizes: tuple[int, ...] = (500, 2000, 8000)
    """Samples of A."""
    steps: int = 20
    data: Path | None = None
    """Directory of the data sets; the environment variable KRYLOV_DESCENT_DATA unless given."""

    def execute(self) -> None:
        """Measure."""
        torch.set_num_threads(1)
        sys.stdout.write(costs.table(self.tasks, self.sizes, self.steps, self.data) + "\n")


@dataclasses.dataclass(frozen=True)
class Table:
    """Print tables of the runs found; trains nothing."""

    results: Path = RESULTS
    into: Path | None = None
    """Put them into this file instead, between the lines <!-- deep-table --> and <!-- /deep-table -->."""

    def execute(self) -> None:
        """Print, or put them in."""
        show(table(self.results), self.into, MARKS)


@dataclasses.dataclass(frozen=True)
class Figure:
    """Draw the figures of the pages from the runs found, as PNG; trains nothing."""

    results: Path = RESULTS
    out: Path = Path("figures")

    def execute(self) -> None:
        """Draw."""
        sys.stdout.writelines(f"{path}\n" for path in figures(self.results, self.out))


@dataclasses.dataclass(frozen=True)
class Deep:
    """Deep networks, KSD and tuned rivals at equal CPU time: run, tune, study, ablate, costs, table or figure."""

    command: Annotated[Run | Tune | Study | Ablate | Costs | Table | Figure, tyro.conf.arg(name="")]

    def execute(self) -> None:
        """Do what the command says."""
        self.command.execute()
