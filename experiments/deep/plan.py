"""What the study of deep networks runs: tasks, methods, budgets, the grids that rivals are tuned over, ablations.

Methods are those of ``experiments.supervised.methods.KINDS``.

Tuning is a successive halving, for each task, method and budget: every setting of the grid is tried for a short time,
the best of them for longer. A trial is a run of its own with a schedule that ends with it, and a seed that the study
does not use; the loss at its end decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common.study import product, read_tuned
from experiments.deep.style import NAMES
from experiments.supervised.methods import KINDS

TASKS = ("curves", "mnist-ae", "spoken-digits", "fashion-conv", "char-lstm", "char-transformer")
METHODS = tuple(NAMES)
BUDGETS = (60.0, 300.0)

#: What tuning chose, task → method → budget → settings and trials; ``tune`` writes it, ``study`` reads it.
TUNED = Path(__file__).with_name("tuned.json")
TUNING_SEED = 100

#: Budget → seconds of each trial and how many settings are tried so, rung by rung; the first takes the whole grid.
RUNGS: Mapping[float, Sequence[tuple[float, int]]] = {
    60.0: ((12.0, 12), (30.0, 4), (60.0, 2)),
    300.0: ((30.0, 12), (100.0, 4)),
}

#: Their loss is a sum over pixels, some hundred times as large and as curved as a mean over classes.
_SUMS = ("curves", "mnist-ae")
_SCHEDULES = ("cosine", "linear")

#: Label → method and settings that differ from its own; the first is what the others are compared with.
ABLATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "defaults": ("deep", {}),
    "search-in-every-step": ("deep", {"searches": True}),
    "last-step-only": ("deep", {"earlier": False}),
    "k2": ("deep", {"krylov_dim": 2}),
    "k5": ("deep", {"krylov_dim": 5}),
    "fisher-diagonal": ("deep", {"preconditioner": "fisher"}),
    "no-preconditioner": ("deep", {"preconditioner": "none"}),
    "damping-1e-3": ("deep", {"damping": 1e-3}),
    "damping-0.1": ("deep", {"damping": 0.1}),
    "memory-0.9": ("deep", {"memory": 0.9}),
    "sets-do-not-grow": ("deep", {"grows": False}),
    "start-125": ("deep", {"start": 125}),
    "start-2000": ("deep", {"start": 2000}),
    "paper": ("ksd-paper", {}),
}


def grid(task: str, method: str) -> list[dict[str, Any]]:
    """The settings that a method is tried with; KSD has its own for all tasks."""
    sums, images = task in _SUMS, task in ("spoken-digits", "fashion-conv")
    if method == "adamw":
        # On both autoencoders 3e-3 and 50 were the best of 3e-4 … 3e-3 and 50, 200, and linear ahead of cosine.
        rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
        if not sums and task != "spoken-digits":
            rates = (*rates, 3e-2)
        return product(lr=rates, batch=(25, 50) if sums else (50, 200), schedule=("linear",))
    if method == "muon":  # with the batches that AdamW is best with
        rates = (3e-4, 1e-3, 3e-3) if task == "spoken-digits" else (1e-3, 3e-3, 1e-2)
        return product(lr=rates, batch=(200,) if images else (50,), schedule=("linear",))
    if method == "soap":
        rates = (1e-3, 3e-3, 1e-2)
        return product(lr=rates, batch=(50, 200), schedule=_SCHEDULES)
    if method == "nesterov":  # of momentum 0.99 a learning rate is worth ten times that of 0.9
        rates = (3e-3, 1e-2, 3e-2) if sums else (0.03, 0.1, 0.3) if images else (0.1, 0.3, 1.0)
        slow = product(lr=rates, momentum=(0.9,), batch=(50,), schedule=_SCHEDULES)
        return slow + product(lr=[rate / 10 for rate in rates], momentum=(0.99,), batch=(50,), schedule=_SCHEDULES)
    if method == "kfac":
        return product(damping=(1e-2, 0.1), batch=(250, 500, 2000))
    if method == "hf":
        return product(damping=(1.0, 10.0, 45.0, 150.0) if sums else (0.1, 1.0, 10.0, 45.0), fraction=(0.05, 0.25))
    return []


def scheduled(method: str) -> bool:
    """Whether a run depends on its budget; one long run of any other method serves all shorter budgets too."""
    return KINDS[method].scheduled


def label(method: str, seconds: float) -> str:
    """Of a run: with the budget, where it depends on that."""
    return f"{method}-{seconds:g}s" if scheduled(method) else method


def settings(task: str, method: str, seconds: float) -> dict[str, Any]:
    """What tuning chose for a budget, or for the longest shorter one; otherwise the method's own settings."""
    chosen = read_tuned(TUNED).get(task, {}).get(method, {})
    if not scheduled(method):
        return dict(chosen.get("any", {}).get("settings", {}))
    shorter = [float(key) for key in chosen if float(key) <= seconds]
    return dict(chosen[f"{max(shorter):g}"]["settings"]) if shorter else {}
