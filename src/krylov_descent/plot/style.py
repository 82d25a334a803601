"""The style of plots: colours for colour-blind readers, a light grid, plain numbers on axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

#: The palette of Okabe and Ito.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
BLUE, ORANGE = COLOURS[:2]
PHASES = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#999999")
BLANK = "#EEEEEE"
MAP = "viridis"
SIZE = (6.4, 4.0)
_TITLE, _LABEL, _TICK = 10.5, 9.5, 8.5


def pyplot() -> Any:
    """Import and return matplotlib's pyplot.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot as plt
    except ImportError:
        raise ImportError("Pictures need matplotlib: pip install 'krylov-descent[plot]'.") from None
    return plt


def axes_of(ax: Axes | None, size: tuple[float, float] = SIZE) -> Axes:
    """Return ``ax``, or the axes of a new figure."""
    if ax is not None:
        return ax
    new: Axes = pyplot().subplots(figsize=size, layout="constrained")[1]
    return new


def frame(ax: Axes, title: str, xlabel: str, ylabel: str, *, grid: bool = True) -> None:
    """Set title, labels, ticks, grid and spines."""
    ax.set_title(title, fontsize=_TITLE)
    ax.set_xlabel(xlabel, fontsize=_LABEL)
    ax.set_ylabel(ylabel, fontsize=_LABEL)
    ax.tick_params(labelsize=_TICK)
    ax.set_axisbelow(True)
    ax.grid(visible=False, which="both")
    if grid:
        ax.grid(visible=True, which="major", color="#000000", alpha=0.12, linewidth=0.6)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def legend(ax: Axes, **place: Any) -> None:
    """Draw a legend, if something has a label."""
    if ax.get_legend_handles_labels()[1]:
        shown = ax.legend(fontsize=_TICK, frameon=True, framealpha=0.85, edgecolor="none", **place)
        shown.set_zorder(5)


def whole_steps(ax: Axes) -> None:
    """Put the ticks of a step axis at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def log_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Label a logarithmic axis at decades, and at numbers between them if it spans few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = min(values), max(values)
    decades = math.log10(high / low)
    if decades >= 2.5:
        axis.set_major_locator(LogLocator(numticks=9))
        return
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 6, 8) if decades < 0.7 else (1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def nothing(ax: Axes, words: str) -> None:
    """Write the reason for an empty plot into its middle."""
    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", fontsize=_LABEL, color="#666666")
    ax.set(xticks=[], yticks=[])
