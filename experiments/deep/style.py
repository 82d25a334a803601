"""Names of the methods of the study of deep networks in the order of tables, and the looks of those in figures."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.common.style import Line

NAMES: Mapping[str, str] = {
    "deep": "DEEP",
    "ksd": "KSD, Fisher",
    "kfac": "K-FAC",
    "hf": "HF",
    "nesterov": "SGD, Nesterov",
    "adamw": "AdamW",
    "muon": "Muon",
    "soap": "SOAP",
}
LINES: Mapping[str, Line] = {
    "deep": Line("DEEP", "blue"),
    "adamw": Line("AdamW", "orange"),
    "kfac": Line("K-FAC", "green", (0, (5, 1))),
    "nesterov": Line("SGD, Nesterov", "purple", (0, (3, 1, 1, 1))),
}
