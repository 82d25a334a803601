"""The command line of the study of the trial: ``python -m experiments unseen {run,table} --help``."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro

from experiments.common.markdown import show
from experiments.common.processes import Task, run_all
from experiments.common.study import at_least_one, end, named
from experiments.unseen.problems import PROBLEMS
from experiments.unseen.run import Case, execute, finished
from experiments.unseen.table import table

RESULTS = Path("results/unseen")
MARKS = ("<!-- unseen-table -->", "<!-- /unseen-table -->")


@dataclasses.dataclass(frozen=True)
class Run:
    """Run the cases that are not finished, one thread each; goes on where it was cut off."""

    problems: tyro.conf.Positional[tuple[str, ...]] = ()
    """heat32, heat64, ode or lstm; all unless given."""
    seeds: tuple[int, ...] = (0, 1, 2)
    try_seconds: float = Case.try_seconds
    """CPU seconds of each method in the trial."""
    seconds: float = Case.seconds
    """CPU seconds of each method in the runs that the trial is judged by."""
    jobs: int = 2
    """Cases at a time."""
    data: Path | None = None
    """Directory of the data sets; the environment variable KRYLOV_DESCENT_DATA unless given."""
    results: Path = RESULTS

    def execute(self) -> None:
        """Run one case here, or several in processes of their own."""
        at_least_one(jobs=self.jobs)
        problems = named("problem", self.problems, PROBLEMS)
        cases = [Case(name, seed, self.try_seconds, self.seconds) for seed in self.seeds for name in problems]
        cases = [case for case in cases if not finished(case, self.results)]
        if len(cases) == 1:
            execute(cases[0], self.results, self.data)
            return
        end(run_all([Task(case.name, self._command(case)) for case in cases], self.jobs))

    def _command(self, case: Case) -> list[str]:
        options = {
            "seeds": case.seed,
            "try-seconds": case.try_seconds,
            "seconds": case.seconds,
            "results": self.results,
        }
        if self.data is not None:
            options["data"] = self.data
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [sys.executable, "-m", "experiments", "unseen", "run", case.problem, *words]


@dataclasses.dataclass(frozen=True)
class Table:
    """Print the table of the cases found; trains nothing."""

    results: Path = RESULTS
    into: Path | None = None
    """Put it into this file instead, between the lines <!-- unseen-table --> and <!-- /unseen-table -->."""

    def execute(self) -> None:
        """Print, or put it in."""
        show(table(self.results), self.into, MARKS)


@dataclasses.dataclass(frozen=True)
class Unseen:
    """Whether the line that `check --try` prints is a good one, on problems it has not seen: run or table."""

    command: Annotated[Run | Table, tyro.conf.arg(name="")]

    def execute(self) -> None:
        """Do what the command says."""
        self.command.execute()
