"""A run: steps until a reason to end, with the best point kept."""

from __future__ import annotations

import enum
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from krylov_descent.distributed import Comm
from krylov_descent.objective.objective import relative_noise
from krylov_descent.progress import Tell, step_bar
from krylov_descent.report import Settlement, StepReport


class EndReason(enum.Enum):
    """Says why a run ended; ``reason.remedy`` explains it.

    Example:
        >>> from krylov_descent import EndReason
        >>> EndReason.MAX_STEPS.remedy
        'All steps were taken. Call run again to continue from here.'
    """

    MAX_STEPS = "max-steps"
    SECONDS = "seconds"
    GRADIENT = "gradient"
    PATIENCE = "patience"
    STUCK = "stuck"

    @property
    def remedy(self) -> str:
        """Return the meaning of the reason, and a way to lower the loss further."""
        return _REMEDY[self]


_REMEDY: Mapping[EndReason, str] = {
    EndReason.MAX_STEPS: "All steps were taken. Call run again to continue from here.",
    EndReason.SECONDS: "The time was used up. Call run again to continue from here.",
    EndReason.GRADIENT: "The gradient's norm is at most gtol: converged.",
    EndReason.PATIENCE: (
        "The loss did not improve for `patience` steps: converged for these sets. Larger sets (Subsets(fraction=...)), "
        "a larger krylov_dim (KSD), more rows (GaussNewtonFlow) or float64 may lower it further."
    ),
    EndReason.STUCK: (
        "Several steps in a row found no lower loss with a finite gradient: converged to the dtype's rounding error. "
        "In float32, continue in float64 (model.double() and a new optimizer)."
    ),
}

#: Steps in a row without a decrease that end a run: one may fail because of its last step or its damping.
NOTHING_FOUND = 5


def in_vain(report: StepReport, before: int) -> int:
    """Return the number of steps in a row without a decrease, up to this one."""
    return 0 if report.search_loss_after < report.search_loss_before else before + 1


class Steps(Protocol):
    """The interface of an optimizer that a run needs."""

    on_progress: Tell | None

    @property
    def comm(self) -> Comm:
        """The communicator of the ranks that step together."""
        ...

    def step(self, closure: Any, sets: Any = None) -> Any:
        """Take one step."""
        ...

    def trained(self) -> list[Tensor]:
        """Return the trained parameters."""
        ...


@dataclass(frozen=True, eq=False)
class Best:
    """Holds the best point of a run.

    Attributes:
        value: the loss on A there, or the value of ``monitor``.
        steps: the number of steps before it.
        parameters: copies of the parameters, in the optimizer's order.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> run = KSD([w]).run(lambda: (w.square().mean(), w), max_steps=1)
        >>> for report in run: pass
        >>> run.best.steps
        1
    """

    value: float
    steps: int
    parameters: tuple[Tensor, ...]


