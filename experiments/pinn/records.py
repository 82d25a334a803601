"""Runs of the PINN study as they were recorded, and what tables and figures ask of them. Nothing here trains.

A run is one file, ``<results>/pinn/<problem>/<network>/<label>-seed<seed>.jsonl``: a header, points, an end; or it is a
line of the packed file ``<results>/pinn/<network>.jsonl``. Files are written when a run has ended, so there are no half
ones. A number that was not finite is null there and NaN here.

n   number of parameters of the network
N   number of residuals, over all terms of the loss
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from experiments import packed
from experiments.pinn.style import BASE

FOLDER = "pinn"

#: Methods whose steps go by the budget: what they had on the way to a longer one is not what a shorter one ends with.
_SCHEDULED = ("soap",)

#: Runs are evaluated at these seconds too, so that those of longer budgets can be read there.
MARKS = (60.0, 300.0, 900.0)

#: A point so much later than it was due, in parts of that time, is taken as if it were in time: a step may be long.
BEYOND = 1.05
Quantity = Literal["loss", "held_out", "error"]


@dataclasses.dataclass(frozen=True)
class Point:
    """Where a run stood: CPU seconds and steps so far, evaluations not counted, and what they gave.

    Attributes:
        loss: on the collocation points that are trained on.
        held_out: the loss on others.
        error: relative L2 error of the solution on the test grid.
    """

    seconds: float
    steps: int
    loss: float
    held_out: float
    error: float

    @property
    def finite(self) -> bool:
        """Whether all that was evaluated is a number."""
        return all(map(math.isfinite, (self.loss, self.held_out, self.error)))


@dataclasses.dataclass(frozen=True)
class Run:
    """One method on one problem from one seed.

    Attributes:
        seconds: the budget.
        end: "budget", "stopped" (the method could make no progress any more) or "diverged".
        final: what counts as its result, the last finite point.
        spent: seconds until it ended, those of a last step that diverged included.
    """

    problem: str
    method: str
    label: str
    network: str
    seed: int
    seconds: float
    settings: Mapping[str, Any]
    points: tuple[Point, ...]
    end: str
    final: Point
    spent: float
    path: Path

    @property
    def column(self) -> str:
        """The label without the budget, which is what runs of several problems and seeds have in common."""
        return self.label.removesuffix(f"-{self.seconds:g}s")

    @property
    def fields(self) -> Path:
        """Where the solution is, if it was kept."""
        return self.path.with_suffix(".npz")

    def until(self, seconds: float) -> Run | None:
        """What it would have been with a shorter budget; None if that is not known."""
        if self.method in _SCHEDULED:
            return None
        label = f"{self.column}-{seconds:g}s"
        # Where that run would be; how the solution looked then was not kept.
        path = self.path.with_name(f"{label}-seed{self.seed}.jsonl")
        shorter = dataclasses.replace(self, label=label, seconds=seconds, path=path)
        if self.spent <= seconds:
            return shorter
        count = 1 + sum(point.seconds < seconds for point in self.points)
        if count > len(self.points) or self.points[count - 1].seconds > BEYOND * seconds:
            return None
        *_, final = points = self.points[:count]
        return dataclasses.replace(shorter, points=points, end="budget", final=final, spent=final.seconds)


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
    columns = [column for column in group.columns if any(column in by for by in runs.values())]
    return dataclasses.replace(group, columns=columns, runs=runs) if runs else None


def compared(groups: Sequence[Group]) -> list[Group]:
    """Those in which the base, which may be there for its ablations, is not alone; all where it is in each."""
    return [group for group in groups if list(group.columns) != [BASE]] or list(groups)


def path_of(results: Path, problem: str, network: str, label: str, seed: int) -> Path:
    """The file of a run."""
    return results / FOLDER / problem / network / f"{label}-seed{seed}.jsonl"


def read_run(path: Path) -> Run:
    """The run of one file.

    Raises:
        ValueError: it is not the whole record of a run.
    """
    return _run(packed.lines(path), path, path)


def read_runs(results: Path) -> list[Run]:
    """All runs of a folder that holds ``pinn``, packed or not, in the order of their own files.

    Raises:
        ValueError: a file there is not the whole record of a run.
    """
    folder = results / FOLDER
    found: dict[Path, Run] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for lines in packed.read(file):
            header = lines[0][1]
            path = path_of(results, *(header[key] for key in ("problem", "network", "label", "seed")))
            found[path] = _run(lines, file, path)
    found |= {path: read_run(path) for path in folder.glob("*/*/*-seed*.jsonl")}
    return [found[path] for path in sorted(found)]


def _run(lines: packed.Lines, file: Path, path: Path) -> Run:
    """The run of these lines, which stand in a file; ``path`` is that of the run by itself."""
    try:
        header, *points, end = (line for _, line in lines)
        if (header["kind"], end["kind"]) != ("run", "end"):
            raise ValueError('its first line is not of kind "run", or its last not of kind "end"')
        return Run(
            **{key: header[key] for key in ("problem", "method", "label", "network", "seed", "seconds", "settings")},
            points=tuple(map(_point, points)),
            end=end["reason"],
            final=_point(end),
            spent=end["spent"],
            path=path,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no record of a run ({error}): remove it and repeat the run.") from error


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
        columns: only these, and in this order; all methods unless given.
        required: whether there must be any.

    Raises:
        ValueError: there are no such runs.
    """
    found: dict[tuple[str, float], dict[str, dict[str, list[Run]]]] = {}
    for run in read_runs(results):
        if run.column in columns or (not columns and run.column == run.method):
            by = found.setdefault((run.network, run.seconds), {}).setdefault(run.problem, {})
            by.setdefault(run.column, []).append(run)
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


def _fill(found: Mapping[tuple[str, float], dict[str, dict[str, list[Run]]]]) -> None:
    """Add what longer runs were at the budgets of shorter ones, where these are missing."""
    for network, seconds in (key for key in found if key[1] in MARKS):
        here = found[network, seconds]
        known = [run for by in here.values() for runs in by.values() for run in runs]
        methods = {run.method for run in known if run.column == run.method}
        longer = sorted(key for key in found if key[0] == network and key[1] > seconds)
        for run in [run for key in longer for by in found[key].values() for runs in by.values() for run in runs]:
            alike = here.get(run.problem, {}).get(run.column, [])
            missing = run.column in methods and all(other.seed != run.seed for other in alike)
            if missing and (shorter := run.until(seconds)) is not None:
                here.setdefault(run.problem, {}).setdefault(run.column, []).append(shorter)


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
    ordered = _ordered((column for by in found.values() for column in by), columns)
    runs = {
        problem: {
            column: sorted(found[problem][column], key=lambda run: run.seed)
            for column in ordered
            if column in found[problem]
        }
        for problem in _ordered(found, problems)
    }
    return Group(network, seconds, ordered, runs)


def _ordered(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Those of the order first, in that order; the others by name."""
    return sorted(set(names), key=lambda name: (order.index(name) if name in order else len(order), name))


def _point(line: Mapping[str, Any]) -> Point:
    loss, held_out, error = (
        math.nan if line[key] is None else float(line[key]) for key in ("loss", "held_out", "error")
    )
    return Point(float(line["seconds"]), int(line["steps"]), loss, held_out, error)
