"""How figures look: lines of a colour, dashes and a marker each, sizes, numbers on logarithmic axes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axis import Axis as PlotAxis


@dataclasses.dataclass(frozen=True)
class Line:
    """Name in tables and legends, colour (Okabe and Ito's), dashes and marker."""

    name: str
    colour: str
    dashes: Any
    marker: str

    def arguments(self) -> dict[str, Any]:
        """For ``Axes.plot``."""
        return {"color": self.colour, "linestyle": self.dashes, "marker": self.marker}


RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.4,
}
WIDTH = 7.0


def number_ticks(axis: PlotAxis, low: float, high: float) -> None:
    """Plain numbers on a logarithmic axis: decades where it spans many, some numbers between them where few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    span = high / low
    fine, middling, coarse = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0), (1.0, 2.0, 3.0, 5.0, 7.0), (1.0, 2.0, 5.0)
    subs = fine if span < 6 else middling if span < 20 else coarse if span < 200 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    if span < 1e5 and low >= 1e-3 and high < 1e5:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
