"""DeepXDE (PyTorch backend) trained by KSD or GaussNewtonFlow: ``compile_ksd(model)`` in place of ``model.compile``.

``model.train`` then runs DeepXDE's own loop: callbacks, ``LossHistory`` and ``TrainState`` (so ``dde.saveplot``), the
display, ``model.save`` and ``model.restore`` are as with any optimizer. One iteration is one step.

Every evaluation is over all points of all loss terms: the loss of a PINN is a sum of means over different points, which
three sets could not divide. The loss is DeepXDE's own, and the residuals before its means are the outputs that a step
sees. So loss weights, any boundary condition, hard constraints, inverse problems, operator networks and
``dde.config.set_default_float`` work, and points may change between steps (``PDEPointResampler``, anchors).

Take enough points: steps soon make the residuals vanish at a handful of them, whatever the network does in between.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from krylov_descent.base import CurvatureOptimizer
from krylov_descent.flow.optimizer import GaussNewtonFlow
from krylov_descent.flow.sketch import why_not_flow
from krylov_descent.integrations._shared import LOGGER, Residuals, log_notes
from krylov_descent.optimizer import KSD
from krylov_descent.report import StepReport
from krylov_descent.run import NOTHING_FOUND, EndReason, in_vain

os.environ.setdefault("DDE_BACKEND", "pytorch")  # DeepXDE chooses at import, and prefers another

import deepxde

_VARIABLES = "external_trainable_variables"
# Each residual depends on one point. Operators, integrals and fractional derivatives mix points, so that every row of a
# sketch takes a backward pass.
_ORDINARY = (deepxde.data.PDE, deepxde.data.TimePDE)
_OF_KSD, _OF_FLOW = (set(inspect.signature(method).parameters) for method in (KSD, GaussNewtonFlow))


def compile_ksd(
    model: Any,
    *,
    loss: Any = "MSE",
    metrics: Sequence[Any] | None = None,
    loss_weights: Sequence[float] | None = None,
    external_trainable_variables: Any = None,
    verbose: int = 1,
    method: type[CurvatureOptimizer] | None = None,
    on_report: Callable[[StepReport], object] | None = None,
    **arguments: Any,
) -> CurvatureOptimizer:
    """Configure a model for training with KSD or GaussNewtonFlow; then ``model.train(iterations=...)``.

    Training ends early, with a warning, when five steps in a row find nothing better.

    Args:
        model: a ``dde.Model``.
        loss: as for ``model.compile``; should be convex in the residuals, as "MSE" is.
        metrics: as for ``model.compile``.
        loss_weights: as for ``model.compile``.
        external_trainable_variables: as for ``model.compile``. Unlike with DeepXDE's own optimizers, ``model.save``
            saves their values, and ``model.restore`` restores them.
        verbose: as for ``model.compile``.
        method: ``KSD`` or ``GaussNewtonFlow``. None chooses by the other arguments, if only one method takes them
            (``krylov_dim``: KSD; ``rows``: GaussNewtonFlow). Otherwise it chooses GaussNewtonFlow for the mean squared
            residuals of a ``dde.data.PDE`` or ``TimePDE`` in float64, for up to 100,000 parameters, if its sketch fits
            in memory (if ``verbose``, the log says which of the last three fails), and KSD elsewhere.
            docs/howto/integrations.md has figures.
        on_report: a function called with the ``StepReport`` of each step: a writer of ``krylov_descent.writers``, or
            ``reports.append``.
        **arguments: arguments of the method. An "l2" regularisation of the network becomes its ``weight_decay``.
            ``krylov_dim`` is 50 by default, as these networks are small and ill-conditioned: 14 seconds of one core end
            at a loss of 1.5e-3 with K = 20, of 2.8e-6 with 50 (examples/deepxde_poisson.py --method ksd --krylov-dim).

    Returns:
        The optimizer, also available as ``model.opt``.

    Raises:
        ValueError: the backend is not PyTorch, or the precision is mixed.

    Example:
        >>> import contextlib, io
        >>> import deepxde as dde
        >>> from krylov_descent.integrations.deepxde import compile_ksd
        >>> geometry = dde.geometry.Interval(0, 1)
        >>> def pde(x, u):
        ...     return dde.grad.hessian(u, x) + torch.pi**2 * torch.sin(torch.pi * x)
        >>> boundary = dde.icbc.DirichletBC(geometry, lambda x: 0, lambda x, on_boundary: on_boundary)
        >>> data = dde.data.PDE(geometry, pde, boundary, num_domain=32, num_boundary=2)
        >>> model = dde.Model(data, dde.nn.FNN([1, 16, 16, 1], "tanh", "Glorot uniform"))
        >>> with contextlib.redirect_stdout(io.StringIO()):  # DeepXDE prints as it goes
        ...     optimizer = compile_ksd(model, loss_weights=[1, 100])
        ...     history, state = model.train(iterations=30, display_every=10)
        >>> bool(sum(history.loss_train[-1]) < 1e-2 * sum(history.loss_train[0]))
        True
    """
    if deepxde.backend.backend_name != "pytorch":
        raise ValueError(
            f"DeepXDE runs with the backend {deepxde.backend.backend_name!r}, and krylov_descent is for PyTorch. "
            "Set DDE_BACKEND=pytorch before deepxde is imported."
        )
    if deepxde.config.mixed:
        raise ValueError(
            "DeepXDE is set to mixed precision, whose float16 rounds away the differences that steps compare. "
            "Use dde.config.set_default_float('float32') or 'float64'."
        )
    variables = external_trainable_variables or []
    variables = list(variables) if isinstance(variables, (list, tuple)) else [variables]
    groups: list[dict[str, Any]] = [{"params": list(model.net.parameters())}]
    kind, factor = model.net.regularizer or (None, 0.0)
    if kind == "l2":
        groups[0]["weight_decay"] = factor
    if variables:
        groups.append({"params": variables, "weight_decay": 0.0})
    functions = deepxde.losses.get(loss)
    if method is None:
        each = functions if isinstance(functions, list) else [functions]
        squares = all(function is deepxde.losses.mean_squared_error for function in each)
        ordinary = type(model.data) in _ORDINARY and squares and kind in (None, "l2")
        method = _method(groups, arguments, ordinary=ordinary, says=verbose > 0)
    if issubclass(method, KSD):
        arguments = {"krylov_dim": 50, **arguments}
    optimizer = method(groups, **arguments)
    _keep_values(optimizer, variables)
    residuals = Residuals()

    def seen(function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        return lambda y_true, y_pred: function(y_true, residuals.see(y_pred))

    model.compile(
        optimizer,
        loss=list(map(seen, functions)) if isinstance(functions, list) else seen(functions),
        metrics=metrics,
        loss_weights=loss_weights,
        external_trainable_variables=variables or None,
        verbose=verbose,
    )
    model.train_step = _train_step(model, optimizer, residuals, on_report or log_notes)
    return optimizer


def _method(
    groups: Sequence[dict[str, Any]], arguments: dict[str, Any], *, ordinary: bool, says: bool
) -> type[CurvatureOptimizer]:
    """Return the method to begin with; ``ordinary`` if the loss has mean squared residuals of one point each."""
    if arguments.keys() & (_OF_KSD - _OF_FLOW):
        return KSD
    if arguments.keys() & (_OF_FLOW - _OF_KSD):
        return GaussNewtonFlow
    if not ordinary:
        return KSD
    why_not = why_not_flow([p for group in groups for p in group["params"]], arguments.get("memory_budget"))
    if why_not and says:
        LOGGER.warning("KSD is taken: %s.", why_not)
    return KSD if why_not else GaussNewtonFlow


def _train_step(
    model: Any, optimizer: CurvatureOptimizer, residuals: Residuals, on_report: Callable[[StepReport], object]
) -> Callable[[Any, Any, Any], None]:
    """Return the function that ``model.train`` calls at each iteration."""
    nothing = 0

    def train_step(inputs: Any, targets: Any, auxiliary_vars: Any) -> None:
        nonlocal nothing
        if model.batch_size is not None:
            raise ValueError(
                f"train(batch_size={model.batch_size}): a step minimises over all that it is given, and would "
                "fit each batch by itself. Leave batch_size=None."
            )

        def closure() -> tuple[Tensor, list[Tensor]]:
            with residuals.collected() as collected:
                losses = model.outputs_losses_train(inputs, targets, auxiliary_vars)[1]
            return torch.sum(losses), collected

        report = optimizer.step(closure)
        on_report(report)
        nothing = in_vain(report, nothing)
        if nothing >= NOTHING_FOUND:
            nothing = 0
            model.stop_training = True
            warnings.warn(
                f"{type(optimizer).__name__} ended the training after step {report.iteration}. "
                f"{EndReason.STUCK.remedy}",
                stacklevel=2,
            )

    return train_step


def _keep_values(optimizer: CurvatureOptimizer, variables: Sequence[Tensor]) -> None:
    """Put the variables' values into the optimizer's state: ``model.save`` writes only the network and that state."""

    def put(_: Any, state: dict[str, Any]) -> None:
        state[_VARIABLES] = [variable.detach().clone() for variable in variables]

    def take(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        found = state.get(_VARIABLES, ())
        values = found if isinstance(found, (list, tuple)) else [found]
        here, there = ([[*x.shape] if isinstance(x, Tensor) else x for x in xs] for xs in (variables, values))
        if here != there or not all(bool(x.isfinite().all()) for x in values):
            raise ValueError(
                f"The file has values of external trainable variables of shapes {str(there)[:80]}, and the model was "
                f"compiled with {here}, all finite. Give compile_ksd(..., external_trainable_variables=...) those of "
                "that run."
            )
        with torch.no_grad():
            for variable, value in zip(variables, values, strict=True):
                variable.copy_(value)
        return {key: value for key, value in state.items() if key != _VARIABLES}

    optimizer.register_state_dict_post_hook(put)
    optimizer.register_load_state_dict_pre_hook(take)
