"""What figures of all studies are made of: panels, lines with bands, scales, a legend below, a file. Nothing trains.

The same runs give the same file.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common.series import Series
from experiments.common.style import RC, WIDTH, number_ticks

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of a file: dots per inch, and colours of the palette.
_DOTS = 150
_COLOURS = 256

_NARROW: Any = {"axes.titlesize": 9, "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8}


def styled(*, narrow: bool = False) -> AbstractContextManager[None]:
    """Inside, figures have the usual sizes, or smaller ones for narrow panels."""
    import matplotlib as mpl

    return mpl.rc_context({**RC, **_NARROW} if narrow else RC)


def save(drawn: Figure | None, stem: Path) -> list[Path]:
    """Write a figure as PNG with a palette, a third of the bytes of one without; no figure, no file."""
    from PIL import Image

    if drawn is None:
        return []
    path = stem.with_name(f"{stem.name}.png")
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", dpi=_DOTS)
    with Image.open(buffer) as picture:
        picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    return [path]


def panels(
    count: int, columns: int, height: float, *, beside: float = 0.0, sharey: bool = False
) -> tuple[Figure, list[Axes]]:
    """So many panels in rows of a few, each so high, with some inches ``beside`` them for titles and a legend."""
    from matplotlib.figure import Figure

    rows = math.ceil(count / columns)
    drawn = Figure(figsize=(WIDTH, beside + height * rows), layout="constrained")
    axes = list(drawn.subplots(rows, columns, squeeze=False, sharey=sharey).flat)
    for unused in axes[count:]:
        unused.remove()
    return drawn, axes[:count]


def label_panels(axes: Sequence[Axes], columns: int, below: str, left: Iterable[str]) -> None:
    """Under the lowest panel of every column, and at the left of every row."""
    for axis in axes[-columns:]:
        axis.set_xlabel(below)
    for axis, text in zip(axes[::columns], left, strict=False):
        axis.set_ylabel(text)


def legend(drawn: Figure, looks: Mapping[str, Mapping[str, Any]], columns: int = 5, **options: Any) -> None:
    """Below the panels, where it covers nothing: names and looks of lines."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=name, **look) for name, look in looks.items()]
    drawn.legend(
        handles=handles, loc="outside lower center", ncols=min(columns, len(handles)), frameon=False, **options
    )


def band(axis: Axes, curve: Series, colour: str, step: Any = None) -> None:
    """From the lowest to the highest seed; it can be cut off by the frame, but not be infinite."""
    ceiling = 1e3 * max((abs(v) for v in curve.high if math.isfinite(v)), default=1.0)
    above = [min(v, ceiling) for v in curve.high]
    axis.fill_between(curve.times, curve.low, above, step=step, color=colour, alpha=0.15, linewidth=0)


def time_scale(axis: Axes, shown: Sequence[Series]) -> None:
    """Logarithmic, with plain numbers, over all curves."""
    low, high = min(c.times[0] for c in shown), max(c.times[-1] for c in shown)
    axis.set_xscale("log")
    axis.set_xlim(low / 1.1, high * 1.1)
    number_ticks(axis.xaxis, low, high)


def log_values(axis: Axes, low: float, high: float) -> None:
    """A logarithmic axis of values, with plain numbers and a small margin."""
    axis.set_yscale("log")
    margin = max((high / low) ** 0.04, 1.01)
    axis.set_ylim(low / margin, high * margin)
    number_ticks(axis.yaxis, low, high)


def seeds_of(counts: set[int]) -> str:
    """What a title says of how many seeds lines are of."""
    several = "–".join(str(n) for n in sorted({min(counts), max(counts)}))
    return f"median and range of {several} seeds" if max(counts) > 1 else "one seed"
