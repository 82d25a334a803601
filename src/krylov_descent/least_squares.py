"""``least_squares``: the minimum of ½·Σ r(x)² over tensors or pytrees, as scipy.optimize.least_squares returns it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.utils import _pytree as pytree

from krylov_descent.krylov.search import Search
from krylov_descent.optimizer import KSD
from krylov_descent.report import StepReport, StopReason

_DIMENSION = 50  # of the subspace of a step: up to so many unknowns, it is the whole space
_ITERATIONS = 12  # of BFGS in a step
_FLOOR = 64  # of the curvatures, in units of ε; with the square root of ε, badly scaled unknowns take many more steps
_STEPS = 1000  # at most


@dataclass(frozen=True, eq=False)
class LeastSquaresResult:
    """The result of ``least_squares``.

    Attributes:
        x: the point found, in the structure of ``x0``.
        fun: the residuals there, as ``residuals`` returns them.
        cost: ½·Σ r².
        success: whether a criterion of convergence was met.
        message: why the run ended; empty before its end.
        nit: the number of steps.
        nfev: the number of calls of ``residuals``.

    Example:
        >>> from krylov_descent import least_squares
        >>> result = least_squares(lambda x: x - 1, torch.zeros(3))
        >>> result.success, result.cost
        (True, 0.0)
    """

    x: Any
    fun: Any
    cost: float
    success: bool
    message: str
    nit: int
    nfev: int


def least_squares(
    residuals: Callable[[Any], Any],
    x0: Any,
    *,
    tol: float = 1e-8,
    callback: Callable[[LeastSquaresResult], object] | None = None,
) -> LeastSquaresResult:
    """Minimise ½·Σ r(x)² by ``KSD``, with derivatives from autograd and without bounds.

    Up to 50 unknowns, each step searches the whole space; beyond, a Krylov subspace of 50 dimensions.

    Args:
        residuals: takes x in the structure of ``x0`` and returns r, a tensor or a pytree of tensors.
        x0: the start, a floating-point tensor or a pytree of them; it is left unchanged.
        tol: the run ends after a step that lowers the cost by at most this fraction of it, or moves every unknown
            by at most this fraction of it.
        callback: called after each step with the result so far, at the price of one more call of ``residuals``. It
            ends the run by raising ``StopIteration``.

    Raises:
        ValueError: ``x0``, the residuals or ``tol`` cannot be used; the message has the remedy.

    Example:
        >>> from krylov_descent import least_squares
        >>> t = torch.linspace(0, 4, 30, dtype=torch.float64)
        >>> y = 2.5 * torch.exp(-1.3 * t)
        >>> x0 = {"size": torch.ones((), dtype=torch.float64), "rate": torch.zeros((), dtype=torch.float64)}
        >>> result = least_squares(lambda x: x["size"] * torch.exp(-x["rate"] * t) - y, x0)
        >>> result.success, round(float(result.x["size"]), 6), round(float(result.x["rate"]), 6)
        (True, 2.5, 1.3)
    """
    if not 0 <= tol < 1:
        raise ValueError(f"tol={tol!r}: must be a number in [0, 1), 1e-8 for example.")
    problem = _Problem(residuals, x0)
    floor = _FLOOR * torch.finfo(problem.unknowns[0].dtype).eps
    # In a curved valley the model predicts far less than there is to gain, so a search stops later than the run.
    search = Search(iterations=_ITERATIONS, evaluations=2 * _ITERATIONS, tolerance=tol / 100, floor=floor)
    optimizer = KSD(problem.unknowns, krylov_dim=_DIMENSION, preconditioner=None, search=search)
    nit = 0
    while True:
        before, problem.finite = parameters_to_vector(problem.unknowns).detach(), True
        report, nit = optimizer.step(problem.closure), nit + 1
        success, message = _end(report, problem.finite, before, parameters_to_vector(problem.unknowns).detach(), tol)
        if not message and nit == _STEPS:
            message = f"{nit} steps were taken without meeting tol={tol!r}. Call least_squares again from x."
        if message or callback is not None:
            result = problem.result(success, message, nit)
        if callback is not None:
            try:
                callback(result)
            except StopIteration:
                return result if message else replace(result, message="The callback ended the run.")
        if message:
            return result


def _end(report: StepReport, finite: bool, before: Tensor, x: Tensor, tol: float) -> tuple[bool, str]:
    """Return whether a criterion of convergence was met, and why the run ends; "" if it goes on."""
    decrease, why = report.search_loss_before - report.search_loss_after, report.stop_reason
    if why is StopReason.ZERO_GRADIENT:
        return True, "The gradient is zero."
    if decrease <= 0 and (not finite or why is StopReason.MAX_EVALUATIONS):
        return False, "No lower cost was found. Look for logarithms, divisions, overflow or kinks in the residuals."
    if decrease <= 0 and why is not StopReason.CONVERGED:
        return True, "No step lowers the cost any more: it has reached the rounding error of the dtype."
    if decrease <= tol * report.search_loss_before:
        return True, f"The last step lowered the cost by less than tol={tol!r} of it."
    if bool(((x - before).abs() <= tol * x.abs()).all()):
        return True, f"The last step moved every unknown by less than tol={tol!r} of it."
    return False, ""


class _Problem:
    """The unknowns, and the closure of their residuals for an optimizer."""

    def __init__(self, residuals: Callable[[Any], Any], x0: Any) -> None:
        leaves, self._structure = pytree.tree_flatten(x0)
        _require_real("x0", leaves)
        if len(kinds := {f"{leaf.dtype} on {leaf.device}" for leaf in leaves}) > 1:
            raise ValueError(f"x0 mixes {' and '.join(sorted(kinds))}. Convert its tensors to one dtype and device.")
        self.unknowns = [leaf.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for leaf in leaves]
        self.finite = True  # the costs of the last step
        self._residuals, self._nfev = residuals, 0
        with torch.enable_grad():
            loss, r = self.closure()
        slopes = torch.autograd.grad(loss, self.unknowns, allow_unused=True) if loss.requires_grad else ()
        if all(slope is None for slope in slopes):
            raise ValueError(
                "The residuals do not depend on x, as far as autograd sees. Compute them by torch operations from the "
                "x that is passed, without detach(), item(), torch.no_grad() or torch.inference_mode()."
            )
        if not self.finite:
            raise ValueError(
                f"The residuals at x0 have {int((~r.isfinite()).sum())} of {r.numel()} entries that are not finite, "
                "and the sum of their squares is not. Pass an x0 where it is, or scale the residuals."
            )

    def _evaluate(self) -> tuple[Any, list[Tensor]]:
        self._nfev += 1
        found = self._residuals(pytree.tree_unflatten(self.unknowns, self._structure))
        leaves = pytree.tree_leaves(found)
        _require_real("The result of residuals", leaves)
        return found, leaves

    def closure(self) -> tuple[Tensor, Tensor]:
        """Return ½·Σ r² and r [m]."""
        r = torch.cat([z.reshape(-1) for z in self._evaluate()[1]])
        loss = r.square().sum() / 2
        self.finite &= bool(loss.isfinite())
        return loss, r

    def result(self, success: bool, message: str, nit: int) -> LeastSquaresResult:
        """Return the result at the present point."""
        with torch.enable_grad():  # the residuals may differentiate inside
            found, leaves = self._evaluate()
        cost = sum(float(z.detach().square().sum()) for z in leaves) / 2
        fun = pytree.tree_map(lambda z: z.detach().clone(), found)
        x = pytree.tree_unflatten([p.detach().clone() for p in self.unknowns], self._structure)
        return LeastSquaresResult(x, fun, cost, success, message, nit, self._nfev)


def _require_real(what: str, leaves: list[Any]) -> None:
    """Require floating-point tensors with at least one number."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            found = f"a tensor of {leaf.dtype}" if isinstance(leaf, Tensor) else f"{leaf!r} ({type(leaf).__name__})"
            raise ValueError(f"{what} has {found}. Only real floating-point tensors can be used: convert it.")
    if not sum(leaf.numel() for leaf in leaves):
        raise ValueError(f"{what} is empty. Give at least one number.")
