"""Names of the methods of the PINN study in the order of tables, and the looks of those in figures."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.common.style import Line

#: The method that others are compared with.
BASE = "flow"

NAMES: Mapping[str, str] = {
    "flow": "GaussNewtonFlow",
    "ksd": "KSD",
    "lm": "LM",
    "spring": "SPRING",
    "ssbroyden": "SSBroyden",
    "dsgnar": "DSGNAR",
    "adam-lbfgs": "Adam, L-BFGS",
    "soap": "SOAP",
}
LINES: Mapping[str, Line] = {
    "flow": Line("GaussNewtonFlow", "blue"),
    "ssbroyden": Line("SSBroyden", "orange"),
    "dsgnar": Line("DSGNAR", "green", (0, (5, 1))),
    "soap": Line("SOAP", "purple", (0, (3, 1, 1, 1))),
    "adam-lbfgs": Line("Adam → L-BFGS", "grey", (0, (1.5, 0.8))),
}
