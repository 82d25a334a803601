"""One case: the line of a trial, then every method of the trial for longer, in a JSON file that can be continued.

The clock is the processor's, measurements of the loss excluded. Losses of the longer runs are over all samples.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import torch

from experiments.common.files import encoded, machine, replacing
from experiments.unseen.problems import PROBLEMS
from krylov_descent import check
from krylov_descent.checking.problem import Names, Problem
from krylov_descent.checking.restore import as_found
from krylov_descent.checking.trial import run


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem and its seed, the seconds of the trial, and those of the runs it is judged by."""

    problem: str
    seed: int
    try_seconds: float = 20.0
    seconds: float = 60.0

    @property
    def name(self) -> str:
        """In files and messages."""
        return f"{self.problem}-seed{self.seed}"

    def path(self, results: Path) -> Path:
        """The file of the case."""
        return results / f"{self.name}.json"


def read(case: Case, results: Path) -> dict[str, Any]:
    """What is known of a case; nothing if it was not begun.

    Raises:
        ValueError: the file is of other seconds.
    """
    path = case.path(results)
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if known and known["case"] != dataclasses.asdict(case):
        raise ValueError(f"{path} holds {known['case']}. Give other --results, or delete that file.")
    return known


def finished(case: Case, results: Path) -> bool:
    """Whether every method of the trial was run."""
    known = read(case, results)
    return bool(known) and len(known["runs"]) == len(known["trial"])


def execute(case: Case, results: Path, data: Path | None) -> None:
    """Run a case to its end, one thread; what its file has is not repeated.

    Raises:
        ValueError: the check failed.
    """
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    known = read(case, results)
    model, closure, sets = PROBLEMS[case.problem](case.seed, data)
    if not known:
        report = check(closure, model, sets, try_seconds=case.try_seconds)
        if not report.trial:
            raise ValueError(f"{case.name} was not tried:\n{report}")
        facts = {"case": dataclasses.asdict(case), "date": datetime.date.today().isoformat(), "machine": machine()}
        known = {**facts, "line": report.line, "trial": report.as_dict()["trial"], "runs": []}
        _write(known, case.path(results))
    names = Names(model)
    with as_found(model, names.parameters) as buffers, torch.enable_grad():
        problem = Problem(closure, names, sets, 20, "ggn", buffers)
        problem.load()
        samples = 1 if sets is None else len(sets)
        for row in known["trial"][len(known["runs"]) :]:
            found = run(problem, row["name"], row["line"], case.seconds, samples)
            known["runs"].append(dataclasses.asdict(found))
            _write(known, case.path(results))


def _write(known: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        unfinished.write_bytes(encoded(known))
