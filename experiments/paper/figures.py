"""Figures of recorded runs as PNG: the same runs give the same file. Nothing here trains.

paper and convergence: training loss over CPU seconds. hours: held-out error of the long runs. anatomy-all: what the
time of a step goes into. ritz-curves: the Ritz values of the steps of KSD.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.figures import Panel, draw, multiples, panels
from experiments.common.records import Run, ordered, read_runs
from experiments.common.series import Series, series
from experiments.common.style import SIZE, TITLES
from experiments.paper import published as paper
from experiments.paper.plan import LONG, LONG_RUNS
from experiments.paper.records import by_label, of_row
from experiments.paper.style import LABELS, LINES, LONG_LINES, PHASES
from krylov_descent.plot.style import theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Four rows of the paper's Table 2, for the first page.
_FOUR = ("curves", "mnist-class", "spoken-digits", "starcraft")

# Of Ritz values: the problem, steps that are drawn at most, and the smallest beside the largest: below is rounding.
_RITZ = "curves"
_STEPS = 60
_SMALLEST = 1e-12

# Of the long runs: errors above so many times the paper's are cut off.
_ABOVE = 8.0

_Rows = Mapping[str, Mapping[str, Sequence[Run]]]  # problem → label → runs


def figures(results: Path, out: Path) -> list[Path]:
    """Draw ``paper`` and ``hours``, light and dark, ``convergence``, ``anatomy-all`` and ``ritz-curves``.

    A figure whose runs are missing is left out; so are runs of another budget than the row's, as in tables.

    Raises:
        ValueError: there is no run.
    """
    runs = read_runs(results)
    found = {run.problem for run in runs if run.points}
    if not found:
        raise ValueError(
            f"There are no runs in {results}: make one with `python -m experiments run curves --optimizer ksd "
            f"--results {results}`."
        )
    every = {name: by_label(runs, name) for name in ordered(found, list(paper.PROBLEMS))}
    rows = {name: of_row(by) for name, by in every.items()}
    return [
        *draw(functools.partial(_losses, rows, _FOUR, 2), out / "paper", dark=True),
        *draw(functools.partial(_hours, every), out / "hours", dark=True),
        *draw(functools.partial(_losses, rows, list(rows), 3), out / "convergence"),
        *draw(functools.partial(_anatomy, rows), out / "anatomy-all"),
        *draw(functools.partial(_ritz, rows.get(_RITZ, {})), out / f"ritz-{_RITZ}"),
    ]


def _losses(rows: _Rows, problems: Sequence[str], columns: int) -> Figure | None:
    shown = [_panel(name, rows[name]) for name in problems if name in rows]
    return multiples(shown, LINES, "training loss", columns=columns)


def _panel(name: str, by: Mapping[str, Sequence[Run]]) -> Panel:
    """What is worse than before training is cut off."""
    found = {label: series(by[label], "seconds", "loss") for label in LINES if label in by}
    starts = [run.points[0].loss for several in by.values() for run in several]
    start = max((value for value in starts if math.isfinite(value)), default=math.inf)
    return Panel(name, {label: curve for label, curve in found.items() if curve is not None}, start=start)


def _hours(every: _Rows) -> Figure | None:
    """Held-out error over time of the long runs and of Adam, beside the paper's error."""
    shown = [_towards(name, every[name]) for name in LONG if name in every and every[name].keys() & LONG_RUNS.keys()]
    return multiples(shown, LONG_LINES, "held-out error", time="CPU minutes")


def _towards(name: str, by: Mapping[str, Sequence[Run]]) -> Panel:
    """What is far above the paper's error is cut off."""
    row = paper.row(name)
    assert row is not None
    target = float(row.ksd_cv)
    found = {label: series(by[label], "seconds", "held_out_error") for label in LONG_LINES if label in by}
    curves = {
        label: dataclasses.replace(curve, times=tuple(time / 60 for time in curve.times))
        for label, curve in found.items()
        if curve is not None
    }
    times = sorted({time for curve in curves.values() for time in curve.times})
    level = (target,) * len(times)
    return Panel(name, {**curves, "target": Series(tuple(times), level, level, level)}, start=_ABOVE * target)


def _clock(runs: Iterable[Run]) -> str:
    """Clock and threads in brackets, where all runs agree on them."""
    kinds = {(run.clock, run.threads) for run in runs}
    if len(kinds) != 1:
        return ""
    clock, threads = kinds.pop()
    return f" ({clock.replace('cpu', 'CPU')}, {threads} thread{'s' if threads > 1 else ''})"


