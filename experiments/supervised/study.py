"""Runs of a study that trains networks on samples, as processes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.packed import path_of
from experiments.common.study import Planned, options
from experiments.supervised.methods import settings_of
from experiments.supervised.problems import PROBLEMS


@dataclasses.dataclass(frozen=True)
class Where:
    """Where the data is and results go, how many runs go at a time, and how many samples they see."""

    data: Path | None
    results: Path
    jobs: int = 2
    samples: int | None = None


@dataclasses.dataclass(frozen=True)
class Training:
    """One run: a method on a problem from a seed, for so many CPU seconds of one thread."""

    problem: str
    method: str
    settings: Mapping[str, Any]
    seconds: float
    seed: int
    label: str

    def path(self, results: Path) -> Path:
        """Its file."""
        return path_of(results, self.problem, self.label, self.seed)

    def planned(self, where: Where, command: Sequence[str]) -> Planned:
        """With the command of a study, and the arguments that commands of both studies have."""
        arguments = [*command, "--seed", str(self.seed), "--label", self.label, "--results", str(where.results)]
        arguments += ["--data", str(where.data)] if where.data else []
        arguments += ["--samples", str(where.samples)] if where.samples else []
        expected = {
            "settings": settings_of(self.method, self.settings),
            "samples": min(where.samples or math.inf, PROBLEMS[self.problem].samples),
            "clock": "cpu",
            "threads": 1,
        }
        return Planned(
            f"{self.problem} {self.label} seed {self.seed}",
            where.results,
            self.path(where.results),
            self.seconds,
            expected,
            [*arguments, *options(self.settings), "--quiet"],
        )
