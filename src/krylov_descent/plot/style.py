"""The style of plots: a palette for colour-blind readers, light and dark, a light grid, plain numbers on axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis


class Theme(NamedTuple):
    """Colours for one background: text, muted lines, empty cells, and curves."""

    background: str
    text: str
    grey: str
    blank: str
    blue: str
    orange: str
    green: str
    purple: str
    amber: str

    @property
    def colours(self) -> tuple[str, ...]:
        """The colours of curves, in turn."""
        return self.blue, self.orange, self.green, self.purple, self.amber, self.grey


#: Curves have a contrast of 4 or more with their background.
LIGHT = Theme("#ffffff", "#1f2328", "#6b7178", "#eaecee", "#0057b8", "#d1490c", "#12876a", "#a8408c", "#a67a00")
DARK = Theme("#131416", "#e6e6e6", "#9aa0a6", "#2a2d31", "#4ea1ff", "#ff8142", "#2cc08f", "#e88bd0", "#f0c24b")
MAP = "viridis"
SIZE = (6.4, 4.2)
TITLE, LABEL, TICK = 12.0, 11.0, 10.0


def theme(background: Any = None) -> Theme:
    """Return the theme for a background, or for the one that matplotlib gives to new figures."""
    from matplotlib import rcParams
    from matplotlib.colors import to_rgba

    *rgb, alpha = to_rgba(rcParams["figure.facecolor"] if background is None else background)
    brightness = 0.3 * rgb[0] + 0.6 * rgb[1] + 0.1 * rgb[2]
    return DARK if alpha * brightness + 1 - alpha < 0.5 else LIGHT


def theme_of(ax: Axes) -> Theme:
    """Return the theme for the figure of these axes."""
    return theme(ax.figure.canvas.figure.get_facecolor())


def rc(of: Theme, size: float = LABEL) -> Any:
    """Return matplotlib's settings for figures with this theme and this size of text."""
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    texts = ("font.size", "axes.titlesize", "axes.labelsize", "legend.fontsize", "figure.titlesize")
    return {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), of.background),
        **dict.fromkeys(ink, of.text),
        **dict.fromkeys(texts, size),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), size - 1),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        **{"axes.grid": True, "axes.axisbelow": True, "grid.color": of.grey, "grid.alpha": 0.25},
        "font.family": "DejaVu Sans",
    }


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
    """Set title, labels, ticks, grid and spines, in colours that suit the figure's background."""
    look = theme_of(ax)
    if theme(ax.get_facecolor()) is not look:
        ax.set_facecolor(look.background)
    ax.set_title(title, fontsize=TITLE, color=look.text)
    ax.set_xlabel(xlabel, fontsize=LABEL, color=look.text)
    ax.set_ylabel(ylabel, fontsize=LABEL, color=look.text)
    ax.tick_params(which="both", labelsize=TICK, colors=look.text)
    ax.set_axisbelow(True)
    ax.grid(visible=False, which="both")
    if grid:
        ax.grid(visible=True, which="major", color=look.grey, alpha=0.25, linewidth=0.8)
    ax.spines[:].set_color(look.text)
    ax.spines[["top", "right"]].set_visible(False)


def legend(ax: Axes, **place: Any) -> None:
    """Draw a legend, if something has a label."""
    if ax.get_legend_handles_labels()[1]:
        look = theme_of(ax)
        colours: dict[str, Any] = {"labelcolor": look.text, "facecolor": look.background, "edgecolor": "none"}
        shown = ax.legend(fontsize=TICK, frameon=True, framealpha=0.85, **colours, **place)
        shown.set_zorder(5)


def end_labels(ax: Axes, ends: Sequence[tuple[str, float, str]], *, size: float = TICK) -> None:
    """Write names at the right of the axes, at the heights of the values and in the colours given, none over another.

    The limits of the axes must be final.
    """
    bottom, top = ax.get_window_extent().intervaly
    gap = 1.2 * size * ax.figure.dpi / 72 / (top - bottom)
    places = ax.transAxes.inverted().transform(ax.transData.transform([(1.0, value) for _, value, _ in ends]))[:, 1]
    heights = [min(max(float(place), 0.0), 1.0) for place in places]
    groups: list[tuple[float, list[int]]] = []  # labels that touch, from below, and the height of their middle
    for i in sorted(range(len(ends)), key=heights.__getitem__):
        middle, members = heights[i], [i]
        while groups and middle - groups[-1][0] < gap * (len(members) + len(groups[-1][1])) / 2:
            members = groups.pop()[1] + members
            middle = sum(heights[j] for j in members) / len(members)
        groups.append((middle, members))
    for middle, members in groups:
        half = min(gap * (len(members) - 1) / 2, 0.5)
        middle = min(max(middle, half + 0.03), 1 - half)  # the names stay beside the axes
        for number, i in enumerate(members):
            beside = (4.0, 1.2 * size * (number - (len(members) - 1) / 2))  # in points, whatever the height becomes
            look: dict[str, Any] = {"color": ends[i][2], "fontsize": size, "va": "center"}
            ax.annotate(ends[i][0], (1, middle), beside, "axes fraction", "offset points", **look)


def whole_steps(ax: Axes) -> None:
    """Put the ticks of a step axis at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def log_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Label a logarithmic axis at a few decades, or at numbers between them if it spans few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = min(values), max(values)
    decades = math.log10(high / low)
    subs = (1, 1.5, 2, 3, 4, 5, 6, 8) if decades < 0.7 else (1, 2, 5) if decades < 1.8 else (1,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=6 if decades >= 1.8 else None))
    if low >= 1e-3 and high < 1e5:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def nothing(ax: Axes, words: str) -> None:
    """Write the reason for an empty plot into its middle."""
    grey = theme_of(ax).grey
    ax.text(0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", fontsize=LABEL, color=grey)
    ax.set(xticks=[], yticks=[])
