"""Runs as they were recorded, by themselves or packed, and what a table or a figure asks of them. Nothing here trains.

A number that was not finite is null in the file and NaN here. A run may still be going on, or have been cut off: its
last line may be half written, and its "end" may be missing.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

from experiments import packed
from experiments.budget import Budget

Axis = Literal["seconds", "gradients"]

# The methods that are compared, in the order of tables and legends; runs under other labels are only listed.
LABELS: Mapping[str, str] = {
    "ksd": "KSD",
    "ksd-paper": "KSD, paper's settings",
    "ksd-hessian": "KSD, Hessian",
    "hf": "HF",
    "hf-hessian": "HF, Hessian",
    "lbfgs": "L-BFGS",
    "cg": "CG",
    "sgd": "SGD",
    "adam": "Adam",
}

# Steps are whole: a run may end a little beyond its budget, and counts up to a fortieth beyond it.
OVER = 1.025


@dataclasses.dataclass(frozen=True)
class Point:
    """Where a run stood: its cost so far (evaluations not counted), and its losses and errors.

    Those of training are over the first ``evaluated_samples`` of the run, the others over the whole held-out set.

    Attributes:
        step: steps taken; 0 is before training.
        seconds: on the run's clock.
        gradients: gradients over the whole training set that the work is worth.
        loss: training loss, weight decay included.
        error: mean training error, squared or in %.
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


@dataclasses.dataclass(frozen=True)
class Run:
    """One method on one problem from one seed; ``end`` is None while unfinished.

    ``evaluated_samples`` is how many training samples, from the first, loss and error are taken over; 0 for all.
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

    @property
    def percent(self) -> bool:
        """Whether errors are shares of wrong cases, in %."""
        return self.error_name.endswith("%")

    @property
    def allowed(self) -> Budget:
        """The budget, read."""
        return Budget.parse(self.budget)


@dataclasses.dataclass(frozen=True)
class RelativeTime:
    """How long one run took to a training loss of ``loss``, over how long the other took; below 1 is faster."""

    loss: float
    seconds: float
    gradients: float


def read_run(path: Path) -> Run:
    """The run of one file. A last line that is cut off is left out; a broken line before it is an error."""
    return _run(packed.lines(path), path)


def _run(lines: packed.Lines, path: Path) -> Run:
    """The run of these lines, which stand in a file."""
    header: Run | None = None
    points: list[Point] = []
    end = None
    for where, line in lines:
        kind = line.get("kind")
        if kind == "run":
            header = _header(line, where)
        elif kind == "point":
            point = _point(line, where)
            # A run continued from a checkpoint repeats the steps since: the later account holds.
            while points and points[-1].step >= point.step:
                points.pop()
            points.append(point)
            end = None
        elif kind == "end":
            end = str(line.get("reason", ""))
    if header is None:
        raise ValueError(f'{path} has no line of kind "run": is it a record of a run? Move it out of the results.')
    return dataclasses.replace(header, points=tuple(points), end=end)


def read_runs(results: Path) -> list[Run]:
    """All runs of a folder, packed and ``<problem>/<label>-seed<seed>.jsonl``, by problem, label and seed.

    Files in which no line is complete yet are passed over.
    """
    if not results.is_dir():
        raise ValueError(f"{results} is not a folder: name the one that runs were recorded in.")
    runs = [_run(lines, file) for file in sorted(results.glob("*.jsonl")) for lines in packed.read(file)]
    # One level down only: trials for tuning lie deeper, and are no results.
    runs += [read_run(path) for path in sorted(results.glob("*/*-seed*.jsonl")) if packed.lines(path)]
    found = {(run.problem, run.label, run.seed): run for run in runs}
    return [found[key] for key in sorted(found)]


def by_label(runs: Iterable[Run], problem: str) -> dict[str, list[Run]]:
    """The runs on one problem by label, those of ``LABELS`` first and in its order; every list by seed."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.problem == problem and run.points:
            found.setdefault(run.label, []).append(run)
    order = list(LABELS)
    labels = sorted(found, key=lambda label: (order.index(label) if label in LABELS else len(order), label))
    return {label: sorted(found[label], key=lambda run: run.seed) for label in labels}


