"""What a step tells its caller: why the search ended, and one frozen record of the whole step."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any


class StopReason(enum.Enum):
    """Why the search over the subspace ended; ``reason.remedy`` says what, if anything, to do about it.

    Example:
        >>> from krylov_descent import StopReason
        >>> StopReason.CONVERGED.remedy
        'Nothing to do: the minimum over the subspace was found.'
    """

    CONVERGED = "converged"
    NOISE = "noise"
    MAX_ITERATIONS = "max-iterations"
    MAX_EVALUATIONS = "max-evaluations"
    NON_FINITE = "non-finite"
    ZERO_GRADIENT = "zero-gradient"

    @property
    def remedy(self) -> str:
        """One sentence: what this outcome means for the next step."""
        return _REMEDY[self]


_REMEDY: Mapping[StopReason, str] = {
    StopReason.CONVERGED: "Nothing to do: the minimum over the subspace was found.",
    StopReason.NOISE: (
        "No further decrease can be told from rounding in this dtype; "
        "if every step ends so, training is finished or needs float64."
    ),
    StopReason.MAX_ITERATIONS: (
        "The cap on BFGS iterations was met; the best point seen was taken. "
        "Raise Search(iterations=...) if the loss still falls fast."
    ),
    StopReason.MAX_EVALUATIONS: (
        "The cap on evaluations was met; the best point seen was taken. "
        "Raise Search(evaluations=...) if the loss still falls fast."
    ),
    StopReason.NON_FINITE: (
        "The loss, its gradient or a curvature product was not finite, and no better finite point was found; "
        "the parameters are as before the step. Look for logarithms, divisions or overflow in the closure."
    ),
    StopReason.ZERO_GRADIENT: (
        "The gradient is zero: a stationary point, or no parameter influences the loss. "
        "Perturb the parameters if it is a saddle."
    ),
}
