"""Names and looks of the methods of the study of deep networks, in the order of tables and legends."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.common.style import Line

LINES: Mapping[str, Line] = {
    "ksd-kronecker": Line("KSD, Kronecker", "#0072B2", "-", "o"),
    "ksd": Line("KSD, Fisher", "#56B4E9", "--", "v"),
    "kfac": Line("K-FAC", "#009E73", "-.", "^"),
    "hf": Line("HF", "#D55E00", "-", "s"),
    "nesterov": Line("SGD, Nesterov", "#CC79A7", (0, (3, 1, 1, 1)), "X"),
    "adamw": Line("AdamW", "#000000", ":", "d"),
    "soap": Line("SOAP", "#E69F00", (0, (5, 1, 1, 1, 1, 1)), "*"),
}
NAMES: Mapping[str, str] = {method: line.name for method, line in LINES.items()}
