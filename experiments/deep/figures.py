"""Figures of the study of deep networks over CPU seconds, a panel for each task. Nothing here trains.

A method whose schedule follows the budget has a line for each of its budgets, the shorter ones thin and with their end
marked: only the ends compare.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.deep.records import budgets_of, by_task, serving
from experiments.deep.style import LINES, NAMES
from experiments.figures import save
from experiments.records import Run
from experiments.series import Quantity, Series, series
from experiments.style import RC, WIDTH, number_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3
_SMALLER: Any = {"axes.titlesize": 9, "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8}


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
    if not tasks:
        raise ValueError(f"There are no runs in {results}: make some with `python -m experiments deep study`.")
    out.mkdir(parents=True, exist_ok=True)
    losses = [_Panel(task, "training loss", runs, "loss") for task, runs in tasks.items()]
    files = _draw(losses, min(_COLUMNS, len(losses)), out / "deep-loss")
    longer = {task: runs for task, runs in tasks.items() if len(budgets_of(runs)) > 1}
    if not longer:
        return files
    errors = [_Panel(task, "training error", runs, "error") for task, runs in longer.items()]
    held_out = [_Panel(task, "held-out error", runs, "held_out_error") for task, runs in longer.items()]
    return files + _draw([*errors, *held_out], len(longer), out / "deep-error")


def _draw(panels: Sequence[_Panel], columns: int, path: Path) -> list[Path]:
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    with mpl.rc_context({**RC, **_SMALLER}):
        height = math.ceil(len(panels) / columns)
        drawn = Figure(figsize=(WIDTH, 1.1 + 2.1 * height), layout="constrained")
        axes = list(drawn.subplots(height, columns, squeeze=False).flat)
        for unused in axes[len(panels) :]:
            unused.remove()
        methods: set[str] = set()
        for number, (axis, panel) in enumerate(zip(axes, panels, strict=False)):
            methods |= _panel(axis, panel)
            axis.set_title(panel.title)
            axis.set(ylabel=panel.label if number % columns == 0 else "")
            axis.set(xlabel="CPU seconds" if number >= len(panels) - columns else "")
        shown = [method for method in NAMES if method in methods]
        handles = [Line2D([], [], label=NAMES[method], **LINES[method].arguments()) for method in shown]
        below: Any = {"loc": "outside lower center", "ncols": min(5, len(handles)), "frameon": False}
        drawn.legend(handles=handles, handlelength=3.2, columnspacing=1.2, **below)
        seeds = max(len({run.seed for run in panel.runs}) for panel in panels)
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
            if thin and not all(run.allowed.amount == seconds for run in several):
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
                high = [value if math.isfinite(value) else 1e3 * curve.middle[0] for value in curve.high]
                axis.fill_between(curve.times, curve.low, high, color=look["color"], alpha=0.15, linewidth=0)
    _scales(axis, [curve for curves in shown.values() for curve in curves], panel)
    return set(shown)


def _scales(axis: Axes, shown: Sequence[Series], panel: _Panel) -> None:
    """Both logarithmic; what is worse than the start is cut off."""
    values = [value for curve in shown for value in curve.middle if math.isfinite(value) and value > 0]
    times = [time for curve in shown for time in curve.times]
    if not values:
        return
    starts = [getattr(run.points[0], panel.quantity) for run in panel.runs]
    start = max(filter(math.isfinite, starts), default=max(values))
    low, high = min(values), min(max(values), start)
    axis.set(xscale="log", yscale="log", xlim=(min(times) / 1.1, max(times) * 1.1))
    margin = max((high / low) ** 0.04, 1.01)
    axis.set_ylim(low / margin, high * margin)
    number_ticks(axis.xaxis, min(times), max(times))
    number_ticks(axis.yaxis, low, high)
