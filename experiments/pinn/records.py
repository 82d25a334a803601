"""Runs of the PINN study by network and budget, and what tables and figures ask of them. Nothing here trains.

A run is one file, ``<results>/pinn/<problem>/<network>/<label>-seed<seed>.jsonl``, or a line of the packed file
``<results>/pinn/<network>.jsonl``. Files are written when a run has ended, so there are no half ones.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.budget import Budget
from experiments.common.records import Quantity, Run, ordered
from experiments.common.records import read_runs as read_all
from experiments.pinn.style import BASE

FOLDER = "pinn"

#: In that folder: runs that were not made side by side with the others, so that tables and figures leave them out.
LEFT_OUT = "left_out.json"

#: Methods whose steps go by the budget: what they had on the way to a longer one is not what a shorter one ends with.
_SCHEDULED = ("soap",)

#: Runs are evaluated at these seconds too, so that those of longer budgets can be read there.
MARKS = (15.0, 60.0, 300.0, 900.0)

#: A point so much later than it was due, in parts of that time, is taken as if it were in time: a step may be long.
BEYOND = 1.05


def column(run: Run) -> str:
    """The label without the budget, which is what runs of several problems and seeds have in common."""
    return run.label.removesuffix(f"-{run.seconds:g}s")


def fields(run: Run) -> Path:
    """Where the solution is, if it was kept."""
    return run.path.with_suffix(".npz")


def until(run: Run, seconds: float) -> Run | None:
    """What a run would have been with a shorter budget; None if that is not known."""
    if run.method in _SCHEDULED:
        return None
    label = f"{column(run)}-{seconds:g}s"
    # Where that run would be; how the solution looked then was not kept.
    path = run.path.with_name(f"{label}-seed{run.seed}.jsonl")
    shorter = dataclasses.replace(run, label=label, budget=str(Budget(seconds, "seconds")), path=path)
    if run.spent <= seconds:
        return shorter
    count = 1 + sum(point.seconds < seconds for point in run.points)
    if count > len(run.points) or run.points[count - 1].seconds > BEYOND * seconds:
        return None
    points = run.points[:count]
    return dataclasses.replace(shorter, points=points, end="budget", spent=points[-1].seconds)


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that can be compared: one network, one budget.

    Attributes:
        columns: the labels without their budget, in order.
        runs: problem → column → runs by seed.
    """

    network: str
    seconds: float
    columns: Sequence[str]
    runs: Mapping[str, Mapping[str, Sequence[Run]]]


def only(group: Group, wanted: Container[str]) -> Group | None:
    """The problems whose names are wanted, and the columns that have any of them; None if there is none."""
    runs = {problem: by for problem, by in group.runs.items() if problem in wanted}
    columns = [name for name in group.columns if any(name in by for by in runs.values())]
    return dataclasses.replace(group, columns=columns, runs=runs) if runs else None


def compared(groups: Sequence[Group]) -> list[Group]:
    """Those in which the base, which may be there for its ablations, is not alone; all where it is in each."""
    return [group for group in groups if list(group.columns) != [BASE]] or list(groups)


def read_runs(results: Path) -> list[Run]:
    """All runs of a folder that holds ``pinn``, packed or not.

    Raises:
        ValueError: a file there is not the whole record of a run.
    """
    runs = read_all(results / FOLDER, "*/*") if (results / FOLDER).is_dir() else []
    half = [run.path for run in runs if run.end is None]
    if half:
        raise ValueError(f"{half[0]} is no record of a run (it has no end): remove it and repeat the run.")
    return runs


def read_groups(
    results: Path,
    problems: Sequence[str],
    methods: Sequence[str],
    columns: Sequence[str] = (),
    *,
    required: bool = True,
) -> list[Group]:
    """All runs of a folder, by network and budget; smaller budgets first.

    Where a method has runs of a budget, but not of all problems and seeds, longer runs of it stand in for those.

    Args:
        results: the folder that holds ``pinn``.
        problems: their order; others follow.
        methods: their order; of runs under other labels than the methods' own only those in ``columns`` are taken.
        columns: only these, and in this order; unless given all methods, without the runs listed in ``LEFT_OUT``.
        required: whether there must be any.

    Raises:
        ValueError: there are no such runs.
    """
    found: dict[tuple[str, float], dict[str, dict[str, list[Run]]]] = {}
    left_out = [] if columns else _left_out(results)
    for run in read_runs(results):
        if any(all(getattr(run, name) in values for name, values in some.items()) for some in left_out):
            continue
        if column(run) in columns or (not columns and column(run) == run.method):
            by = found.setdefault((run.network, run.seconds), {}).setdefault(run.problem, {})
            by.setdefault(column(run), []).append(run)
    if not found and required:
        wanted = f" of {', '.join(columns)}" if columns else ""
        raise ValueError(
            f"There are no runs{wanted} in {results / FOLDER}: make them with "
            f"`python -m experiments pinn study --results {results}`."
        )
    order = columns or methods
    _fill(found)
    by_budget = sorted(found, key=lambda key: (key[1], key[0]))
    return [_group(*key, found[key], problems, order) for key in by_budget]


def _left_out(results: Path) -> list[dict[str, Any]]:
    """Return what runs are left out: fields of a run, and their values; "why" is for readers of the file."""
    path = results / FOLDER / LEFT_OUT
    listed = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    return [{name: values for name, values in some.items() if name != "why"} for some in listed]


def _fill(found: Mapping[tuple[str, float], dict[str, dict[str, list[Run]]]]) -> None:
    """Add what longer runs were at the budgets of shorter ones, where these are missing."""
    for network, seconds in (key for key in found if key[1] in MARKS):
        here = found[network, seconds]
        known = [run for by in here.values() for runs in by.values() for run in runs]
        methods = {run.method for run in known if column(run) == run.method}
        longer = sorted(key for key in found if key[0] == network and key[1] > seconds)
        for run in [run for key in longer for by in found[key].values() for runs in by.values() for run in runs]:
            alike = here.get(run.problem, {}).get(column(run), [])
            missing = column(run) in methods and all(other.seed != run.seed for other in alike)
            if missing and (shorter := until(run, seconds)) is not None:
                here.setdefault(run.problem, {}).setdefault(column(run), []).append(shorter)


def geometric_mean(values: Iterable[float]) -> float:
    """NaN if there are none, or one is not finite; zero if one is zero."""
    known = list(values)
    if not known or not all(map(math.isfinite, known)):
        return math.nan
    return math.exp(statistics.fmean(map(math.log, known))) if min(known) > 0 else 0.0


def middle(runs: Sequence[Run], quantity: Quantity = "error") -> float:
    """The median over seeds of what runs ended with."""
    return statistics.median(float(getattr(run.final, quantity)) for run in runs)


def _group(
    network: str,
    seconds: float,
    found: Mapping[str, Mapping[str, Sequence[Run]]],
    problems: Sequence[str],
    columns: Sequence[str],
) -> Group:
    present = ordered((name for by in found.values() for name in by), columns)
    runs = {
        problem: {
            name: sorted(found[problem][name], key=lambda run: run.seed) for name in present if name in found[problem]
        }
        for problem in ordered(found, problems)
    }
    return Group(network, seconds, present, runs)
