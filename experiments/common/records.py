"""Runs as they were recorded, by themselves or packed. Nothing here trains.

A number that was not finite is null in the file and NaN here. A run may still be going on, or have been cut off: its
last line may be half written, and its "end" may be missing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from experiments.common import packed
from experiments.common.budget import Budget

Axis = Literal["seconds", "gradients"]
Quantity = Literal["loss", "error", "held_out_loss", "held_out_error"]

#: Steps are whole: a run may end a little beyond its budget, and counts up to a fortieth beyond it.
OVER = 1.025

_COSTS = ("seconds", "gradients")
_VALUES = ("loss", "error", "held_out_loss", "held_out_error")

#: Names in records of the PINN study, whose points have neither gradients nor a held-out error.
_NAMES = {"steps": "step", "held_out": "held_out_loss"}


@dataclasses.dataclass(frozen=True)
class Point:
    """Where a run stood: its cost so far (evaluations not counted), and its losses and errors.

    Those of training are over the first ``evaluated_samples`` of the run, the others over the whole held-out set. Of an
    equation, losses are over collocation points, the error over the test grid.

    Attributes:
        step: steps taken; 0 is before training.
        seconds: on the run's clock.
        gradients: gradients over the whole training set that the work is worth.
        loss: training loss, weight decay included.
        error: mean training error, squared or in %; of an equation or a fit, relative L2 error.
        report: the report of the last step, if the method gives one.
    """

    step: int
    seconds: float
    gradients: float
    loss: float
    error: float
    held_out_loss: float
    held_out_error: float
    report: Mapping[str, Any] | None = None

    @property
    def finite(self) -> bool:
        """Whether losses and error are numbers."""
        return all(map(math.isfinite, (self.loss, self.held_out_loss, self.error)))


@dataclasses.dataclass(frozen=True)
class Run:
    """One method on one problem from one seed; ``end`` is None while unfinished.

    Attributes:
        evaluated_samples: how many training samples, from the first, loss and error are taken over; 0 for all.
        network: of the PINN study; others have one for each problem.
        spent: seconds until it ended, those of a last step that diverged included.
        path: its own file, be it there or packed.
    """

    problem: str
    label: str
    seed: int
    points: tuple[Point, ...]
    end: str | None = None
    method: str = ""
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    budget: str = ""
    clock: str = ""
    threads: int = 1
    parameters: int = 0
    samples: int = 0
    evaluated_samples: int = 0
    held_out_samples: int = 0
    error_name: str = ""
    weight_decay: float = 0.0
    started: str = ""
    machine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    network: str = ""
    spent: float = 0.0
    path: Path = Path()

    @property
    def percent(self) -> bool:
        """Whether errors are shares of wrong cases, in %."""
        return self.error_name.endswith("%")

    @property
    def allowed(self) -> Budget:
        """The budget, read."""
        return Budget.parse(self.budget)

    @property
    def seconds(self) -> float:
        """Of the budget."""
        return self.allowed.amount

    @property
    def final(self) -> Point:
        """The last finite point, or the first if none is."""
        return next((point for point in reversed(self.points) if point.finite), self.points[0])

    @property
    def diverged(self) -> bool:
        """Whether its loss was not finite at the end."""
        return self.end == "diverged" or bool(self.points and not math.isfinite(self.points[-1].loss))

    def cut(self, amount: float) -> Run:
        """Its points until so much of its budget's unit is spent; if there are others, the budget is why it ends."""
        spent = self.allowed.spent
        points = tuple(point for point in self.points if spent(point.seconds, point.gradients) <= amount)
        if len(points) == len(self.points):
            return self
        return dataclasses.replace(self, points=points, end="budget" if self.end else None)


def read_run(path: Path) -> Run:
    """The run of one file. A last line that is cut off is left out; a broken line before it is an error."""
    return _run(packed.lines(path), path)


