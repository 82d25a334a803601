"""Figures of the PINN study as PNG, one set for each budget and network. Nothing here trains.

Fits have files of their own, and so have the equations that nothing was chosen on.
error: relative L2 error over CPU seconds. fields: solutions, and how far ours and the best rival's are off.
held-out: the loss on other collocation points over that on those trained on.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.figures import save
from experiments.pinn.fits import FITS
from experiments.pinn.problems import PROBLEMS
from experiments.pinn.records import Group, Run, compared, only, read_groups
from experiments.pinn.style import BASE, NAMES, looks
from experiments.pinn.unseen import UNSEEN
from experiments.style import RC, WIDTH, number_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as PlotAxis
    from matplotlib.figure import Figure

_COLUMNS = 3
_SMALLER: Any = {"axes.titlesize": 9, "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8}


def figures(results: Path, out: Path, columns: Sequence[str] = ()) -> list[Path]:
    """Draw all, for the columns named or all methods; returns the files.

    They are ``pinn-<kind>-<network>-<seconds>s``, or ``pinn-unseen-…`` and ``pinn-fits-…``.
    """
    import matplotlib as mpl

    groups = compared(read_groups(results, (*PROBLEMS, *UNSEEN, *FITS), list(NAMES), columns))
    kinds = {"pinn": PROBLEMS, "pinn-unseen": UNSEEN, "pinn-fits": FITS}
    parts = [(stem, only(group, names)) for stem, names in kinds.items() for group in groups]
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context({**RC, **_SMALLER}):
        for stem, group in parts:
            for kind, draw in (("error", _error), ("fields", _fields), ("held-out", _held_out)):
                if group is not None:
                    paths += save(draw(group), out / f"{stem}-{kind}-{group.network}-{group.seconds:g}s")
    return paths


def medians(runs: Sequence[Run]) -> tuple[list[float], list[float]]:
    """Times at which a run was evaluated, and the median error over runs there.

    Until its next point, and after its end, a run has the error of its last finite point, as in tables. The times
    begin where all runs that have points after their start have one.
    """
    curves = [[(p.seconds, p.error) for p in run.points if p.finite] for run in runs]
    began = max(min((t for t, _ in curve if t > 0), default=0.0) for curve in curves)
    times = sorted({t for curve in curves for t, _ in curve if t >= began and t > 0})
    rows = [[curve[bisect.bisect_right(curve, (t, math.inf)) - 1][1] for curve in curves] for t in times]
    return times, [statistics.median(row) for row in rows]


def _error(group: Group) -> Figure | None:
    drawn, axes = _panels(list(group.runs), 1.95)
    styles = looks(list(group.columns))
    for axis, (name, by) in zip(axes, group.runs.items(), strict=True):
        shown: list[float] = []
        for number, (column, runs) in enumerate(by.items()):
            times, middle = medians(runs)
            if not times:
                continue
            shown += middle
            look = {**styles[column].arguments(), **_weight(column)}
            for run in runs if len(runs) > 1 else ():
                some = [(p.seconds, p.error) for p in run.points if p.finite and p.seconds > 0]
                axis.plot(*zip(*some, strict=True), color=look["color"], linewidth=0.5, alpha=0.4)
            # Markers stand at different places on each line, so that lines on top of each other can be told apart.
            axis.plot(times, middle, markevery=(0.02 + 0.03 * number, 0.33), **look)
        axis.set(title=name, xscale="log", yscale="log")
        if shown and min(shown) > 0:
            low, high = min(shown), max(shown)
            if high < 3 * low:  # where nothing happens, little differences are not to fill the panel
                low, high = low / 2, high * 2
                axis.set_ylim(low, high)
            _ticks(axis.yaxis, low, high)
        _ticks(axis.xaxis, 1.0, max(group.seconds, 2.0))
    for axis in axes[:: min(_COLUMNS, len(axes))]:
        axis.set_ylabel("relative L2 error")
    _below(axes, "CPU seconds")
    _legend(drawn, group)
    drawn.suptitle(_title("Error over time", group), fontsize=10)
    return drawn


def _held_out(group: Group) -> Figure | None:
    """Every seed's path, with a marker where it ended; on the diagonal both losses are equal."""
    drawn, axes = _panels(list(group.runs), 1.95)
    styles = looks(list(group.columns))
    for axis, (name, by) in zip(axes, group.runs.items(), strict=True):
        values: list[float] = []
        for column, runs in by.items():
            look = {**styles[column].arguments(), **_weight(column)}
            for run in runs:
                some = [(p.loss, p.held_out) for p in run.points if p.finite and min(p.loss, p.held_out) > 0]
                if not some:
                    continue
                values += [value for pair in some for value in pair]
                axis.plot(*zip(*some, strict=True), **{**look, "linewidth": 0.8, "marker": ""}, alpha=0.6)
                axis.plot(*some[-1], **{**look, "linestyle": "none"})
        axis.set(title=name, xscale="log", yscale="log")
        if values:
            ends = [min(values), max(values)]
            axis.plot(ends, ends, color="#999999", linewidth=0.8, zorder=0)
            _ticks(axis.yaxis, *ends)
            _ticks(axis.xaxis, *ends)
    for axis in axes[:: min(_COLUMNS, len(axes))]:
        axis.set_ylabel("held-out loss")
    _below(axes, "training loss")
    _legend(drawn, group)
    drawn.suptitle(_title("Loss on other points over loss on the points trained on", group), fontsize=10)
    return drawn


