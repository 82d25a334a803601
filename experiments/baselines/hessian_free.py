"""Hessian-free optimization (Martens 2010), by the rules of his published code.

Letters: θ [P], g and f on A, B the curvature matrix on the curvature set, λ the damping, x the iterates of CG on
(B + λI)x = −g, q(x) = gᵀx + ½xᵀBx the model, M the preconditioner, c the weight decay.

What of the code differs from the paper, and is followed here: M is (diag F + λ + c)^¾ with diag F on all of A; ρ is
measured at the iterate that backtracking chose, with f on the curvature set and g on A, and without λ in q; CG starts
from 0.95 of the last solution; backtracking goes on while the earlier iterate is no worse.

Deviations from the code:
1. The curvature set is drawn at random at each step, not the next of a fixed cut.
2. A loss that is not finite counts as infinite; there NaN passes for better.
3. A direction with gᵀx > 0 may not raise f: Armijo's bound is then f(θ) itself.
4. q(x) is what CG knows it to be, φ(x) − ½λ‖x‖², and not another product.
5. The last of the 60 rates is not evaluated, as it would be rejected in any case.
6. Where no rule of a layer is exact, diag F is an unbiased estimate (krylov_descent/preconditioners/fisher.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from experiments.baselines.backtracking import Nearby, armijo, backtrack, new_damping
from experiments.baselines.conjugate_gradient import CGResult, Iterate, conjugate_gradient
from experiments.baselines.remembered import drawn, read_vector, write_vectors
from krylov_descent.base import ClosureOptimizer, whole
from krylov_descent.curvature import CURVATURES, CurvatureProduct
from krylov_descent.objective.closure import no_inference_mode
from krylov_descent.objective.consistency import check_consistency
from krylov_descent.objective.objective import BatchLosses, Objective
from krylov_descent.preconditioners.fisher import Fisher
from krylov_descent.report import StepReport, StopReason
from krylov_descent.safety.atomic import RestoreOnError
from krylov_descent.safety.footprint import Footprint
from krylov_descent.samples.interface import SamplePolicy, StepKey, StepSets
from krylov_descent.stepping.gradient_pass import pass_with_statistics, require_finite
from krylov_descent.stepping.step_log import StepLog

_QUARTER = 4  # a curvature set of A/4 if the sets leave it open: 5,000 of the 20,000 of CURVES
_POWER = 0.75  # of the preconditioner


@dataclass(frozen=True)
class HessianFreeReport(StepReport):
    """One step of Hessian-free optimization: ``StepReport`` with CG in the place of the search.

    ``inner_iterations`` counts those of CG, ``inner_evaluations`` forward passes over A, the losses of the search are f
    on A, and the phases are "gradient", "cg" and "backtracking". There is no basis, so no Ritz values.

    Attributes:
        damping: λ of this step.
        rho: decrease of f over that of the model; −inf if f rose on the curvature set, NaN if there was no step.
        rate: the fraction of the chosen iterate that was taken; 0 for none.
    """

    damping: float = math.nan
    rho: float = math.nan
    rate: float = 0.0

    def __str__(self) -> str:
        return (
            f"step {self.iteration} | loss {self.search_loss_before:.6g} → {self.search_loss_after:.6g} | "
            f"|g| {self.grad_norm:.3g} | CG {self.inner_iterations}, {self.stop_reason.value} | λ {self.damping:.3g} | "
            f"ρ {self.rho:.3g} | rate {self.rate:.3g} | {sum(self.seconds.values()):.2f} s"
        )


class HessianFree(ClosureOptimizer):
    """Hessian-free optimization (Martens 2010): a damped Gauss–Newton step by conjugate gradients.

    Closures and sets are those of KSD. A serves the gradient and every comparison of losses, B the curvature products;
    ``Subsets(..., fraction=0.25)`` is what Martens had on CURVES.

    Args:
        params: parameters or parameter groups; a group may have its own ``weight_decay``.
        damping: λ of the first step. It adapts, but slowly: tune it.
        curvature: "ggn", or "hessian", at whose first direction of negative curvature CG ends.
        preconditioner: whether CG is preconditioned by (diag F + λ + c)^¾.
        cg_iterations: the cap on CG.
        weight_decay: c of ½·c·‖θ‖², per group.
        warm_start: the share of the last CG solution that the next starts from.

    Example:
        >>> import torch
        >>> from experiments.baselines import HessianFree
        >>> w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        >>> x = torch.tensor([[1.0, 2.0], [3.0, -1.0]], dtype=torch.float64)
        >>> optimizer = HessianFree([w], damping=1e-6)
        >>> def closure():
        ...     r = x @ w - 1
        ...     return r.square().mean(), r
        >>> for _ in range(3):
        ...     report = optimizer.step(closure)
        >>> report.search_loss_after < 1e-12
        True
    """

    _KEPT = ("_damping", "_curvature", "_preconditioner", "_cg_iterations", "_warm_start")

    def __init__(
        self,
        params: ParamsT,
        *,
        damping: float = 45.0,
        curvature: Literal["ggn", "hessian"] = "ggn",
        preconditioner: bool = True,
        cg_iterations: int = 250,
        weight_decay: float = 0.0,
        warm_start: float = 0.95,
    ) -> None:
        if not 0 < damping < math.inf:
            raise ValueError(f"damping={damping!r}: must be a number > 0; Martens' is 45.")
        if curvature not in ("ggn", "hessian"):
            raise ValueError(f"curvature={curvature!r}: must be 'ggn' or 'hessian'.")
        if whole("cg_iterations", cg_iterations) < 1:
            raise ValueError(f"cg_iterations={cg_iterations!r}: must be at least 1; Martens' is 250.")
        if not 0 <= warm_start <= 1:
            raise ValueError(f"warm_start={warm_start!r}: must be in [0, 1]; Martens' is 0.95.")
        self._damping = float(damping)
        self._curvature = curvature
        self._preconditioner = Fisher() if preconditioner else None
        self._cg_iterations = cg_iterations
        self._warm_start = float(warm_start)
        super().__init__(params, weight_decay)

    def step(  # type: ignore[override]
        self, closure: Callable[..., Any], sets: SamplePolicy | None = None
    ) -> HessianFreeReport:
        """One step.

        Args:
            closure: as for KSD: ``closure(batch)`` with sets, ``closure()`` without, returning loss and outputs.
            sets: draws A and B. Without, both are whatever the closure evaluates.

        Returns:
            What happened; ``float(report)`` is the loss before the step.

        Raises:
            ValueError: the closure cannot be used, with the remedy; everything is then as before.
        """
        no_inference_mode()
        parameters = self._parameters()
        numbers = self.state.get(self._first_parameter(), {})
        iteration = int(numbers.get("iteration", 0))
        damping = float(numbers.get("damping", self._damping))
        theta = parameters.read()
        footprint = Footprint(parameters.device)
        atomic = RestoreOnError(parameters, lambda: theta, self.state, footprint)
        with atomic, torch.enable_grad(), self._full_precision():
            objective = self._objective(closure, sets, parameters, footprint)
            draw = drawn(sets, iteration, _QUARTER)
            if iteration == 0:
                check_consistency(objective, draw, curvature_of_outputs=self._curvature != "hessian")
            last = read_vector(self.state, parameters, "cg_solution", partial=True)
            report, last = self._step(objective, draw, iteration, damping, last)
            write_vectors(self.state, parameters, {"cg_solution": last})
            self.state[self._first_parameter()].update(
                iteration=iteration + 1, damping=new_damping(damping, report.rho) if report.grad_norm > 0 else damping
            )
        return report

    def _needs_outputs(self) -> bool:
        return self._curvature != "hessian"

    def _step(
        self, objective: Objective, draw: StepSets, iteration: int, damping: float, last: Tensor | None
    ) -> tuple[HessianFreeReport, Tensor | None]:
        """The step from the last CG solution, and the next one."""
        clock, parameters = StepLog(self._comm), objective.parameters
        losses, g, inverse = self._pass_over_A(objective, draw, iteration, damping)
        grad_norm = float(torch.linalg.vector_norm(g))
        require_finite(losses.mean, grad_norm)
        clock.lap("gradient")

        solution = CGResult((Iterate(0, parameters.zeros(), 0.0),), 0, StopReason.ZERO_GRADIENT)
        if grad_norm > 0:
            start = None if last is None or self._warm_start == 0 else last * self._warm_start
            solution = self._solve(objective, draw, g, damping, start, inverse)
            last = solution.iterates[-1].x if math.isfinite(solution.iterates[-1].value) else None
        clock.lap("cg")

        reason, rho, rate, after = solution.stop_reason, math.nan, 0.0, losses.mean
        theta = objective.point()
        nearby = Nearby(objective, draw, theta, losses.mean)
        if bool(solution.iterates[-1].x.any()):  # zero if CG ended where it began
            (_, x, phi), value = backtrack(nearby.on_A, solution.iterates)
            rho = nearby.rho(x, value, phi - 0.5 * damping * float(torch.dot(x, x)))
            slope = float(torch.dot(g, x))
            rate, after = armijo(lambda rate: nearby.on_A(x, rate), losses.mean, slope, value)
            parameters.write(theta.add(x, alpha=rate) if rate else theta)
            if rate == 0:
                reason = StopReason.NOISE if nearby.finite else StopReason.NON_FINITE
        clock.lap("backtracking")

        report = HessianFreeReport(
            iteration=iteration,
            loss=losses.mean,
            search_loss_before=losses.mean,
            search_loss_after=after,
            grad_norm=grad_norm,
            krylov_dim=0,
            ritz_values=(),
            inner_iterations=solution.iterations,
            inner_evaluations=nearby.passes,
            stop_reason=reason,
            accepted=True,
            seconds=clock.seconds,
            sample_gradients=objective.sample_gradients,
            orthogonality_error=0.0,
            set_sizes={name: draw.sizes[name] for name in ("A", "B") if name in draw.sizes},
            preconditioner="none" if inverse is None else "fisher^0.75",
            damping=damping,
            rho=rho,
            rate=rate,
        )
        return report, last

    def _pass_over_A(
        self, objective: Objective, draw: StepSets, iteration: int, damping: float
    ) -> tuple[BatchLosses, Tensor, Tensor | None]:
        """f and g on A, and from the same pass the diagonal of M⁻¹."""
        if self._preconditioner is None:
            return *objective.value_and_gradient(draw.a), None
        start = functools.partial(self._preconditioner.gather, objective, StepKey(0, iteration))
        losses, g, fisher = pass_with_statistics(objective, draw.a, start)
        if not fisher.available:
            return losses, g, None
        parameters = objective.parameters
        M = fisher.diagonal(losses.total_weight, objective.comm)
        for c, part in zip(parameters.decay, parameters.views(M), strict=True):
            part.add_(damping + c)
        return losses, g, M.pow_(-_POWER)

    def _solve(
        self,
        objective: Objective,
        draw: StepSets,
        g: Tensor,
        damping: float,
        start: Tensor | None,
        inverse: Tensor | None,
    ) -> CGResult:
        """(B + λI)x = −g; the graphs of B live no longer than this."""
        buffers = torch.empty_like(g), torch.empty_like(g)
        curvature = CurvatureProduct(CURVATURES[self._curvature], objective, draw.b, out=buffers[0])
        return conjugate_gradient(
            lambda v: curvature(v).add_(v, alpha=damping),
            -g,
            start,
            None if inverse is None else (lambda r: torch.mul(r, inverse, out=buffers[1])),
            max_iterations=self._cg_iterations,
        )