def read_runs(folder: Path, below: str = "*") -> list[Run]:
    """All runs of a study's folder, packed and in files of their own, by problem, network, label and seed.

    Files in which no line is complete yet are passed over. Those of their own are looked for so far ``below``, and no
    deeper: trials for tuning are no results.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: name the one that runs were recorded in.")
    runs = [_run(lines, file) for file in sorted(folder.glob("*.jsonl")) for lines in packed.read(file)]
    runs += [read_run(path) for path in sorted(folder.glob(f"{below}/*-seed*.jsonl")) if packed.lines(path)]
    found = {(run.problem, run.network, run.label, run.seed): run for run in runs}
    return [
        dataclasses.replace(run, path=packed.path_of(folder, run.problem, run.label, run.seed, run.network))
        for _, run in sorted(found.items())
    ]


def ordered(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Those of the order first, in that order; the others by name."""
    return sorted(set(names), key=lambda name: (order.index(name) if name in order else len(order), name))


def _run(lines: packed.Lines, path: Path) -> Run:
    """The run of these lines, which stand in a file."""
    header: Run | None = None
    points: list[Point] = []
    end: Mapping[str, Any] | None = None
    for where, line in lines:
        kind = line.get("kind")
        if kind == "run":
            header = _header(line, where)
        elif kind == "point":
            point = _point(line, where)
            # A run continued from a checkpoint repeats the steps since: the later account holds.
            while points and (points[-1].step, points[-1].seconds) >= (point.step, point.seconds):
                points.pop()
            points.append(point)
            end = None
        elif kind == "end":
            end = line
    if header is None:
        raise ValueError(f'{path} has no line of kind "run": is it a record of a run? Move it out of the results.')
    reason = None if end is None else str(end.get("reason", ""))
    spent = (end or {}).get("spent", points[-1].seconds if points else 0.0)
    return dataclasses.replace(header, points=tuple(points), end=reason, spent=float(spent), path=path)


def _header(line: Mapping[str, Any], where: str) -> Run:
    """A run without its points."""
    if "network" in line and "seconds" in line:
        sizes = {"parameters": line.get("n", 0), "samples": line.get("N", 0)}
        line = {**line, **sizes, "budget": str(Budget(line["seconds"], "seconds"))}
    kinds = {name: get_origin(kind) or kind for name, kind in get_type_hints(Run).items()}
    read = kinds.keys() - {"points", "end", "spent", "path"}
    given = {name: value for name, value in line.items() if name in read}
    for name, value in given.items():
        kind = kinds[name]
        if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
            wanted = {str: "a string", int: "a whole number", float: "a number"}.get(kind, "an object")
            raise ValueError(f"{where}: {name} is {value!r}, not {wanted}: record the run again.")
    try:
        run = Run(**given, points=())
    except TypeError as missing:
        raise ValueError(f"{where}: the header is incomplete ({missing}): record the run again.") from missing
    try:
        Budget.parse(run.budget)
    except ValueError:
        raise ValueError(f"{where}: {run.budget!r} is no budget, as 300s or 100g: record the run again.") from None
    return run


def _point(line: Mapping[str, Any], where: str) -> Point:
    if "steps" in line:
        known = {_NAMES.get(name, name): value for name, value in line.items()}
        line = {"gradients": 0.0, "held_out_error": None, **known}
    for name in ("step", *_COSTS, *_VALUES):
        if name not in line:
            raise ValueError(f"{where}: the point at step {line.get('step')} lacks {name!r}: record the run again.")
        value = line[name]
        if value is None and name in _VALUES:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not (name in _VALUES or math.isfinite(value)):
            raise ValueError(f"{where}: {name} is {value!r}, not a number: record the run again.")
    report = line.get("report")
    if not isinstance(report, (dict, type(None))):
        raise ValueError(f"{where}: the report is {report!r}, not an object or null: record the run again.")
    numbers = {name: math.nan if line[name] is None else float(line[name]) for name in (*_COSTS, *_VALUES)}
    return Point(step=int(line["step"]), **numbers, report=report)
