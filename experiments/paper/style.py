"""Names and looks of the methods of the paper's study, in the order of tables and legends, and of parts of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from experiments.common.style import Line

#: The methods that are compared; runs under other labels are only listed.
LINES: Mapping[str, Line] = {
    "ksd": Line("KSD", "#0072B2", "-", "o"),
    "ksd-paper": Line("KSD, paper's settings", "#0072B2", (0, (1, 1)), "P"),
    "ksd-hessian": Line("KSD, Hessian", "#56B4E9", "--", "v"),
    "hf": Line("HF", "#D55E00", "-", "s"),
    "hf-hessian": Line("HF, Hessian", "#E69F00", "--", "D"),
    "lbfgs": Line("L-BFGS", "#009E73", "-.", "^"),
    "cg": Line("CG", "#999999", (0, (5, 1, 1, 1, 1, 1)), "*"),
    "sgd": Line("SGD", "#CC79A7", (0, (3, 1, 1, 1)), "X"),
    "adam": Line("Adam", "#000000", ":", "d"),
}
LABELS: Mapping[str, str] = {method: line.name for method, line in LINES.items()}


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
