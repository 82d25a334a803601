"""Notices the commonest misuse: a step on another mini-batch each time, without sets."""

from __future__ import annotations

import math
import sys
import warnings

from krylov_descent.report import StepReport

_IN_A_ROW = 3


class Continuity:
    """Notices steps on another mini-batch each time, without sets: the loss differs at the same weights."""

    def __init__(self) -> None:
        self._after, self._left_at, self._changes = math.nan, [0], 0

    def see(self, report: StepReport, began_at: list[int], left_at: list[int]) -> None:
        """Compare the loss before a step with that after the last one; versions tell whether the weights are the same.

        One change may be on purpose, as are new points every few steps; the third in a row is warned of, once.
        """
        scale = max(abs(report.loss), abs(self._after))  # NaN at first
        differs = began_at == self._left_at and report.accepted and abs(report.loss - self._after) > 1e-3 * scale
        self._changes = self._changes + 1 if differs else min(self._changes, 0)
        if self._changes == _IN_A_ROW:
            self._changes = -sys.maxsize
            warnings.warn(
                f"The loss differs at the same weights: it was {self._after:.6g} after the last step, and is "
                f"{report.loss:.6g} now. If each step has another mini-batch, let the optimizer draw its own sets: "
                "step(closure, loader) with closure(batch).",
                stacklevel=4,
            )
        self._after, self._left_at = report.search_loss_after, left_at
