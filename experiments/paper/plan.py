"""What the study runs: budgets, seeds and methods of every row, and the grids that methods are tuned over."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.study import product, read_tuned

#: The settings that tuning chose, problem → method → settings; ``tune`` writes it and ``run`` reads it.
TUNED = Path(__file__).with_name("tuned.json")

MAIN = ("ksd", "hf", "lbfgs", "sgd", "adam")
HESSIANS = ("ksd-hessian", "hf-hessian")
UNTUNED = ("ksd-paper", "ksd-raised", "deep", "kfac")  # they have settings of their own


#: Label → method, and settings in place of the tuned ones: the paper has K = 80 on CURVES, and whole runs tell more
#: than trials.
CHANGED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adam-0.003": ("adam", {"lr": 3e-3, "batch": 200}),
    "hf-0.1": ("hf", {"damping": 0.1, "fraction": 1.0}),
    "hf-10": ("hf", {"damping": 10.0, "fraction": 0.05}),
    "hf-500": ("hf", {"damping": 500.0, "fraction": 0.05}),
    "k40": ("ksd", {"krylov_dim": 40, "fraction": 0.05, "floor": 0.01}),
    "paper-k80": ("ksd-paper", {"krylov_dim": 80}),
    "paper-k80-20th": ("ksd-paper", {"krylov_dim": 80, "fraction": 0.05}),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the study.

    Attributes:
        minutes: of each run, on one thread.
        seeds: how many.
        extra: methods and ``CHANGED`` ones beside the main ones, with the first seed only.
        trial: seconds of each trial of a grid.
        hf_trial: seconds of HF's trials, if longer: on CURVES its first minute tells no λ₀ from another.
        trial_samples: training samples of a trial; None for all. Where a second-order step over all takes half a
            minute, trials on all of them would be over before they tell anything.
        hf_fraction: share of the samples that HF's curvature sees in half of its trials: Martens' 5,000 of CURVES and
            7,500 of MNIST, all of a data set too small for less. In the other half it is a twentieth, KSD's share.
        tuned_as: the row whose tuned settings serve this one.
        recurrent: whether the loss is of a recurrent net, with less curvature at its start.
    """

    minutes: float
    seeds: int
    extra: Sequence[str] = ()
    trial: float = 60.0
    hf_trial: float = 0.0
    trial_samples: int | None = None
    hf_fraction: float = 0.125
    tuned_as: str | None = None
    recurrent: bool = False


#: In the order of importance.
ROWS: Mapping[str, Row] = {
    "curves": Row(
        5,
        3,
        (*HESSIANS, "cg", "ksd-paper", "k40", "paper-k80", "paper-k80-20th"),
        trial=60,
        hf_trial=120,
        hf_fraction=0.25,
    ),
    "mnist-class": Row(10, 1, ("adam-0.003",), trial=45, trial_samples=10_000),
    "mnist-ae": Row(20, 1, ("hf-10", "hf-500"), trial=60, trial_samples=10_000),
    "starcraft": Row(1, 3, ("hf-0.1",), trial=10, hf_fraction=1.0),
    "spoken-digits": Row(15, 1, HESSIANS, trial=45, trial_samples=10_000),
    "curves5": Row(5, 1, hf_fraction=0.25, tuned_as="curves"),
    "adding-50": Row(2, 3, trial=24, hf_fraction=0.25, recurrent=True),
    "order-50": Row(2, 3, trial=24, hf_fraction=0.25, recurrent=True),
    "adding-100": Row(2, 3, hf_fraction=0.25, tuned_as="adding-50"),
    "order-100": Row(2, 3, hf_fraction=0.25, tuned_as="order-50"),
    "mnist-pretrained": Row(10, 1, tuned_as="mnist-class"),
}


#: Problem → minutes of the long runs: the rows whose data are the paper's, to be run to its errors.
LONG: Mapping[str, float] = {"mnist-class": 60, "mnist-pretrained": 60, "mnist-ae": 150}

#: Label of a long run → its method, and what replaces tuned settings: all but HF have defaults or the paper's settings,
#: and two have a larger basis on sets of the same size, one of them after 92 steps only.
LONG_RUNS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ksd-long": ("ksd", {"krylov_dim": 20, "floor": 1e-2}),
    "ksd-k80-long": ("ksd", {"krylov_dim": 80, "floor": 1e-2, "fraction": 0.05}),
    "ksd-paper-long": ("ksd-paper", {}),
    "ksd-raised-long": ("ksd-raised", {}),
    "deep-long": ("deep", {}),
    "hf-long": ("hf", {}),
}


#: Their loss is a sum over pixels, some hundred times as large and as curved as a mean over classes.
_SUMS = ("curves", "mnist-ae")


def grid(problem: str, method: str) -> list[dict[str, Any]]:
    """The settings that a method is tried with; L-BFGS and CG have nothing to tune."""
    full, recurrent = problem == "curves", ROWS[problem].recurrent
    if method == "ksd":
        if ROWS[problem].hf_fraction == 1:  # so little data that 1/K of it is a handful
            return product(krylov_dim=(20, 40), floor=(1e-2, 1e-4), fraction=(0.05, 1.0))
        return product(krylov_dim=(20, 40, 80) if full else (20, 40), floor=(1e-2, 1e-4))
    if method == "hf":
        dampings: tuple[float, ...] = (1.0, 10.0, 45.0, 150.0) if problem in _SUMS else (0.1, 1.0, 10.0, 45.0)
        if recurrent:
            dampings = (0.001, 0.01, 0.1, 1.0, 10.0)
        if ROWS[problem].hf_fraction == 1:
            dampings = (0.01, *dampings)
        return product(damping=dampings, fraction=(ROWS[problem].hf_fraction, 0.05))
    if method == "adam":
        rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
        if recurrent:
            rates = (1e-4, *rates)
        elif problem not in _SUMS:
            rates = (*rates, 1e-2, 3e-2)
        return product(lr=rates, batch=(50, 200) if full or recurrent else (200,))
    if method == "sgd":
        rates = (1e-3, 3e-3, 1e-2, 3e-2, 0.1) if problem in _SUMS else (0.03, 0.1, 0.3, 1.0)
        if recurrent:  # from 0.03 on it diverges on the adding problem
            rates = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)
        if full:
            rates = rates[1:]
        return product(lr=rates, momentum=(0.9, 0.99) if full else (0.9,))
    return []


def trial(problem: str, method: str) -> float:
    """Seconds of a trial."""
    row = ROWS[problem]
    return max(row.trial, row.hf_trial) if method == "hf" else row.trial


def settings(problem: str, method: str) -> dict[str, Any]:
    """What tuning chose for a method on a problem; what was chosen for the Gauss–Newton form serves the others too."""
    row = ROWS.get(problem)
    chosen = read_tuned(TUNED).get((row.tuned_as if row else None) or problem, {})
    return {} if method in UNTUNED else dict(chosen.get(method.partition("-")[0], {}))


def run_of(problem: str, label: str) -> tuple[str, dict[str, Any]]:
    """Method and settings of a run of the study."""
    if label in LONG_RUNS:
        method, defaults = LONG_RUNS[label]
        return method, {**settings(problem, method), **defaults}
    if label in CHANGED:
        method, changed = CHANGED[label]
        return method, dict(changed)
    return label, settings(problem, label)
