"""Names of the methods of the paper's study in the order of tables, the looks of those in figures, parts of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from experiments.common.style import Line

#: The methods that are compared; runs under other labels are only listed.
LABELS: Mapping[str, str] = {
    "ksd": "KSD",
    "ksd-paper": "KSD, paper's settings",
    "ksd-hessian": "KSD, Hessian",
    "hf": "HF",
    "hf-hessian": "HF, Hessian",
    "lbfgs": "L-BFGS",
    "cg": "CG",
    "sgd": "SGD",
    "adam": "Adam",
}
LINES: Mapping[str, Line] = {
    "ksd": Line("KSD", "blue"),
    "hf": Line("Hessian-free", "orange"),
    "lbfgs": Line("L-BFGS", "green", (0, (5, 1))),
    "sgd": Line("SGD", "purple", (0, (3, 1, 1, 1))),
    "adam": Line("Adam", "grey", (0, (1.5, 0.8))),
}

#: Of the long runs.
LONG_LINES: Mapping[str, Line] = {
    "ksd-long": Line("KSD", "blue"),
    "ksd-k80-long": Line("KSD, K = 80", "green"),
    "ksd-paper-long": Line("KSD, PAPER", "amber", (0, (5, 1))),
    "ksd-raised-long": Line("PAPER, K to 80", "amber"),
    "deep-long": Line("DEEP", "purple", (0, (3, 1, 1, 1))),
    "hf-long": Line("Hessian-free", "orange"),
    "adam": Line("Adam", "grey", (0, (1.5, 0.8))),
    "target": Line("the paper", "text", (0, (1, 2))),
}


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a step: its name in a legend, the keys under which reports have it, and its colour."""

    name: str
    keys: tuple[str, ...]
    colour: str


# Parts that do the same work in both methods share a colour, so that their shares can be compared.
PHASES: tuple[Phase, ...] = (
    Phase("gradient", ("gradient",), "blue"),
    Phase("KSD: basis; HF: CG", ("basis", "cg"), "orange"),
    Phase("KSD: search; HF: backtracking", ("search", "backtracking"), "green"),
)
