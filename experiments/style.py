"""How figures look: colours that the colour-blind can tell apart, a line style and a marker for each method, sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axis import Axis as PlotAxis


@dataclasses.dataclass(frozen=True)
class Line:
    """Colour (Okabe and Ito's), dashes and marker."""

    colour: str
    dashes: Any
    marker: str

    def arguments(self) -> dict[str, Any]:
        """For ``Axes.plot``."""
        return {"color": self.colour, "linestyle": self.dashes, "marker": self.marker}


LINES: Mapping[str, Line] = {
    "ksd": Line("#0072B2", "-", "o"),
    "ksd-paper": Line("#0072B2", (0, (1, 1)), "P"),
    "ksd-hessian": Line("#56B4E9", "--", "v"),
    "hf": Line("#D55E00", "-", "s"),
    "hf-hessian": Line("#E69F00", "--", "D"),
    "lbfgs": Line("#009E73", "-.", "^"),
    "cg": Line("#999999", (0, (5, 1, 1, 1, 1, 1)), "*"),
    "sgd": Line("#CC79A7", (0, (3, 1, 1, 1)), "X"),
    "adam": Line("#000000", ":", "d"),
}


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a step: its name in a legend, the keys under which reports have it, and its look."""

    name: str
    keys: tuple[str, ...]
    colour: str
    hatch: str


# Parts that do the same work in both methods share a colour, so that their shares can be compared.
PHASES: tuple[Phase, ...] = (
    Phase("gradient", ("gradient",), "#56B4E9", ""),
    Phase("KSD: basis; HF: CG", ("basis", "cg"), "#E69F00", "///"),
    Phase("KSD: search; HF: backtracking", ("search", "backtracking"), "#009E73", "xxx"),
)

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