def _anatomy(rows: _Rows) -> Figure | None:
    """A bar of shares for every problem and method, and the seconds of a step beside it.

    Reports have the wall's seconds, which other work on the machine makes longer: of them only shares are shown. What
    a step takes is told by the run's own clock.
    """
    found = {(name, label): by[label] for name, by in rows.items() for label in ("ksd", "hf") if label in by}
    bars = {key: parts for key, runs in found.items() if sum(parts := _phases(runs)) > 0}
    if not bars:
        return None
    drawn, (axis,) = panels(1, 1, 1.7 + 0.36 * len(bars))
    look, names = theme(), list(dict.fromkeys(name for name, _ in bars))
    places = [-i - 0.5 * names.index(name) for i, (name, _) in enumerate(bars)]  # half a bar between problems
    starts = [0.0] * len(bars)
    for number, phase in enumerate(PHASES):
        shares = [100 * parts[number] / sum(parts) for parts in bars.values()]
        colours = {"color": getattr(look, phase.colour), "edgecolor": look.background}
        axis.barh(places, shares, 0.9, starts, label=phase.name, **colours)
        for place, share, start in zip(places, shares, starts, strict=True):
            if share >= 6:
                inside: dict[str, Any] = {
                    "ha": "center",
                    "va": "center",
                    "fontsize": SIZE - 2,
                    "color": look.background,
                }
                axis.text(start + share / 2, place, f"{share:.0f}", **inside)
        starts = [start + share for start, share in zip(starts, shares, strict=True)]
    for place, key in zip(places, bars, strict=True):
        axis.text(101, place, f"{_seconds_a_step(found[key]):.2g} s", va="center", fontsize=SIZE - 1)
    axis.set_yticks(places, [f"{TITLES.get(name, name)}: {LABELS[label]}" for name, label in bars])
    clock = _clock(run for key in bars for run in found[key])
    axis.set_xlabel(f"share of the wall time of a step, %\nat the right: mean seconds of a step{clock}")
    axis.set(xlim=(0, 112), xticks=range(0, 101, 20))
    axis.spines["bottom"].set_bounds(0, 100)
    axis.margins(y=0.02)
    axis.grid(visible=False, axis="y")
    drawn.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(PHASES), columnspacing=1)
    return drawn


def _seconds_a_step(runs: Sequence[Run]) -> float:
    """On the runs' own clock, over all steps from their first points to their last."""
    steps = sum(run.points[-1].step - run.points[0].step for run in runs)
    return sum(run.points[-1].seconds - run.points[0].seconds for run in runs) / steps if steps else math.nan


def _phases(runs: Sequence[Run]) -> list[float]:
    """Mean wall seconds of a step in each of ``PHASES``, over the steps that were reported."""
    reports = [p.report["seconds"] for run in runs for p in run.points if p.report and p.report.get("seconds")]
    if not reports:
        return []
    return [
        statistics.fmean(sum(seconds.get(key) or 0.0 for key in phase.keys) for seconds in reports) for phase in PHASES
    ]


def _ritz(by: Mapping[str, Sequence[Run]]) -> Figure | None:
    """The Ritz values of reported steps of the first seed; negative ones by their size, in another colour."""
    shown = {}
    for label in ("ksd", "ksd-hessian"):
        reports = [(p.step, p.report) for p in by[label][0].points if p.report] if label in by else []
        thinned = reports[:: math.ceil(len(reports) / _STEPS)] if reports else []
        dots = [(step, v) for step, report in thinned for v in report.get("ritz_values", ()) if v]
        if dots:
            shown[label] = dots
    if not shown:
        return None
    drawn, axes = panels(len(shown), len(shown), 3.8, sharey=True)
    look = theme()
    top = max(abs(v) for dots in shown.values() for _, v in dots)
    looks = ((1, "positive", look.blue, "o", 3.0), (-1, "negative, by its size", look.orange, "x", 5.0))
    for axis, (label, dots) in zip(axes, shown.items(), strict=True):
        for sign, word, colour, marker, size in looks:
            some = [(step, abs(v)) for step, v in dots if v * sign > 0 and abs(v) > _SMALLEST * top]
            if some:
                steps, sizes = zip(*some, strict=True)
                axis.plot(steps, sizes, marker, color=colour, markersize=size, label=word)
        axis.set_yscale("log")
        matrix = "Hessian" if label == "ksd-hessian" else "Gauss–Newton matrix"
        axis.set(xlabel="step", title=matrix)
    axes[0].set_ylabel("Ritz value")
    handles = {word: handle for axis in axes for handle, word in zip(*axis.get_legend_handles_labels(), strict=True)}
    if len(handles) > 1:
        drawn.legend([*handles.values()], [*handles], loc="outside lower center", ncols=2, markerscale=2)
    return drawn
