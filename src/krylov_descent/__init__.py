"""Krylov Subspace Descent (Vinyals & Povey 2011) for PyTorch: second order, no learning rate, no damping."""

from krylov_descent.budget import Storage
from krylov_descent.data import Subsets
from krylov_descent.optimizer import KSD, PAPER
from krylov_descent.precondition import Fisher
from krylov_descent.progress import Progress
from krylov_descent.report import Settlement, StepReport, StopReason
from krylov_descent.run import Best, EndReason, Run
from krylov_descent.search import Search

__version__ = "0.1.0"

__all__ = [
    "KSD",
    "PAPER",
    "Best",
    "EndReason",
    "Fisher",
    "Progress",
    "Run",
    "Search",
    "Settlement",
    "StepReport",
    "StopReason",
    "Storage",
    "Subsets",
]
