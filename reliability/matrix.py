"""The matrix method × fault: ``trial(method, fault, seed)``, and how often each cell is tried."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from reliability.methods import METHODS


@dataclass(frozen=True)
class Fault:
    """A row of the matrix.

    Attributes:
        trial: module and name of the function (method, seed) → ``Outcome``.
        count: trials of each cell in the whole suite.
        unit: what the numbers in the cells count.
        seconds: after which a trial hangs.
    """

    trial: str
    count: int
    unit: str
    seconds: float = 120.0


FAULTS: dict[str, Fault] = {
    "odd problem": Fault("problems.odd_problem", 500, "problems"),
    "exception": Fault("problems.exception", 100, "problems"),
    "NaN region": Fault("problems.nan_region", 100, "problems"),
    "Ctrl-C": Fault("disturbances.ctrl_c", 26, "interrupts"),
    "other thread": Fault("disturbances.other_thread", 24, "trainings"),
    "worker loss": Fault("disturbances.worker_loss", 6, "kills"),
    "SIGKILL": Fault("kills.sigkill", 6, "kills", 300.0),
    "rank loss": Fault("kills.rank_loss", 8, "kills", 300.0),
    "held-up process": Fault("kills.held_up", 6, "stops", 300.0),
    "full disk": Fault("disturbances.full_disk", 24, "saves"),
    "damaged file": Fault("files.damaged_file", 64, "files"),
    "lying file": Fault("files.lying_file", 34, "files", 600.0),
    "long run": Fault("soak.long_run", 1, "steps", 3600.0),
}

Cell = tuple[str, str, int]  # fault, method, seed


def trial(method: str, fault: str, seed: int) -> dict[str, Any]:
    """One trial, as a flat record."""
    module, name = FAULTS[fault].trial.split(".")
    began = time.perf_counter()
    outcome = getattr(importlib.import_module(f"reliability.{module}"), name)(method, seed)
    lost = outcome.lost
    return {
        "fault": fault,
        "method": method,
        "seed": seed,
        "outcome": "lost" if lost else outcome.ended,
        "lost": bool(lost),
        "times": outcome.times,
        "seconds": round(time.perf_counter() - began, 3),
        **({"why": "; ".join(lost)} if lost else {}),
        **(outcome.told if lost or fault == "long run" else {}),  # else the seed tells
    }


def cells(faults: list[str], share: float = 1.0) -> Iterator[Cell]:
    """The trials of some faults and all methods, or a share of them: one at least of each."""
    for fault in faults:
        for seed in range(max(1, round(share * FAULTS[fault].count))):
            for method in METHODS:
                yield fault, method, seed
