"""What the tables and figures of the paper's study ask of its runs: which compare, and who was how fast."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from experiments.common.budget import Budget
from experiments.common.records import OVER, Axis, Point, Run, ordered
from experiments.paper.style import LABELS


@dataclasses.dataclass(frozen=True)
class RelativeTime:
    """How long one run took to a training loss of ``loss``, over how long the other took; below 1 is faster."""

    loss: float
    seconds: float
    gradients: float


def by_label(runs: Iterable[Run], problem: str) -> dict[str, list[Run]]:
    """The runs on one problem by label, those of ``LABELS`` first and in its order; every list by seed."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.problem == problem and run.points:
            found.setdefault(run.label, []).append(run)
    return {label: sorted(found[label], key=lambda run: run.seed) for label in ordered(found, list(LABELS))}


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
    return run.cut(share * run.seconds)


def best_held_out(run: Run) -> Point | None:
    """Where early stopping would have stopped: the lowest held-out error; ties go to the lower held-out loss."""
    valid = [p for p in run.points if math.isfinite(p.held_out_error)]

    def key(p: Point) -> tuple[float, float]:
        return p.held_out_error, p.held_out_loss if math.isfinite(p.held_out_loss) else math.inf

    return min(valid, key=key, default=None)


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
