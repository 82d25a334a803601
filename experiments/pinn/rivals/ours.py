"""Krylov Subspace Descent on all residuals, with the rational and the Krylov basis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from experiments.pinn import ablations
from experiments.pinn.rivals.least_squares import LeastSquares, Trainable
from krylov_descent import KSD, Rational
from krylov_descent.run import NOTHING_FOUND, in_vain


def ksd_rational(problem: Trainable, *, seed: int, without: str | None = None, **settings: Any) -> Iterator[float]:
    """With the rational basis; settings are those of ``krylov_descent.Rational``, and a part it is to lack."""
    with nullcontext() if without is None else ablations.without(without):
        yield from _steps(problem, KSD(problem.model.parameters(), basis=Rational(**settings), seed=seed))


def ksd_krylov(problem: Trainable, *, seed: int, krylov_dim: int = 50) -> Iterator[float]:
    """With the Krylov basis."""
    return _steps(problem, KSD(problem.model.parameters(), krylov_dim=krylov_dim, seed=seed))


def _steps(problem: Trainable, optimizer: KSD) -> Iterator[float]:
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
