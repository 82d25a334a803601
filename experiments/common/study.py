"""The processes of a study: which of its runs are not finished yet, and what its tuning chose."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.budget import Budget
from experiments.common.files import finished
from experiments.common.processes import Task, run_all


@dataclasses.dataclass(frozen=True)
class Planned:
    """A run that a study wants.

    Attributes:
        name: in progress bars and messages.
        folder: of the study.
        path: of the run's own file.
        seconds: its budget.
        expected: what the header of the file must say, if it is this run's.
        arguments: of ``python -m experiments``.
    """

    name: str
    folder: Path
    path: Path
    seconds: float
    expected: Mapping[str, Any]
    arguments: Sequence[str]


def run_missing(runs: Iterable[Planned], jobs: int) -> list[str]:
    """Run what is not finished, so many at a time; returns a line for each that failed.

    A file of other settings does not count as finished: the run itself will say so.
    """
    at_least_one(jobs=jobs)
    wanted = [run for run in runs if not finished(run.folder, run.path, Budget(run.seconds, "seconds"), **run.expected)]
    return run_all([Task(run.name, [sys.executable, "-m", "experiments", *run.arguments]) for run in wanted], jobs)


def end(failed: Sequence[str]) -> None:
    """Name what failed.

    Raises:
        SystemExit: something did.
    """
    if failed:
        raise SystemExit("These runs failed:\n" + "\n".join(failed))


def named(kind: str, names: Sequence[str], known: Iterable[str]) -> list[str]:
    """Those named, or all that are known.

    Raises:
        ValueError: one is not.
    """
    known = list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"There is no {kind} {unknown[0]!r}; there are {', '.join(known)}.")
    return list(names) or known


def at_least_one(**counts: int | None) -> None:
    """Counts that were given must be positive.

    Raises:
        ValueError: one is not.
    """
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"--{name} {count}: must be at least 1.")


def product(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """All combinations of settings."""
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def options(settings: Mapping[str, Any]) -> list[str]:
    """Settings as arguments of a command."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def read_tuned(file: Path) -> dict[str, Any]:
    """What tuning chose before; nothing if there is no file."""
    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return known


def write_tuned(file: Path, known: Mapping[str, Any]) -> None:
    """Keep what tuning chose."""
    file.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
