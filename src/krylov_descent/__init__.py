"""Second-order optimizers for PyTorch: ``KSD`` (Vinyals & Povey 2011), ``GaussNewtonFlow`` and ``least_squares``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from krylov_descent.flow.optimizer import GaussNewtonFlow
from krylov_descent.krylov.search import ModelSearch, Search
from krylov_descent.least_squares import LeastSquaresResult, least_squares
from krylov_descent.optimizer import DEEP, KSD, PAPER
from krylov_descent.preconditioners.fisher import Fisher
from krylov_descent.preconditioners.kronecker import Kronecker
from krylov_descent.progress import Progress
from krylov_descent.report import Settlement, StepReport, StopReason
from krylov_descent.run import Best, EndReason, Run
from krylov_descent.safety.budget import Storage
from krylov_descent.samples.growing import Growing
from krylov_descent.samples.points import Points
from krylov_descent.samples.subsets import Subsets

if TYPE_CHECKING:
    from krylov_descent.checking import CheckReport, Finding, check

__version__ = "0.2.0"

__all__ = [
    "DEEP",
    "KSD",
    "PAPER",
    "Best",
    "CheckReport",
    "EndReason",
    "Finding",
    "Fisher",
    "GaussNewtonFlow",
    "Growing",
    "Kronecker",
    "LeastSquaresResult",
    "ModelSearch",
    "Points",
    "Progress",
    "Run",
    "Search",
    "Settlement",
    "StepReport",
    "StopReason",
    "Storage",
    "Subsets",
    "check",
    "least_squares",
]


def __getattr__(name: str) -> Any:
    # The checks are imported at their first use: a training run does without.
    if name in ("CheckReport", "Finding", "check"):
        from krylov_descent import checking

        return getattr(checking, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
