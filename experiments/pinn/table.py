"""Tables of the PINN study as Markdown, one set for each budget and network. Nothing here trains.

Equations that nothing was chosen on have tables of their own. So have fits, and no mean: an image, a table of samples
and an operator have no error in common.
Figures are those at the end of runs, medians over seeds. A run that diverged counts with its last finite point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.common.markdown import bold, section
from experiments.common.records import Run
from experiments.common.table import NONE, all_settings, lowest, marks, seeds
from experiments.pinn.ablations import CHANGES
from experiments.pinn.fits import FITS, IMAGES, decibels
from experiments.pinn.problems import PROBLEMS
from experiments.pinn.records import BEYOND, Group, compared, geometric_mean, middle, only, read_groups
from experiments.pinn.style import BASE, NAMES
from experiments.pinn.unseen import UNSEEN


def table(results: Path, columns: Sequence[str] = ()) -> str:
    """All tables of a folder; only the columns named, or all methods."""
    groups = compared(read_groups(results, (*PROBLEMS, *UNSEEN, *FITS), list(NAMES), columns))
    parts = [part for group in groups if (some := only(group, PROBLEMS)) for part in _tables(some)]
    if not columns:
        parts += _changes(results)
    unseen = " on equations that nothing was chosen on"
    parts += [part for group in groups if (some := only(group, UNSEEN)) for part in _tables(some, unseen)]
    parts += [part for group in groups if (some := only(group, FITS)) for part in _fit_tables(some)]
    return "\n".join(parts)


def short(value: float) -> str:
    """Two digits in as few letters as a narrow column needs."""
    if not math.isfinite(value):
        return "not finite"
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"


def _tables(group: Group, on: str = "") -> list[str]:
    where = f"{on} after {group.seconds:g} s, network {group.network}".strip()
    losses = (
        "Medians over seeds of the loss on the collocation points that are trained on, and on others; bold: the lowest "
        "of each. Where the first is far below the second, the points are fitted, and not the equation."
    )
    return [
        _errors(group, where),
        *_ranges(group, where),
        *_course(group, on),
        _losses(group, where, losses),
        _setup(group, where),
    ]


def _fit_tables(group: Group) -> list[str]:
    where = f"on fits after {group.seconds:g} s, network {group.network}"
    medians = _medians(group)
    errors = (
        "Median over seeds of the relative L2 error, of an image on a grid twice as fine, of a regression on samples "
        "without noise that were not trained on, of a DeepONet on such functions; bold: the lowest of the row. "
        "Networks of the regressions are half as wide as their name says, and of a DeepONet there are two."
    )
    losses = (
        "Medians over seeds of the mean square on the samples that are trained on, and on others, whose targets have "
        "noise where those have; bold: the lowest of each. Where the first is far below the second, the samples are "
        "fitted, and not what they were drawn from."
    )
    return [
        section(f"Relative L2 error {where}", ["problem", *_heads(group)], _error_rows(group, medians), errors),
        *_noise(group, where),
        *_ranges(group, where),
        _losses(group, where, losses),
        _setup(group, where),
    ]


def _noise(group: Group, where: str) -> list[str]:
    """Of the images, if there are any."""
    rows = [
        [name, *(f"{decibels(name, by[column]):.1f}" if column in by else NONE for column in group.columns)]
        for name, by in _medians(group).items()
        if name in IMAGES
    ]
    note = "That of the errors above, for values from −1 to 1. The finer grid has places that no pixel shows."
    title = f"Peak signal-to-noise ratio in dB {where}"
    return [section(title, ["problem", *_heads(group)], rows, note)] if rows else []


def _medians(group: Group) -> dict[str, dict[str, float]]:
    return {name: {column: middle(runs) for column, runs in by.items()} for name, by in group.runs.items()}


def _error_rows(group: Group, medians: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    rows = []
    for name, by in group.runs.items():
        best = lowest(medians[name])
        cells = [
            bold(short(medians[name][column]), column == best) + marks(by[column]) if column in by else NONE
            for column in group.columns
        ]
        rows.append([name, *cells])
    return rows


def _errors(group: Group, where: str) -> str:
    medians = _medians(group)
    rows = _error_rows(group, medians)
    rows.append(["geometric mean", *_means(group, medians)])
    if BASE in group.columns:
        rows.append([f"ratio to {NAMES[BASE]}", *(_ratio(group.runs, column) for column in group.columns)])
    note = (
        "Median over seeds of the relative L2 error on the test grid; bold: the lowest of the row. A method that lacks "
        "problems has the mean of those it has, with their number. The ratio is the geometric mean over the problems, "
        f"of medians over the seeds that both the method and {NAMES[BASE]} have; above 1, {NAMES[BASE]} is better."
    )
    return section(f"Relative L2 error {where}", ["problem", *_heads(group)], rows, note)


def _changes(results: Path) -> list[str]:
    """Of the Gauss–Newton flow changed in one thing, beside it as it is, on the seeds that were run so."""
    groups = read_groups(results, tuple(PROBLEMS), [], (BASE, *CHANGES), required=False)
    return [_changed(group) for group in groups if set(group.columns) - {BASE}]


def _changed(group: Group) -> str:
    changed = [run for by in group.runs.values() for name, runs in by.items() if name != BASE for run in runs]
    tried = {run.seed for run in changed}
    medians = {
        problem: {
            column: middle(same) for column, runs in by.items() if (same := [run for run in runs if run.seed in tried])
        }
        for problem, by in group.runs.items()
    }
    rows = []
    for column in group.columns:
        cells = [short(by[column]) if column in by else NONE for by in medians.values()]
        rows.append([NAMES.get(column, column), *cells, _ratio(group.runs, column)])
    note = (
        "Median over seeds of the relative L2 error on the test grid. Ratio: the geometric mean over the problems, of "
        f"errors with the change to those without; above 1 it does harm. Seeds: {seeds(changed)}."
    )
    title = f"{NAMES[BASE]}, changed in one thing: relative L2 error after {group.seconds:g} s, network {group.network}"
    return section(title, ["change", *medians, "ratio"], rows, note)


def _means(group: Group, medians: Mapping[str, Mapping[str, float]]) -> list[str]:
    have = {column: [by[column] for by in medians.values() if column in by] for column in group.columns}
    means = {column: geometric_mean(values) for column, values in have.items()}
    # Over other problems than the others' a mean cannot be the best.
    best = lowest({column: mean for column, mean in means.items() if len(have[column]) == len(medians)})
    return [
        bold(short(means[column]), column == best)
        + (f" ({len(values)} of {len(medians)})" if len(values) < len(medians) else "")
        for column, values in have.items()
    ]


def _ratio(runs: Mapping[str, Mapping[str, Sequence[Run]]], column: str) -> str:
    """Of medians over the seeds that both have: runs of one seed were made in turn, on an equally fast machine."""
    pairs = []
    for by in runs.values():
        both = {run.seed for run in by.get(column, ())} & {run.seed for run in by.get(BASE, ())}
        if both:
            pairs.append([middle([run for run in by[name] if run.seed in both]) for name in (column, BASE)])
    ratio = geometric_mean(mine / base if base else math.nan for mine, base in pairs)
    return f"{ratio:.3g}" if math.isfinite(ratio) else NONE


def _ranges(group: Group, where: str) -> list[str]:
    """If there are several seeds."""
    if all(len(runs) == 1 for by in group.runs.values() for runs in by.values()):
        return []
    rows = []
    for name, by in group.runs.items():
        ends = {column: [run.final.error for run in runs] for column, runs in by.items()}
        cells = [
            f"{short(min(ends[column]))} – {short(max(ends[column]))}" if column in ends else NONE
            for column in group.columns
        ]
        rows.append([name, *cells])
    return [section(f"Lowest and highest error {where}", ["problem", *_heads(group)], rows, "Over seeds.")]


def _course(group: Group, on: str) -> list[str]:
    """How the lead changes with time: ratios as in the table of errors, at the points before these seconds."""
    if BASE not in group.columns or len(group.columns) < 2:
        return []
    times = [group.seconds / 2**k for k in range(4, -1, -1)]
    by_time = [
        {
            name: {column: [_until(run, time) for run in runs] for column, runs in by.items()}
            for name, by in group.runs.items()
        }
        for time in times
    ]
    others = [column for column in group.columns if column != BASE]
    rows = [[NAMES.get(column, column), *(_ratio(then, column) for then in by_time)] for column in others]
    note = f"As the last line of the table above, after so many seconds. Above 1, {NAMES[BASE]} is more accurate."
    head = ["method", *(f"{time:g} s" for time in times)]
    title = f"Ratio to {NAMES[BASE]} over time{on}, network {group.network}, budget {group.seconds:g} s"
    return [section(title, head, rows, note)]


def _until(run: Run, seconds: float) -> Run:
    """As if it had ended then: with its last finite point that is not much later."""
    then = run.cut(BEYOND * seconds)
    return then if seconds < run.seconds and any(point.finite for point in then.points) else run


def _losses(group: Group, where: str, note: str) -> str:
    rows = []
    for name, by in group.runs.items():
        train = {column: middle(runs, "loss") for column, runs in by.items()}
        held_out = {column: middle(runs, "held_out_loss") for column, runs in by.items()}
        best = lowest(train), lowest(held_out)
        cells = [
            f"{bold(short(train[column]), column == best[0])} / {bold(short(held_out[column]), column == best[1])}"
            if column in by
            else NONE
            for column in group.columns
        ]
        rows.append([name, *cells])
    return section(f"Training loss / held-out loss {where}", ["problem", *_heads(group)], rows, note)


def _setup(group: Group, where: str) -> str:
    rows = []
    for column in group.columns:
        runs = [run for by in group.runs.values() for run in by.get(column, ())]
        steps = [run.final.step for run in runs]
        ends = [f"{count} {reason}" for reason in ("stopped", "diverged") if (count := _count(runs, reason))]
        rows.append(
            [
                NAMES.get(column, column),
                all_settings(runs),
                seeds(runs),
                str(len(runs)),
                f"{min(steps)} – {max(steps)}",
                f"{max(run.spent for run in runs):.1f}",
                ", ".join(ends) or NONE,
            ]
        )
    head = ["method", "settings", "seeds", "runs", "steps", "longest, s", "ended before"]
    note = (
        "CPU seconds of one thread; a run ends with the first step at or beyond its budget. Steps are those of the "
        "loop: methods whose own are cheap do several in one. Stopped: the method could make no progress any more. "
        "Settings that are not listed are the method's own. Where a longer run of a method stands in for one of this "
        "budget, it is read at the first point at or beyond it."
    )
    return section(f"What was run {where}", head, rows, note)


def _heads(group: Group) -> list[str]:
    return [NAMES.get(column, column) for column in group.columns]


def _count(runs: Sequence[Run], reason: str) -> int:
    return sum(run.end == reason for run in runs)
