"""Names and looks of the methods of the study of deep networks, in the order of tables and legends."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.style import LINES as _USUAL
from experiments.style import Line

NAMES: Mapping[str, str] = {
    "ksd-kronecker": "KSD, Kronecker",
    "ksd": "KSD, Fisher",
    "kfac": "K-FAC",
    "hf": "HF",
    "nesterov": "SGD, Nesterov",
    "adamw": "AdamW",
    "soap": "SOAP",
}

LINES: Mapping[str, Line] = {
    "ksd-kronecker": Line("#0072B2", "-", "o"),
    "ksd": Line("#56B4E9", "--", "v"),
    "kfac": Line("#009E73", "-.", "^"),
    "hf": _USUAL["hf"],
    "nesterov": _USUAL["sgd"],
    "adamw": Line("#000000", ":", "d"),
    "soap": Line("#E69F00", (0, (5, 1, 1, 1, 1, 1)), "*"),
}
