"""Figures of the study of deep networks over CPU seconds, a panel for each task. Nothing here trains.

The schedule of some methods follows the budget: of their shorter budgets only the ends are drawn, as dots.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.figures import Panel, draw, multiples
from experiments.common.records import Quantity, Run, ordered
from experiments.common.series import Series, series
from experiments.deep.records import budgets_of, by_task, serving
from experiments.deep.style import LINES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Tasks with most methods stand at the right, where methods are named.
_ORDER = ("fashion-conv", "spoken-digits", "curves", "char-lstm", "char-transformer", "mnist-ae")


def figures(results: Path, out: Path) -> list[Path]:
    """Draw ``deep``, the training loss, light and dark, and for tasks with several budgets ``deep-error``.

    The loss of an autoencoder ends near a value that no network can go below, under which curves are hard to tell
    apart; the squared error has none.

    Raises:
        ValueError: there are no runs.
    """
    tasks = by_task(results)
    tasks = {task: tasks[task] for task in ordered(tasks, _ORDER)}
    longer = {task: runs for task, runs in tasks.items() if len(budgets_of(runs)) > 1}
    paths = draw(functools.partial(_figure, tasks, "loss", "training loss"), out / "deep", dark=True)
    return paths + draw(functools.partial(_figure, longer, "held_out_error", "held-out error"), out / "deep-error")


def _figure(tasks: Mapping[str, Sequence[Run]], quantity: Quantity, value: str) -> Figure | None:
    return multiples([_panel(task, runs, quantity) for task, runs in tasks.items()], LINES, value)


def _panel(task: str, runs: Sequence[Run], quantity: Quantity) -> Panel:
    """The curve of each method's longest budget but for its first hundredth, and the ends of its shorter ones."""
    curves: dict[str, Series] = {}
    ends: dict[str, list[tuple[float, float]]] = {}
    for seconds in reversed(budgets_of(runs)):
        for method, several in serving(runs, seconds).items():
            curve = series(several, "seconds", quantity) if method in LINES else None
            if curve is not None and method not in curves:
                curves[method] = curve
            elif curve is not None and all(run.seconds == seconds for run in several):
                ends.setdefault(method, []).append((curve.times[-1], curve.middle[-1]))
    starts = [getattr(run.points[0], quantity) for run in runs]
    start = max((value for value in starts if math.isfinite(value)), default=math.inf)
    since = max(budgets_of(runs)) / 100
    return Panel(task, {name: curves[name] for name in LINES if name in curves}, ends, start, since)
