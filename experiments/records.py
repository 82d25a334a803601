"""Runs as they were recorded, one JSONL file each, and what a table or a figure asks of them. Nothing here trains.

A number that was not finite is null in the file and NaN here. A run may still be going on, or have been cut off: its
last line may be half written, and its "end" may be missing.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

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


@dataclasses.dataclass(frozen=True)
class Point:
    """Where a run stood: its cost so far (evaluations not counted), and losses and errors over whole sets.

    Attributes:
        step: steps taken; 0 is before training.
        seconds: on the run's clock.
        gradients: gradients over the whole training set that the work is worth.
        loss: training loss, weight decay included.
        error: mean error on the training set, squared or in %.
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

    ``evaluated_samples`` is how many training samples loss and error are taken over, 0 for all.
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

    @property
    def percent(self) -> bool:
        """Whether errors are shares of wrong cases, in %."""
        return self.error_name.endswith("%")

    @property
    def axis(self) -> Axis:
        """What the budget is counted in."""
        return "gradients" if self.budget.endswith(("g", "ge")) else "seconds"


@dataclasses.dataclass(frozen=True)
class RelativeTime:
    """How long one run took to the training loss ``loss``, over how long the other took; below 1 is faster."""

    loss: float
    seconds: float
    gradients: float


def read_run(path: Path) -> Run:
    """One file. A last line that is cut off is left out; a broken line before it is an error."""
    header: dict[str, Any] | None = None
    points: list[Point] = []
    end = None
    for line in _lines(path):
        kind = line.get("kind")
        if kind == "run":
            header = line
        elif kind == "point":
            point = _point(line, path)
            # A run continued from a checkpoint repeats the steps since: the later account holds.
            while points and points[-1].step >= point.step:
                points.pop()
            points.append(point)
            end = None
        elif kind == "end":
            end = str(line.get("reason", ""))
    if header is None:
        raise ValueError(f'{path} has no line of kind "run": is it a record of a run? Move it out of the results.')
    known = {field.name for field in dataclasses.fields(Run)} - {"points", "end"}
    try:
        return Run(**{k: v for k, v in header.items() if k in known}, points=tuple(points), end=end)
    except TypeError as missing:
        raise ValueError(f"{path}: the header is incomplete ({missing}): record the run again.") from missing


def read_runs(results: Path) -> list[Run]:
    """All ``<problem>/<label>-seed<seed>.jsonl`` of a folder, by problem, label and seed.

    Files in which no line is complete yet are passed over.
    """
    if not results.is_dir():
        raise ValueError(f"{results} is not a folder: name the one that runs were recorded in.")
    # One level down only: trials for tuning lie deeper, and are no results.
    runs = [read_run(path) for path in sorted(results.glob("*/*-seed*.jsonl")) if _lines(path)]
    return sorted(runs, key=lambda run: (run.problem, run.label, run.seed))


def by_label(runs: Iterable[Run], problem: str) -> dict[str, list[Run]]:
    """The runs on one problem by label, those of ``LABELS`` first and in its order; every list by seed."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.problem == problem and run.points:
            found.setdefault(run.label, []).append(run)
    order = list(LABELS)
    labels = sorted(found, key=lambda label: (order.index(label) if label in LABELS else len(order), label))
    return {label: sorted(found[label], key=lambda run: run.seed) for label in labels}


def best_held_out(run: Run) -> Point | None:
    """Where early stopping would have stopped: the lowest held-out error; ties go to the lower held-out loss."""
    valid = [p for p in run.points if math.isfinite(p.held_out_error)]

    def key(p: Point) -> tuple[float, float]:
        return p.held_out_error, p.held_out_loss if math.isfinite(p.held_out_loss) else math.inf

    return min(valid, key=key, default=None)


def final(run: Run) -> Point | None:
    """The last point, whatever it holds."""
    return run.points[-1] if run.points else None


def lowest(run: Run, axis: Axis = "seconds", until: float = math.inf) -> float:
    """The lowest training loss at any point up to then; NaN if none was finite."""
    return min((p.loss for p in run.points if math.isfinite(p.loss) and getattr(p, axis) <= until), default=math.nan)


def time_to(run: Run, loss: float, axis: Axis = "seconds") -> float | None:
    """When the running minimum of the training loss first came down to ``loss``; None if it never did.

    Linear between points. Points without a finite loss are passed over.
    """
    before: tuple[float, float] | None = None  # time, running minimum
    for p in run.points:
        if not math.isfinite(p.loss):
            continue
        time: float = getattr(p, axis)
        if p.loss <= loss:
            if before is None:
                return time
            share = (before[1] - loss) / (before[1] - p.loss)
            return before[0] + share * (time - before[0])
        before = time, p.loss if before is None else min(before[1], p.loss)
    return None


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


def _lines(path: Path) -> list[dict[str, Any]]:
    raw = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found: list[dict[str, Any]] = []
    for number, text in enumerate(raw, 1):
        if not text.strip():
            continue
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError as error:
            if number < len(raw):
                raise ValueError(
                    f"{path}, line {number}, is not JSON ({error}): remove the run and repeat it."
                ) from error
    return found


def _point(line: Mapping[str, Any], path: Path) -> Point:
    names = ("seconds", "gradients", "loss", "error", "held_out_loss", "held_out_error")
    try:
        numbers = {name: math.nan if line[name] is None else float(line[name]) for name in names}
        return Point(step=int(line["step"]), **numbers, report=line.get("report"))
    except KeyError as missing:
        raise ValueError(
            f"{path}: the point at step {line.get('step')} lacks {missing}: record the run again."
        ) from None
