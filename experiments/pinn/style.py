"""Names and looks of the methods of the PINN study, in the order of tables and legends."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from experiments.common.style import Line

#: The method that others are compared with.
BASE = "ksd-rational"

_LINES: Mapping[str, Line] = {
    "ksd-rational": Line("KSD, rational", "#0072B2", "-", "o"),
    "ksd-krylov": Line("KSD, Krylov", "#56B4E9", "--", "v"),
    "lm": Line("LM", "#D55E00", "-", "s"),
    "engd": Line("ENGD", "#E69F00", "-", "D"),
    "spring": Line("SPRING", "#E69F00", "--", "P"),
    "bfgs": Line("BFGS", "#009E73", "--", "^"),
    "ssbroyden": Line("SSBroyden", "#009E73", "-", "<"),
    "nncg": Line("NNCG", "#CC79A7", "-.", "X"),
    "adam-lbfgs": Line("Adam, L-BFGS", "#000000", ":", "d"),
    "soap": Line("SOAP", "#999999", (0, (3, 1, 1, 1)), "*"),
}
NAMES: Mapping[str, str] = {method: line.name for method, line in _LINES.items()}

#: Of runs under labels of their own, in turn.
_OTHERS = ("#D55E00", "#CC79A7", "#009E73", "#000000")


def looks(columns: Sequence[str]) -> dict[str, Line]:
    """A look for every column, also for one that is no method's."""
    others = (Line("", colour, (0, (5, 1, 1, 1, 1, 1)), "h") for colour in itertools.cycle(_OTHERS))
    return {name: _LINES.get(name) or dataclasses.replace(next(others), name=name) for name in columns}
