"""The paper's Table 2, digits as printed, and which of our problems stands beside which of its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from decimal import Decimal


@dataclasses.dataclass(frozen=True)
class Row:
    """One data set: errors of HF and KSD on the training and the cross-validation set, KSD's time relative to HF's."""

    dataset: str
    hf_train: Decimal
    hf_cv: Decimal
    ksd_train: Decimal
    ksd_cv: Decimal
    time: Decimal
    percent: bool


def _row(dataset: str, hf: tuple[str, str], ksd: tuple[str, str], time: str, *, percent: bool = True) -> Row:
    (hf_train, hf_cv), (ksd_train, ksd_cv) = ((Decimal(train), Decimal(cv)) for train, cv in (hf, ksd))
    return Row(dataset, hf_train, hf_cv, ksd_train, ksd_cv, Decimal(time), percent)


TABLE_2: tuple[Row, ...] = (
    _row("CURVES", ("0.13", "0.19"), ("0.17", "0.25"), "0.2", percent=False),
    _row("MNIST AE", ("1.7", "2.7"), ("1.8", "2.5"), "0.2", percent=False),
    _row("MNIST CL", ("0", "2.01"), ("0", "1.70"), "0.6"),
    _row("MNIST CL, PT", ("0", "1.40"), ("0", "1.29"), "0.6"),
    _row("Aurora", ("5.1", "8.7"), ("4.5", "8.1"), "0.3"),
    _row("Starcraft", ("0", "11"), ("0", "5"), "0.7"),
)

# Our problems in the order of tables, and the paper's data set beside each. The recurrent tasks have no figures there.
PROBLEMS: Mapping[str, str | None] = {
    "curves": "CURVES",
    "curves5": "CURVES",
    "mnist-ae": "MNIST AE",
    "mnist-class": "MNIST CL",
    "mnist-pretrained": "MNIST CL, PT",
    "spoken-digits": "Aurora",
    "starcraft": "Starcraft",
    "adding-50": None,
    "adding-100": None,
    "order-50": None,
    "order-100": None,
}

# The paper's files are not public: these rows are the same kind of task on other data.
OTHER_DATA = frozenset({"CURVES", "Aurora", "Starcraft"})


def row(problem: str) -> Row | None:
    """The paper's figures for one of our problems, if it has any."""
    return next((r for r in TABLE_2 if r.dataset == PROBLEMS.get(problem)), None)
