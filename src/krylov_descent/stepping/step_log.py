"""The clock and the report of a step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from krylov_descent.distributed import Comm, RankError, added
from krylov_descent.report import StepReport
from krylov_descent.stepping.gradient_pass import GradientPass
from krylov_descent.stepping.search_result import SearchResult

_PHASES = ("gradient", "basis", "search")


class StepLog:
    """Context of a step: measures seconds by phase and bytes sent, and adds the phase to errors of ranks."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self._sent = comm, comm.sent
        self.seconds: dict[str, float] = {}
        self._phase = 0
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Record the end of a phase."""
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last, self._phase = now, self._phase + 1

    def __enter__(self) -> StepLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, RankError):
            raise error.during(_PHASES[min(self._phase, len(_PHASES) - 1)]) from error.__cause__

    def report(
        self, at: GradientPass, found: SearchResult, details: Mapping[str, float] | None = None, **more: Any
    ) -> StepReport:
        """Return the report of the step; ``more`` holds the fields on the method's subspace."""
        return StepReport(
            iteration=at.key.iteration,
            loss=at.losses.mean,
            search_loss_before=found.before,
            search_loss_after=found.after,
            grad_norm=at.grad_norm,
            inner_iterations=found.iterations,
            inner_evaluations=found.evaluations,
            stop_reason=found.stop_reason,
            accepted=at.accepted,
            seconds=dict.fromkeys(_PHASES, 0.0) | self.seconds,
            sample_gradients=added(self._comm, at.objective.sample_gradients),
            set_sizes=at.sets.sizes,
            notes=tuple(at.notes),
            bytes_sent=self._comm.sent - self._sent,
            coefficients=found.coefficients,
            details={**(details or {}), **at.details},
            **more,
        )