def row_budget(found: Mapping[str, Sequence[Run]]) -> Budget | None:
    """The budget that methods are compared at on one problem: the commonest of KSD and HF, the longest of ties.

    Where neither was run, the commonest of all; None where nothing was.
    """
    pair = [run for label in ("ksd", "hf") for run in found.get(label, ())]
    counts = Counter(run.allowed for run in pair or [run for runs in found.values() for run in runs])
    return max(counts, key=lambda budget: (counts[budget], budget.amount), default=None)


def of_row(found: Mapping[str, Sequence[Run]]) -> dict[str, list[Run]]:
    """The runs that can be compared: those of the row's budget. Under another, a schedule would be half-way here."""
    budget = row_budget(found)
    kept = {label: [run for run in runs if run.allowed == budget] for label, runs in found.items()}
    return {label: runs for label, runs in kept.items() if runs}


def within_budget(run: Run, share: float = OVER) -> Run:
    """The run as far as it counts: up to a share of its budget, by default all of it and ``OVER``."""
    budget = run.allowed
    kept = (p for p in run.points if budget.spent(p.seconds, p.gradients) <= share * budget.amount)
    return dataclasses.replace(run, points=tuple(kept))


def best_held_out(run: Run) -> Point | None:
    """Where early stopping would have stopped: the lowest held-out error; ties go to the lower held-out loss."""
    valid = [p for p in run.points if math.isfinite(p.held_out_error)]

    def key(p: Point) -> tuple[float, float]:
        return p.held_out_error, p.held_out_loss if math.isfinite(p.held_out_loss) else math.inf

    return min(valid, key=key, default=None)


def final(run: Run) -> Point | None:
    """The last point, whatever it holds."""
    return run.points[-1] if run.points else None


def lowest(run: Run) -> float:
    """The lowest training loss at any point; NaN if none was finite."""
    return min((p.loss for p in run.points if math.isfinite(p.loss)), default=math.nan)


def time_to(run: Run, loss: float, axis: Axis = "seconds") -> float | None:
    """When the first point with a training loss of ``loss`` or less was recorded; None if there is none.

    Nothing is read between points: inside a step there is no model that has the loss of a line through its ends, and
    the longer the steps, the more such a line would give away.
    """
    return next((getattr(p, axis) for p in run.points if p.loss <= loss), None)


def relative_time(a: Run, b: Run) -> RelativeTime | None:
    """Time of ``a`` over time of ``b`` to L*, the lowest training loss that both reach.

    None if there is no such level, or if one of them begins at it: then no time was spent that could be compared.
    """
    level = max(lowest(a), lowest(b), key=lambda x: math.inf if math.isnan(x) else x)
    ratios = []
    axes: Sequence[Axis] = ("seconds", "gradients")
    for axis in axes:
        mine, other = time_to(a, level, axis), time_to(b, level, axis)
        if not mine or not other:
            return None
        ratios.append(mine / other)
    return RelativeTime(level, *ratios)


def relative_times(a: Sequence[Run], b: Sequence[Run]) -> list[RelativeTime]:
    """``relative_time`` for every seed that both have, where it exists."""
    others = {run.seed: run for run in b}
    pairs = [relative_time(run, others[run.seed]) for run in a if run.seed in others]
    return [pair for pair in pairs if pair is not None]


def _header(line: Mapping[str, Any], where: str) -> Run:
    """A run without its points."""
    kinds = {name: get_origin(kind) or kind for name, kind in get_type_hints(Run).items()}
    given = {name: value for name, value in line.items() if name in kinds and name not in ("points", "end")}
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
    costs, values = ("seconds", "gradients"), ("loss", "error", "held_out_loss", "held_out_error")
    for name in ("step", *costs, *values):
        if name not in line:
            raise ValueError(f"{where}: the point at step {line.get('step')} lacks {name!r}: record the run again.")
        value = line[name]
        if value is None and name in values:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not (name in values or math.isfinite(value)):
            raise ValueError(f"{where}: {name} is {value!r}, not a number: record the run again.")
    report = line.get("report")
    if not isinstance(report, (dict, type(None))):
        raise ValueError(f"{where}: the report is {report!r}, not an object or null: record the run again.")
    numbers = {name: math.nan if line[name] is None else float(line[name]) for name in (*costs, *values)}
    return Point(step=int(line["step"]), **numbers, report=report)