def _fields(group: Group) -> Figure | None:
    """A row for every problem whose solution by our method and by a rival were kept."""
    rows = {name: pair for name, by in group.runs.items() if (pair := _pair(by)) is not None}
    if not rows:
        return None
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(WIDTH, 0.5 + 1.6 * len(rows)), layout="constrained")
    axes = drawn.subplots(len(rows), 3, squeeze=False)
    for line, (name, (ours, rival)) in zip(axes, rows.items(), strict=True):
        kept = [np.load(run.fields) for run in (ours, rival)]
        exact, off = kept[0]["exact"], [abs(each["error"]) for each in kept]
        # One scale for both errors, over the decades that have most of them: zeros of the error would take many more.
        top = max(float(each.max()) for each in off) or 1.0
        low = min(max(min(float(np.quantile(each, 0.05)) for each in off), 1e-8 * top), 1e-2 * top)
        scale = LogNorm(low, top)
        bound = float(abs(exact).max())
        titles = [f"{name}: u*", *(f"|u − u*|, {NAMES.get(run.column, run.column)}" for run in (ours, rival))]
        pictures = [(exact, {"cmap": "RdBu_r", "vmin": -bound, "vmax": bound})]
        pictures += [(np.clip(each, low, None), {"cmap": "viridis", "norm": scale}) for each in off]
        first, second = kept[0]["first"], kept[0]["second"]
        extent = (first[0], first[-1], second[0], second[-1])
        for axis, title, (field, look) in zip(line, titles, pictures, strict=True):
            image = axis.imshow(field.T, origin="lower", extent=extent, aspect="auto", interpolation="nearest", **look)
            axis.set_title(title)
            axis.grid(visible=False)
            axis.set_xlabel(str(kept[0]["names"][0]), labelpad=1)
            if axis is not line[1]:
                drawn.colorbar(image, ax=line[0] if axis is line[0] else list(line[1:]), pad=0.02)
        line[0].set_ylabel(str(kept[0]["names"][1]))
    drawn.suptitle(_title("Solutions of seed 0, and the errors of ours and of the best rival", group), fontsize=10)
    return drawn


def _pair(by: Mapping[str, Sequence[Run]]) -> tuple[Run, Run] | None:
    """Our run and the rival's with the lowest error, of those whose solutions were kept."""
    kept = [run for runs in by.values() for run in runs if run.fields.exists()]
    ours = [run for run in kept if run.column == BASE]
    rivals = [run for run in kept if not run.method.startswith("ksd")]
    return (ours[0], min(rivals, key=lambda run: run.final.error)) if ours and rivals else None


def _panels(names: Sequence[str], height: float) -> tuple[Figure, list[Axes]]:
    """A panel for every name, in rows of a few."""
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    drawn = Figure(figsize=(WIDTH, 1.2 + height * rows), layout="constrained")
    axes = list(drawn.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[len(names) :]:
        unused.remove()
    return drawn, axes[: len(names)]


def _ticks(axis: PlotAxis, low: float, high: float) -> None:
    """As in other figures, but few of them, since panels are narrow."""
    from matplotlib.ticker import LogLocator

    number_ticks(axis, low, high)
    if high / low > 1e3:
        axis.set_major_locator(LogLocator(numticks=5))


def _below(axes: Sequence[Axes], text: str) -> None:
    """Under the lowest panel of every column."""
    for axis in axes[-min(_COLUMNS, len(axes)) :]:
        axis.set_xlabel(text)


def _weight(column: str) -> dict[str, Any]:
    """Ours in front and thicker: it is what the others are compared with."""
    return {"linewidth": 2.0, "zorder": 4, "markersize": 4.5} if column == BASE else {"linewidth": 1.1, "markersize": 3}


def _legend(drawn: Figure, group: Group) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], label=NAMES.get(column, column), **{**look.arguments(), **_weight(column)})
        for column, look in looks(list(group.columns)).items()
    ]
    drawn.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), frameon=False, handlelength=3)


def _title(text: str, group: Group) -> str:
    counts = {len(runs) for by in group.runs.values() for runs in by.values()}
    most = f"up to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
    seeds = f"median of {most} seeds" if max(counts) > 1 and text.startswith("Error") else ""
    return f"{text}: {', '.join(part for part in (f'network {group.network}, {group.seconds:g} s', seeds) if part)}"
