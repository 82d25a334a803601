"""Nonlinear conjugate gradients: Polak–Ribière+ (Nocedal & Wright 2006, section 5.2) with a strong Wolfe search.

Letters: θ [P], f and g on A, p the direction, α the step along it, β = max(0, gᵀ(g − g_before) / ‖g_before‖²).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from experiments.baselines.line_search import Trial, strong_wolfe
from experiments.baselines.remembered import drawn, read_vector, write_vectors
from krylov_descent.base import ClosureOptimizer
from krylov_descent.objective.closure import no_inference_mode
from krylov_descent.objective.consistency import check_consistency
from krylov_descent.objective.objective import Objective, relative_noise
from krylov_descent.report import StepReport, StopReason
from krylov_descent.safety.atomic import RestoreOnError
from krylov_descent.safety.footprint import Footprint
from krylov_descent.samples.interface import SamplePolicy, StepSets
from krylov_descent.stepping.gradient_pass import require_finite
from krylov_descent.stepping.step_log import StepLog
from krylov_descent.vectors.parameters import ParameterVector

_GROWTH = 10.0  # of the first trial over the last step


class NonlinearCG(ClosureOptimizer):
    """Nonlinear conjugate gradients on the whole of A: first order, without a learning rate, never uphill.

    Closures and sets are those of KSD, of which only A is used. A step costs as many gradients as its line search
    tries, usually one to three: the gradient where one search ends is where the next begins, unless the parameters,
    the closure's code or the weight decay were changed in between. What the closure evaluates must stay the same.

    ``inner_evaluations`` of its reports counts trials; phases are "gradient" and "search".

    Args:
        params: parameters or parameter groups; a group may have its own ``weight_decay``.
        weight_decay: c of ½·c·‖θ‖², per group.

    Example:
        >>> import torch
        >>> from experiments.baselines import NonlinearCG
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))
        >>> optimizer = NonlinearCG([w])
        >>> for _ in range(10):
        ...     report = optimizer.step(lambda: w[0] ** 2 + 10 * w[1] ** 2)
        >>> report.search_loss_after < 1e-12
        True
    """

    def __init__(self, params: ParamsT, *, weight_decay: float = 0.0) -> None:
        self._identity: tuple[object, ...] | None = None
        super().__init__(params, weight_decay)

    def step(  # type: ignore[override]
        self, closure: Callable[..., Any], sets: SamplePolicy | None = None
    ) -> StepReport:
        """One line search.

        Args:
            closure: as for KSD; the loss alone will do.
            sets: draws A. Without, it is whatever the closure evaluates.

        Returns:
            What happened; ``float(report)`` is the loss before the step.

        Raises:
            ValueError: the closure cannot be used, with the remedy; everything is then as before.
        """
        no_inference_mode()
        clock, parameters = StepLog(self._comm), self._parameters()
        numbers = dict(self.state.get(self._first_parameter(), {}))
        iteration = int(numbers.get("iteration", 0))
        theta = parameters.read()
        footprint = Footprint(parameters.device)
        atomic = RestoreOnError(parameters, lambda: theta, self.state, footprint)
        with atomic, torch.enable_grad(), self._full_precision():
            objective = self._objective(closure, sets, parameters, footprint)
            draw = drawn(sets, iteration, 1)
            if iteration == 0:
                check_consistency(objective, draw, curvature_of_outputs=False)
            start, p, identity = self._start(objective, draw, numbers)
            grad_norm = float(torch.linalg.vector_norm(start.g))
            require_finite(start.f, grad_norm)
            clock.lap("gradient")
            search = _Search(objective, draw, start)
            if grad_norm > 0:
                search.run(p, numbers.get("last"))
            found = search.found
            parameters.write(start.x if found is None else found.x)
            clock.lap("search")
            self._remember(parameters, iteration + 1, search)
        self._identity = identity
        return StepReport(
            iteration=iteration,
            loss=start.f,
            search_loss_before=start.f,
            search_loss_after=start.f if found is None else found.f,
            grad_norm=grad_norm,
            krylov_dim=0,
            ritz_values=(),
            inner_iterations=int(found is not None),
            inner_evaluations=search.trials,
            stop_reason=search.reason,
            accepted=True,
            seconds=clock.seconds,
            sample_gradients=objective.sample_gradients,
            orthogonality_error=0.0,
            set_sizes={"A": draw.sizes["A"]} if "A" in draw.sizes else {},
            preconditioner="none",
        )

    def _needs_outputs(self) -> bool:
        return False

    def _start(
        self, objective: Objective, draw: StepSets, numbers: dict[str, Any]
    ) -> tuple[Trial, Tensor | None, tuple[object, ...]]:
        """f and g at θ, from the last search if they hold still; its direction for this one; and what they hold for."""
        parameters = objective.parameters
        identity = (objective.workspace.closure, *parameters.decay)
        theta = parameters.read()
        x, g, p = (
            read_vector(self.state, parameters, key, partial=False) for key in ("point", "gradient", "direction")
        )
        if x is None or g is None or not torch.equal(x, theta) or self._identity not in (None, identity):
            p = g = None
        if g is not None and draw.covers_all:
            return Trial(0.0, float(numbers["loss"]), math.nan, theta, g), p, identity
        losses, g = objective.value_and_gradient(draw.a)
        return Trial(0.0, losses.mean, math.nan, theta, g), p, identity

    def _remember(self, parameters: ParameterVector, iteration: int, search: _Search) -> None:
        """Where the next search begins, and its direction."""
        start, found = search.start, search.found
        here = start if found is None else found
        direction = None
        numbers: dict[str, Any] = {"iteration": iteration, "loss": here.f}
        if found is not None:
            fall = float(torch.dot(found.g, found.g)) - float(torch.dot(found.g, start.g))
            beta = max(0.0, fall / float(torch.dot(start.g, start.g)))
            direction = search.p.mul(beta).sub_(found.g)
            numbers["last"] = (found.alpha, search.slope)
        write_vectors(self.state, parameters, {"point": here.x, "gradient": here.g, "direction": direction})
        self.state[self._first_parameter()].update(numbers)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is of other parameters.
        return {**super().__getstate__(), "_identity": None}


class _Search:
    """The search along p, and along −g where p fails or is no descent."""

    def __init__(self, objective: Objective, draw: StepSets, start: Trial) -> None:
        self._objective, self._draw = objective, draw
        self.start, self.p, self.slope = start, -start.g, 0.0
        self.found: Trial | None = None
        self.reason = StopReason.ZERO_GRADIENT
        self.trials = 0
        self._finite = 0

    def run(self, p: Tensor | None, last: tuple[float, float] | None) -> None:
        """Search from the first trial that the last search's α and slope suggest."""
        parameters = self._objective.parameters
        noise = relative_noise(parameters.params[0].dtype) * abs(self.start.f)
        for direction in (self.p,) if p is None else (p, self.p):
            slope = float(torch.dot(self.start.g, direction))
            if not -math.inf < slope < 0:
                continue
            # The same first-order change as last time (N&W section 3.5), with a bound; at first a step of length one.
            alpha = min(1.0, 1 / math.sqrt(-slope)) if last is None else last[0] * min(last[1] / slope, _GROWTH)
            self.p, self.slope = direction, slope
            self.found, exact = strong_wolfe(self._trial, replace(self.start, slope=slope), alpha, noise)
            if self.found is not None:
                self.reason = StopReason.CONVERGED if exact else StopReason.MAX_EVALUATIONS
                return
        self.reason = StopReason.NOISE if self._finite else StopReason.NON_FINITE

    def _trial(self, alpha: float) -> Trial:
        self.trials += 1
        x = torch.add(self.start.x, self.p, alpha=alpha)
        self._objective.parameters.write(x)
        losses, g = self._objective.value_and_gradient(self._draw.a)
        here = Trial(alpha, losses.mean, float(torch.dot(g, self.p)), x, g)
        self._finite += here.finite
        return here
