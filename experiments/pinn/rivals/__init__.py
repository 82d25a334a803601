"""Optimizers for physics-informed networks, a file for each family, all of them as generators of losses.

``METHODS[name](problem, seed=…, **settings)`` does a step for each ``next()`` and yields the training loss, that of the
model's parameters or of the last evaluation. It ends where it can make no more progress; where the loss is not
finite it yields NaN and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.pinn.rivals.doubly_sketched import dsgnar
from experiments.pinn.rivals.first_order import adam_lbfgs, soap
from experiments.pinn.rivals.least_squares import Trainable
from experiments.pinn.rivals.levenberg_marquardt import levenberg_marquardt
from experiments.pinn.rivals.natural import spring
from experiments.pinn.rivals.ours import gauss_newton_flow, ksd_krylov
from experiments.pinn.rivals.quasi_newton import ssbroyden

__all__ = ["GRIDS", "METHODS", "Method", "Trainable"]

Method = Callable[..., Iterator[float]]
"""(problem: Trainable, *, seed: int, **settings) → losses."""

METHODS: Mapping[str, Method] = {
    "flow": gauss_newton_flow,
    "ksd": ksd_krylov,
    "adam-lbfgs": adam_lbfgs,
    "soap": soap,
    "lm": levenberg_marquardt,
    "ssbroyden": ssbroyden,
    "spring": spring,
    "dsgnar": dsgnar,
}

#: Settings to tune: every combination in each grid of a method; the flow runs with its defaults. What was
#: tried before, in wider and coarser grids and for half a minute, is in tuned.json too.
GRIDS: Mapping[str, Sequence[Mapping[str, Sequence[Any]]]] = {
    "ksd": [{"krylov_dim": (20, 50, 100)}],
    "adam-lbfgs": [{"adam_steps": (30, 100, 500), "lr": (1e-3, 5e-3, 2e-2)}],
    "soap": [{"lr": (1e-3, 3e-3, 1e-2, 3e-2), "frequency": (10,)}],
    "lm": [{"start": (1e-6, 1e-4, 1e-2), "down": (3.0, 10.0, 30.0)}],
    "ssbroyden": [{"adam_steps": (0, 50, 200), "lr": (1e-3,)}],
    "spring": [
        {"damping": (1e-6, 1e-4), "rows": (500,)},
        {"damping": (1e-4, 1e-2), "rows": (500,), "lr": (0.05, 0.15), "momentum": (0.9,)},
        {"damping": (1e-2,), "rows": (500,), "lr": (0.15,), "momentum": (0.98,)},
    ],
    "dsgnar": [
        {"rows": (500,), "columns": (500,), "target": (0.075, 0.15, 0.3), "probes": (8,), "hashes": (0,)},
        {"rows": (1000,), "columns": (500,), "target": (0.15,), "probes": (8,), "hashes": (0, 4)},
        {"rows": (1000,), "columns": (500,), "target": (0.3,), "probes": (8,), "hashes": (4,)},
    ],
}
