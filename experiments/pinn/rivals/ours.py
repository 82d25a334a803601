"""Ours, on all residuals: the Gauss–Newton flow, and Krylov Subspace Descent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from experiments.pinn import ablations
from experiments.pinn.rivals.least_squares import LeastSquares, Trainable
from krylov_descent import KSD, GaussNewtonFlow
from krylov_descent.base import CurvatureOptimizer
from krylov_descent.run import NOTHING_FOUND, in_vain


def gauss_newton_flow(
    problem: Trainable,
    *,
    seed: int,
    rows: int | None = None,
    momentum: float | None = None,
    without: str | None = None,
) -> Iterator[float]:
    """The flow, with its own settings unless given, and without a part that it is to lack."""
    given: dict[str, Any] = {"rows": rows, "momentum": momentum}
    given = {name: value for name, value in given.items() if value is not None}
    with nullcontext() if without is None else ablations.without(without):
        yield from _steps(problem, GaussNewtonFlow(problem.model.parameters(), seed=seed, **given))


def ksd_krylov(problem: Trainable, *, seed: int, krylov_dim: int = 50) -> Iterator[float]:
    """KSD with K = 50 unless given."""
    return _steps(problem, KSD(problem.model.parameters(), krylov_dim=krylov_dim, seed=seed))


def _steps(problem: Trainable, optimizer: CurvatureOptimizer) -> Iterator[float]:
    squares, nothing = LeastSquares(problem), 0
    while nothing < NOTHING_FOUND:
        try:
            report = optimizer.step(problem.closure)
        except ValueError:
            if math.isfinite(squares.value()):
                raise
            yield math.nan
            return
        nothing = in_vain(report, nothing)
        yield report.search_loss_after
