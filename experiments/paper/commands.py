"""The command line of the paper's study: ``python -m experiments {run,tune,study,table,figure,pca} --help``."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Literal

import torch
import tyro

from experiments.common.budget import Budget
from experiments.common.markdown import show
from experiments.common.settings import pair
from experiments.common.study import at_least_one, named
from experiments.paper import plan
from experiments.paper.figures import figures
from experiments.paper.study import long, study, tune
from experiments.paper.table import table
from experiments.supervised.commands import train
from experiments.supervised.losses import pca_error
from experiments.supervised.methods import settings_of
from experiments.supervised.problems import load_problem
from experiments.supervised.run import RunConfig
from experiments.supervised.study import Where

RESULTS = Path("results")
MARKS = ("<!-- table -->", "<!-- /table -->")


@dataclasses.dataclass(frozen=True)
class Run:
    """Train one problem with one optimizer; the same command again continues a run that was cut off."""

    problem: tyro.conf.Positional[str]
    """curves, curves5, mnist-ae, mnist-class, mnist-pretrained, spoken-digits, starcraft, adding-50, …"""
    optimizer: str = "ksd"
    """ksd, ksd-paper, ksd-raised, ksd-hessian, hf, hf-hessian, cg, lbfgs, sgd, nesterov, adam, adamw or soap."""
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

    def execute(self) -> None:
        """Train."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        budget = Budget.parse(self.budget)
        changes = dict(pair(text) for text in self.set)
        settings = settings_of(self.optimizer, {**plan.settings(self.problem, self.optimizer), **changes})
        config = RunConfig(self.optimizer, settings, budget, self.seed, self.clock, self.label, self.patience)
        train(
            self.problem,
            config,
            self.results,
            data=self.data,
            samples=self.samples,
            quiet=self.quiet,
            tensorboard=self.tensorboard,
        )


@dataclasses.dataclass(frozen=True)
class _Runs:
    problems: tyro.conf.Positional[tuple[str, ...]] = ()
    """Rows of the study; all unless given."""
    data: Path | None = None
    results: Path = RESULTS
    jobs: int = 2
    """Runs at a time, one thread each."""
    samples: int | None = None
    """Only so many training samples, for a trial."""

    def _checked(self, methods: tuple[str, ...], seeds: int | None = None) -> tuple[list[str], Where]:
        """The rows asked for; all mistakes are found before anything runs."""
        for name in methods:
            settings_of(plan.CHANGED[name][0] if name in plan.CHANGED else name, {})
        at_least_one(jobs=self.jobs, samples=self.samples, seeds=seeds)
        return named("problem", self.problems, plan.ROWS), Where(self.data, self.results, self.jobs, self.samples)


@dataclasses.dataclass(frozen=True)
class Tune(_Runs):
    """Try each method's grid on a short budget, and write the best settings to experiments/paper/tuned.json."""

    methods: tuple[str, ...] = ()
    """Only these; all that have a grid unless given."""
    results: Path = RESULTS / "tuning"

    def execute(self) -> None:
        """Run the trials."""
        tune(*self._checked(self.methods), self.methods)


@dataclasses.dataclass(frozen=True)
class Study(_Runs):
    """The final runs of the study; continues where it was cut off."""

    methods: tuple[str, ...] = ()
    """Only these; all of the plan unless given."""
    seeds: int | None = None
    """At most so many seeds; those of the plan unless given."""
    long: bool = False
    """In place of them the runs of hours on MNIST, towards the paper's errors: ksd, ksd-paper, ksd-raised, deep, hf."""

    def execute(self) -> None:
        """Make the runs."""
        rows, where = self._checked(self.methods, self.seeds)
        if self.long:
            long(rows, where, self.methods)
        else:
            study(rows, where, self.methods, self.seeds)


@dataclasses.dataclass(frozen=True)
class Table:
    """Print the paper's Table 2 with ours beside it, from the runs found; trains nothing."""

    results: Path = RESULTS
    into: Path | None = None
    """Put it into this file instead, between the lines <!-- table --> and <!-- /table -->."""

    def execute(self) -> None:
        """Print, or put it in."""
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
class Pca:
    """Check the error metric: what PCA leaves of the test images, by the error function of the autoencoders."""

    problem: tyro.conf.Positional[str] = "mnist-ae"
    components: int = 30
    data: Path | None = None

    def execute(self) -> None:
        """Print what is left."""
        problem = load_problem(self.problem, self.data)
        if problem.error_name != "squared error":
            raise ValueError(f"{self.problem} has no images to reconstruct; mnist-ae, curves and curves5 have.")
        left = pca_error(problem.train[0], problem.held_out[0], self.components)
        sys.stdout.write(f"PCA-{self.components} leaves {left:.2f} per test image.\n")
