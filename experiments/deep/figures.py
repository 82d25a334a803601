"""Figures of the study of deep networks over CPU seconds, a panel for each task. Nothing here trains.

A method whose schedule follows the budget has a line for each of its budgets, the shorter ones thin and with their end
marked: only the ends compare.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.figures import band, label_panels, legend, log_values, panels, save, styled, time_scale
from experiments.common.records import Quantity, Run
from experiments.common.series import Series, series
from experiments.deep.records import budgets_of, by_task, serving
from experiments.deep.style import LINES, NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3


@dataclasses.dataclass(frozen=True)
class _Panel:
    title: str
    label: str
    runs: Sequence[Run]
    quantity: Quantity


def figure(results: Path, out: Path) -> list[Path]:
    """Draw ``deep-loss`` and, for tasks with several budgets, ``deep-error``, as PNG; returns the files.

    The loss of an autoencoder ends near a value that no network can go below, under which curves are hard to tell
    apart; the squared error has none.

    Raises:
        ValueError: there are no runs.
    """
    tasks = by_task(results)
    out.mkdir(parents=True, exist_ok=True)
    losses = [_Panel(task, "training loss", runs, "loss") for task, runs in tasks.items()]
    files = _draw(losses, min(_COLUMNS, len(losses)), out / "deep-loss")
    longer = {task: runs for task, runs in tasks.items() if len(budgets_of(runs)) > 1}
    if not longer:
        return files
    errors = [_Panel(task, "training error", runs, "error") for task, runs in longer.items()]
    held_out = [_Panel(task, "held-out error", runs, "held_out_error") for task, runs in longer.items()]
    return files + _draw([*errors, *held_out], len(longer), out / "deep-error")


def _draw(drawn_in: Sequence[_Panel], columns: int, path: Path) -> list[Path]:
    with styled(narrow=True):
        drawn, axes = panels(len(drawn_in), columns, 2.1, beside=1.1)
        methods: set[str] = set()
        for axis, panel in zip(axes, drawn_in, strict=True):
            methods |= _panel(axis, panel)
            axis.set_title(panel.title)
        label_panels(axes, columns, "CPU seconds", (panel.label for panel in drawn_in[::columns]))
        looks = {NAMES[method]: LINES[method].arguments() for method in NAMES if method in methods}
        legend(drawn, looks, handlelength=3.2, columnspacing=1.2)
        seeds = max(len({run.seed for run in panel.runs}) for panel in drawn_in)
        drawn.suptitle("median and range of seeds" if seeds > 1 else "one seed", fontsize=10)
        return save(drawn, path)


def _panel(axis: Axes, panel: _Panel) -> set[str]:
    """Returns the methods that have a line."""
    runs = panel.runs
    budgets = budgets_of(runs)
    shown: dict[str, list[Series]] = {}
    for seconds in reversed(budgets):
        for number, (method, several) in enumerate(serving(runs, seconds).items()):
            thin = method in shown
            if thin and not all(run.seconds == seconds for run in several):
                continue  # the beginning of a line that is drawn already
            curve = series(several, "seconds", panel.quantity)
            if curve is None:
                continue
            shown.setdefault(method, []).append(curve)
            look = LINES[method].arguments()
            if thin:
                axis.plot(curve.times, curve.middle, **{**look, "marker": ""}, linewidth=0.6, alpha=0.6)
                axis.plot(curve.times[-1:], curve.middle[-1:], **{**look, "linestyle": "none"}, markersize=3)
                continue
            # Markers stand at different places on each line, so that lines on top of each other can be told apart.
            marked = (0.02 + 0.03 * number, 0.3) if len(curve.times) > 5 else None
            axis.plot(curve.times, curve.middle, markevery=marked, markersize=3.5, **look)
            if len(several) > 1:
                band(axis, curve, look["color"])
    _scales(axis, [curve for curves in shown.values() for curve in curves], panel)
    return set(shown)


def _scales(axis: Axes, shown: Sequence[Series], panel: _Panel) -> None:
    """Both logarithmic; what is worse than the start is cut off."""
    values = [value for curve in shown for value in curve.middle if math.isfinite(value) and value > 0]
    if not values:
        return
    starts = [getattr(run.points[0], panel.quantity) for run in panel.runs]
    start = max(filter(math.isfinite, starts), default=max(values))
    time_scale(axis, shown)
    log_values(axis, min(values), min(max(values), start))
