"""Figures of the PINN study as PNG, one set for each budget and network. Nothing here trains.

Fits have files of their own, and so have the equations that nothing was chosen on.
error: relative L2 error over CPU seconds. fields: solutions, and how far ours and the best rival's are off.
held-out: the loss on other collocation points over that on those trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.common.figures import label_panels, legend, panels, save, styled
from experiments.common.records import Run
from experiments.common.series import series
from experiments.common.style import number_ticks
from experiments.pinn.fits import FITS
from experiments.pinn.problems import PROBLEMS
from experiments.pinn.records import Group, column, compared, fields, only, read_groups
from experiments.pinn.style import BASE, NAMES, looks
from experiments.pinn.unseen import UNSEEN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis as PlotAxis
    from matplotlib.figure import Figure


def figures(results: Path, out: Path, columns: Sequence[str] = ()) -> list[Path]:
    """Draw all, for the columns named or all methods; returns the files.

    They are ``pinn-<kind>-<network>-<seconds>s``, or ``pinn-unseen-…`` and ``pinn-fits-…``.
    """
    groups = compared(read_groups(results, (*PROBLEMS, *UNSEEN, *FITS), list(NAMES), columns))
    kinds = {"pinn": PROBLEMS, "pinn-unseen": UNSEEN, "pinn-fits": FITS}
    parts = [(stem, only(group, names)) for stem, names in kinds.items() for group in groups]
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    with styled(narrow=True):
        for stem, group in parts:
            for kind, draw in (("error", _error), ("fields", _fields), ("held-out", _held_out)):
                if group is not None:
                    paths += save(draw(group), out / f"{stem}-{kind}-{group.network}-{group.seconds:g}s")
    return paths


def _error(group: Group) -> Figure | None:
    drawn, axes = _panels(group)
    styles = _looks(group)
    for axis, (problem, by) in zip(axes, group.runs.items(), strict=True):
        shown: list[float] = []
        for number, (name, runs) in enumerate(by.items()):
            curve, look = series(runs, "seconds", "error", exact=True), styles[name]
            if curve is None:
                continue
            shown += curve.middle
            for run in runs if len(runs) > 1 else ():
                some = [(p.seconds, p.error) for p in run.points if p.finite and p.seconds > 0]
                axis.plot(*zip(*some, strict=True), color=look["color"], linewidth=0.5, alpha=0.4)
            # Markers stand at different places on each line, so that lines on top of each other can be told apart.
            axis.plot(curve.times, curve.middle, markevery=(0.02 + 0.03 * number, 0.33), **look)
        axis.set(title=problem, xscale="log", yscale="log")
        if shown and min(shown) > 0:
            low, high = min(shown), max(shown)
            if high < 3 * low:  # where nothing happens, little differences are not to fill the panel
                low, high = low / 2, high * 2
                axis.set_ylim(low, high)
            _ticks(axis.yaxis, low, high)
        _ticks(axis.xaxis, 1.0, max(group.seconds, 2.0))
    _finish(drawn, axes, ("CPU seconds", "relative L2 error"), "Error over time", group)
    return drawn


def _held_out(group: Group) -> Figure | None:
    """Every seed's path, with a marker where it ended; on the diagonal both losses are equal."""
    drawn, axes = _panels(group)
    styles = _looks(group)
    for axis, (problem, by) in zip(axes, group.runs.items(), strict=True):
        values: list[float] = []
        for name, runs in by.items():
            look = styles[name]
            for run in runs:
                both = [(p.loss, p.held_out_loss) for p in run.points if p.finite]
                some = [pair for pair in both if min(pair) > 0]
                if not some:
                    continue
                values += [value for pair in some for value in pair]
                axis.plot(*zip(*some, strict=True), **{**look, "linewidth": 0.8, "marker": ""}, alpha=0.6)
                axis.plot(*some[-1], **{**look, "linestyle": "none"})
        axis.set(title=problem, xscale="log", yscale="log")
        if values:
            ends = [min(values), max(values)]
            axis.plot(ends, ends, color="#999999", linewidth=0.8, zorder=0)
            _ticks(axis.yaxis, *ends)
            _ticks(axis.xaxis, *ends)
    title = "Loss on other points over loss on the points trained on"
    _finish(drawn, axes, ("training loss", "held-out loss"), title, group)
    return drawn


def _fields(group: Group) -> Figure | None:
    """A row for every problem whose solution by our method and by a rival were kept."""
    rows = {name: pair for name, by in group.runs.items() if (pair := _pair(by)) is not None}
    if not rows:
        return None
    from matplotlib.colors import LogNorm

    drawn, axes = panels(3 * len(rows), 3, 1.6, beside=0.5)
    for i, (name, (ours, rival)) in enumerate(rows.items()):
        line = axes[3 * i : 3 * i + 3]
        kept = [np.load(fields(run)) for run in (ours, rival)]
        exact, off = kept[0]["exact"], [abs(each["error"]) for each in kept]
        # One scale for both errors, over the decades that have most of them: zeros of the error would take many more.
        top = max(float(each.max()) for each in off) or 1.0
        low = min(max(min(float(np.quantile(each, 0.05)) for each in off), 1e-8 * top), 1e-2 * top)
        scale = LogNorm(low, top)
        bound = float(abs(exact).max())
        titles = [f"{name}: u*", *(f"|u − u*|, {NAMES.get(column(run), column(run))}" for run in (ours, rival))]
        pictures: list[tuple[Any, dict[str, Any]]] = [(exact, {"cmap": "RdBu_r", "vmin": -bound, "vmax": bound})]
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
    kept = [run for runs in by.values() for run in runs if fields(run).exists()]
    ours = [run for run in kept if column(run) == BASE]
    rivals = [run for run in kept if not run.method.startswith("ksd")]
    return (ours[0], min(rivals, key=lambda run: run.final.error)) if ours and rivals else None


def _columns(group: Group) -> int:
    return min(3, len(group.runs))


def _panels(group: Group) -> tuple[Figure, list[Axes]]:
    """A panel for every problem."""
    return panels(len(group.runs), _columns(group), 1.95, beside=1.2)


def _ticks(axis: PlotAxis, low: float, high: float) -> None:
    """As in other figures, but few of them, since panels are narrow."""
    from matplotlib.ticker import LogLocator

    number_ticks(axis, low, high)
    if high / low > 1e3:
        axis.set_major_locator(LogLocator(numticks=5))


def _looks(group: Group) -> dict[str, dict[str, Any]]:
    """Ours in front and thicker: it is what the others are compared with."""
    ours, others = {"linewidth": 2.0, "zorder": 4, "markersize": 4.5}, {"linewidth": 1.1, "markersize": 3}
    lines = looks(list(group.columns))
    return {name: {**line.arguments(), **(ours if name == BASE else others)} for name, line in lines.items()}


def _finish(drawn: Figure, axes: Sequence[Axes], labels: tuple[str, str], title: str, group: Group) -> None:
    """What the axes are, the legend and the title."""
    label_panels(axes, _columns(group), labels[0], itertools.repeat(labels[1]))
    legend(drawn, {NAMES.get(name, name): look for name, look in _looks(group).items()}, handlelength=3)
    drawn.suptitle(_title(title, group), fontsize=10)


def _title(text: str, group: Group) -> str:
    counts = {len(runs) for by in group.runs.values() for runs in by.values()}
    most = f"up to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
    seeds = f"median of {most} seeds" if max(counts) > 1 and text.startswith("Error") else ""
    return f"{text}: {', '.join(part for part in (f'network {group.network}, {group.seconds:g} s', seeds) if part)}"