class Run:
    """Takes steps as it is iterated over, and yields their reports; ``optimizer.run`` makes it.

    Where the loop over it ends or is left by ``break``, the last step is judged (``settle``), unless a step raised. If
    that fails after a ``break``, a warning says so. A further loop goes on where the last one stopped. On several ranks
    call ``settle`` on all of them after a ``break``: a run does not, as an error in the loop of one rank looks alike.

    Attributes:
        reason: why the run ended; None before its end, and after a ``break``.
        steps: the number of steps taken.
        loss: the last known loss on A; after the loop, the loss at the final point.
        best: the best point so far, or None.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> run = KSD([w]).run(lambda: (w.square().mean(), w), max_steps=3, gtol=1e-3)
        >>> for report in run: pass
        >>> run.reason
        <EndReason.GRADIENT: 'gradient'>
    """

    def __init__(
        self,
        optimizer: Steps,
        closure: Callable[..., Any],
        sets: Any,
        *,
        max_steps: int | None,
        seconds: float | None,
        gtol: float,
        patience: int | None,
        monitor: Callable[[], float] | None,
        progress: bool,
    ) -> None:
        for name, value, least in (("max_steps", max_steps, 0), ("seconds", seconds, 0), ("patience", patience, 1)):
            if value is not None and not value >= least:
                raise ValueError(f"{name}={value!r}: must be at least {least}, or None for no such limit.")
        if not gtol >= 0:
            raise ValueError(f"gtol={gtol!r}: must be a number ≥ 0.")
        self._optimizer, self._closure, self._sets = optimizer, closure, sets
        self._max_steps = math.inf if max_steps is None else max_steps
        self._seconds = math.inf if seconds is None else seconds
        self._patience = math.inf if patience is None else patience
        self._gtol, self._monitor, self._progress = gtol, monitor, progress
        self._noise = relative_noise(optimizer.trained()[0].dtype)
        self._stale, self._weighed = 0, -1
        self._draw: float | None = None
        self.reason: EndReason | None = None
        self.steps = 0
        self.loss = math.nan
        self.best: Best | None = None

    def __iter__(self) -> Iterator[StepReport]:
        loop: object = None
        try:
            for report in self._reports():
                loop = id(sys._getframe().f_back)
                yield report
        except GeneratorExit:  # a break, if it is closed where the loop stands; else it is collected at any later time
            if loop == id(sys._getframe().f_back):
                self._settle_at_close()
            raise
        self._settle()

    def _reports(self) -> Iterator[StepReport]:
        start = time.perf_counter()
        nothing = 0
        self.reason = None
        with step_bar(self._optimizer, self._max_steps - self.steps, self._seconds, shown=self._progress) as show:
            while self.reason is None:
                elapsed = self._agreed(time.perf_counter() - start)
                if self.steps >= self._max_steps or elapsed >= self._seconds:
                    self.reason = EndReason.MAX_STEPS if self.steps >= self._max_steps else EndReason.SECONDS
                    break
                here = self._copy() if self._monitor is None else ()
                report: StepReport = self._optimizer.step(self._closure, self._sets)
                self.loss = report.loss
                if self._monitor is None and report.details.get("draw") != self._draw:
                    self.best = None  # losses on other points do not compare
                self._draw = report.details.get("draw")
                if self._monitor is not None:
                    self._weigh(self._agreed(float(self._monitor())), self.steps + 1, None)
                elif report.accepted:  # otherwise the step began at an earlier point, already compared
                    self._weigh(report.loss, self.steps, here)
                else:
                    self._stale += 1
                del here
                self.steps += 1
                nothing = 0 if self._sets is not None else in_vain(report, nothing)
                if report.grad_norm <= self._gtol:
                    self.reason = EndReason.GRADIENT
                elif nothing >= NOTHING_FOUND:
                    self.reason = EndReason.STUCK
                elif self._stale >= self._patience:
                    self.reason = EndReason.PATIENCE
                show(report)
                yield report

    def restore_best(self) -> Best:
        """Restore the parameters of the best point.

        The optimizer notices the change, and does not judge its last step by it.

        Raises:
            ValueError: no step was taken yet.
        """
        if self.best is None:
            raise ValueError("The run has no best point: no step was taken. Iterate over it first.")
        with torch.no_grad():
            for p, x in zip(self._optimizer.trained(), self.best.parameters, strict=True):
                p.copy_(x)
        return self.best

    def __str__(self) -> str:
        why = "not ended" if self.reason is None else f"{self.reason.value}: {self.reason.remedy}"
        best = "" if self.best is None else f" | best {self.best.value:.6g} after {self.best.steps}"
        return f"{self.steps} steps | loss {self.loss:.6g}{best} | {why}"

    def _settle(self) -> None:
        """Compute the final loss, and with sets judge the last step."""
        settle = getattr(self._optimizer, "settle", None)
        if self.steps == 0 or settle is None:
            return
        settlement: Settlement = settle(self._closure, self._sets)
        self.loss = settlement.loss
        if self._monitor is None and settlement.accepted:
            self._weigh(settlement.loss, self.steps, None)

    def _settle_at_close(self) -> None:
        """Settle with a warning in place of an error, which Python would only print where a loop is left."""
        if self._optimizer.comm.ranks > 1:
            return
        try:
            self._settle()
        except Exception as error:
            warnings.warn(
                f"The last step of the run was not judged, because settling it raised {error!r}. Remove the cause, and "
                "call optimizer.settle(closure, sets).",
                stacklevel=3,
            )

    def _weigh(self, value: float, steps: int, point: tuple[Tensor, ...] | None) -> None:
        """Keep a point, the present one by default, if it is the best so far; count points without improvement."""
        if steps == self._weighed:
            return  # by settling, before this loop
        self._weighed = steps
        known = math.inf if self.best is None else self.best.value
        self._stale = 0 if value < known - self._noise * abs(known) or math.isinf(known) else self._stale + 1
        if self.best is None or value < known:
            self.best = Best(value, steps, self._copy() if point is None else point)

    def _copy(self) -> tuple[Tensor, ...]:
        return tuple(p.detach().clone() for p in self._optimizer.trained())

    def _agreed(self, value: float) -> float:
        """Return the largest value of all ranks, so that they end at the same step."""
        return float(self._optimizer.comm.max(torch.tensor(value, dtype=torch.float64, device="cpu")))
