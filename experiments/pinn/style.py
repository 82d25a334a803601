"""Names and looks of the methods of the PINN study, in the order of tables and legends."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.style import Line

#: The method that others are compared with.
BASE = "ksd-rational"

NAMES: Mapping[str, str] = {
    "ksd-rational": "KSD, rational",
    "ksd-krylov": "KSD, Krylov",
    "lm": "LM",
    "engd": "ENGD",
    "spring": "SPRING",
    "bfgs": "BFGS",
    "ssbroyden": "SSBroyden",
    "nncg": "NNCG",
    "adam-lbfgs": "Adam, L-BFGS",
    "soap": "SOAP",
}

_LINES: Mapping[str, Line] = {
    "ksd-rational": Line("#0072B2", "-", "o"),
    "ksd-krylov": Line("#56B4E9", "--", "v"),
    "lm": Line("#D55E00", "-", "s"),
    "engd": Line("#E69F00", "-", "D"),
    "spring": Line("#E69F00", "--", "P"),
    "bfgs": Line("#009E73", "--", "^"),
    "ssbroyden": Line("#009E73", "-", "<"),
    "nncg": Line("#CC79A7", "-.", "X"),
    "adam-lbfgs": Line("#000000", ":", "d"),
    "soap": Line("#999999", (0, (3, 1, 1, 1)), "*"),
}

# For runs under labels of their own.
_OTHERS = tuple(Line(colour, (0, (5, 1, 1, 1, 1, 1)), "h") for colour in ("#D55E00", "#CC79A7", "#009E73", "#000000"))


def looks(columns: list[str]) -> dict[str, Line]:
    """A look for every column; those that are no method's take turns."""
    others = [column for column in columns if column not in _LINES]
    return {
        column: _LINES[column] if column in _LINES else _OTHERS[others.index(column) % len(_OTHERS)]
        for column in columns
    }
