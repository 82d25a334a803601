"""The figures of all studies: small multiples with names at the line ends, light and dark. Nothing trains.

The same runs give the same file.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.common.series import Series
from experiments.common.style import SIZE, TITLES, WIDTH, Line
from krylov_descent.plot.style import DARK, LIGHT, end_labels, log_ticks, rc, theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of a file: dots per inch, and colours of the palette.
_DOTS = 150
_COLOURS = 256


class Panel(NamedTuple):
    """The curves of one problem by method.

    Attributes:
        problem: its name, or a title.
        curves: median and range over seeds.
        ends: where shorter runs of a method ended, as dots.
        start: values above are cut off,
        since: and so are times before.
    """

    problem: str
    curves: Mapping[str, Series]
    ends: Mapping[str, Sequence[tuple[float, float]]] = {}
    start: float = math.inf
    since: float = 0.0


def draw(make: Callable[[], Figure | None], stem: Path, *, dark: bool = False) -> list[Path]:
    """Write what ``make`` draws as ``<stem>.png``, and if asked for as ``<stem>-dark.png``; no figure, no file."""
    import matplotlib as mpl

    paths = []
    for look, end in ((LIGHT, ""), (DARK, "-dark"))[: 1 + dark]:
        with mpl.rc_context(rc(look, SIZE)):
            paths += save(make(), stem.with_name(f"{stem.name}{end}"))
    return paths


def save(drawn: Figure | None, stem: Path) -> list[Path]:
    """Write a figure as PNG with a palette, a third of the bytes of one without; no figure, no file."""
    from PIL import Image

    if drawn is None:
        return []
    path = stem.with_name(f"{stem.name}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=_DOTS)
    with Image.open(buffer) as picture:
        picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    return [path]


def panels(count: int, columns: int, height: float, *, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """So many panels in rows of a few, each so high."""
    from matplotlib.figure import Figure

    rows = math.ceil(count / columns)
    drawn = Figure(figsize=(WIDTH, 0.4 + height * rows), layout="constrained")
    axes = list(drawn.subplots(rows, columns, squeeze=False, sharey=sharey).flat)
    for unused in axes[count:]:
        unused.remove()
    return drawn, axes[:count]


def multiples(
    shown: Sequence[Panel],
    lines: Mapping[str, Line],
    value: str,
    *,
    time: str = "CPU seconds",
    columns: int = 3,
    log_time: bool = True,
) -> Figure | None:
    """A panel for each problem, values over time; the last of each row has the methods' names at the line ends.

    Values are on a logarithmic scale, and so is time if asked for.
    """
    shown = [panel for panel in shown if panel.curves]
    if not shown:
        return None
    columns = min(columns, len(shown))
    drawn, axes = panels(len(shown), columns, 2.45)
    for axis, panel in zip(axes, shown, strict=True):
        _panel(axis, panel, lines, log_time=log_time)
    for axis in axes[-columns:]:
        axis.set_xlabel(time)
    for axis in axes[::columns]:
        axis.set_ylabel(value)
    drawn.draw_without_rendering()  # heights are final but for the room that names take at the right
    for i in range(columns - 1, len(shown), columns):
        ends = [
            (lines[name].name, curve.middle[-1], lines[name].arguments()["color"])
            for name, curve in shown[i].curves.items()
            if math.isfinite(curve.middle[-1])
        ]
        end_labels(axes[i], ends, size=SIZE - 0.5)
    return drawn


def _panel(axis: Axes, panel: Panel, lines: Mapping[str, Line], *, log_time: bool) -> None:
    for name, curve in panel.curves.items():
        look = lines[name].arguments()
        axis.plot(curve.times, curve.middle, solid_capstyle="round", **look)
        ceiling = 1e3 * max((v for v in curve.high if math.isfinite(v)), default=1.0)
        above = [min(v, ceiling) for v in curve.high]  # a band may be cut off by the frame, but not be infinite
        faint: dict[str, Any] = {"alpha": 0.16 if look["zorder"] == 4 else 0.08, "linewidth": 0}
        axis.fill_between(curve.times, curve.low, above, color=look["color"], **faint)
        for x, y in panel.ends.get(name, ()):
            axis.plot(x, y, "o", color=look["color"], markeredgecolor=theme().background, markersize=7, zorder=5)
    axis.set_title(TITLES.get(panel.problem, panel.problem))
    pairs = [pair for curve in panel.curves.values() for pair in zip(curve.times, curve.middle, strict=True)]
    values = [v for time, v in pairs if time >= panel.since and 0 < v < math.inf]
    low, high = min(values, default=0.1), min(max(values, default=1.0), panel.start)
    low, high = (low / 2, high * 2) if high < 1.2 * low else (low, high)
    margin = (high / low) ** 0.05
    axis.set(yscale="log", ylim=(low / margin, high * margin))
    log_ticks(axis.yaxis, (low, high))
    times = [time for time, _ in pairs if time >= panel.since]
    if log_time:
        axis.set(xscale="log", xlim=(min(times) / 1.1, max(times) * 1.05))
        log_ticks(axis.xaxis, times)
    else:
        axis.set_xlim(0, max(times) * 1.01)
        axis.locator_params(axis="x", nbins=4, steps=[1, 2, 3, 5, 10])
