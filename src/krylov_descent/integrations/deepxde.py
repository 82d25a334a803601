"""DeepXDE (PyTorch backend) trained by KSD: ``compile_ksd(model)`` in place of ``model.compile("L-BFGS")``.

``model.train`` then runs DeepXDE's own loop: callbacks, ``LossHistory`` and ``TrainState`` (so ``dde.saveplot``), the
display, ``model.save`` and ``model.restore`` are as with any optimizer, and one iteration is one step of KSD.

Full batch: every evaluation is over all points of all loss terms, and there are no three sets. The loss of a PINN is
a sum of means over different points (the equation, each boundary), not one mean over samples that could be divided,
and there are few enough points to take them all. The loss is DeepXDE's own: its loss functions are handed over wrapped,
and what they are given, the residuals before the mean, is what KSD takes the loss to be convex in. So loss weights, any
kind of boundary condition, hard constraints, inverse problems, operator networks and ``dde.config.set_default_float``
work. New points between steps (``PDEPointResampler``, anchors) are fine: a full-batch step is compared with nothing
from the step before.

Take enough points. KSD soon makes the residuals vanish at a handful of them, and what a network of thousands of
parameters then does between them is anyone's guess.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from krylov_descent.flow.sketch import fitting_basis
from krylov_descent.flow.step import Rational
from krylov_descent.optimizer import KSD
from krylov_descent.report import StepReport
from krylov_descent.run import NOTHING_FOUND, EndReason, in_vain

os.environ.setdefault("DDE_BACKEND", "pytorch")  # DeepXDE chooses at its import, and would prefer another

import deepxde

_LOGGER = logging.getLogger(__name__)
_VARIABLES = "external_trainable_variables"
# Their residuals are of one point each. Operators, integrals and fractional derivatives mix points: then rows of a
# sketch take a backward pass each.
_ORDINARY = (deepxde.data.PDE, deepxde.data.TimePDE)
_FOR_KRYLOV = {"curvature", "preconditioner", "storage"}  # arguments of KSD that the rational basis has no use for


def compile_ksd(
    model: Any,
    *,
    loss: Any = "MSE",
    metrics: Sequence[Any] | None = None,
    loss_weights: Sequence[float] | None = None,
    external_trainable_variables: Any = None,
    verbose: int = 1,
    basis: Literal["krylov", "rational"] | Rational | None = None,
    krylov_dim: int | None = None,
    on_report: Callable[[StepReport], object] | None = None,
    **ksd: Any,
) -> KSD:
    """Configure a model for training with KSD; then ``model.train(iterations=...)``.

    Training ends early, with a warning that says why, when five steps in a row find nothing better.

    Args:
        model: a ``dde.Model``.
        loss: as for ``model.compile``; should be convex in the residuals, as "MSE" is.
        metrics: as for ``model.compile``.
        loss_weights: as for ``model.compile``.
        external_trainable_variables: as for ``model.compile``. Unlike with DeepXDE's own optimizers, ``model.save``
            keeps their values, and ``model.restore`` brings them back.
        verbose: as for ``model.compile``.
        basis: as for ``KSD``. None takes "rational" for the mean squared residuals of a ``dde.data.PDE`` or ``TimePDE``
            in float64, for up to 100,000 parameters, if its sketch fits in memory (where only these speak against it,
            the log says so, if ``verbose``); and "krylov" elsewhere, or if other arguments are for that:
            ``krylov_dim``, ``curvature``, ``preconditioner``, ``storage``. docs/integrations.md has figures.
        krylov_dim: K of the Krylov basis, 50 unless given. These networks are small and ill-conditioned: 14 seconds of
            one core end at a loss of 1.5e-3 with K = 20, of 2.8e-6 with 50 (examples/deepxde_poisson.py --basis krylov
            --krylov-dim, 2026-11-15).
        on_report: called with the ``StepReport`` of each step: a writer of ``krylov_descent.writers``, or
            ``reports.append``.
        **ksd: other arguments of ``KSD``. An "l2" regularisation of the network becomes its ``weight_decay``.

    Returns:
        The optimizer, which is ``model.opt`` too.

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
            f"DeepXDE runs with the backend {deepxde.backend.backend_name!r}, and KSD is for PyTorch. "
            "Set DDE_BACKEND=pytorch before deepxde is imported."
        )
    if deepxde.config.mixed:
        raise ValueError(
            "DeepXDE is set to mixed precision, whose float16 rounds away the differences that KSD compares. "
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
    if basis is None:
        for_krylov = krylov_dim is not None or not _FOR_KRYLOV.isdisjoint(ksd)
        each = functions if isinstance(functions, list) else [functions]
        squares = all(function is deepxde.losses.mean_squared_error for function in each)
        basis, why_not = "krylov", ""
        if type(model.data) in _ORDINARY and squares and kind in (None, "l2") and not for_krylov:
            trained = [p for group in groups for p in group["params"]]
            basis, why_not = fitting_basis(trained, ksd.get("memory_budget"))
        if why_not and verbose > 0:
            _LOGGER.warning("KSD takes basis='krylov': %s.", why_not)
    optimizer = KSD(groups, basis=basis, krylov_dim=50 if krylov_dim is None else krylov_dim, **ksd)
    _keep_values(optimizer, variables)
    residuals = _Residuals()
    model.compile(
        optimizer,
        loss=list(map(residuals.of, functions)) if isinstance(functions, list) else residuals.of(functions),
        metrics=metrics,
        loss_weights=loss_weights,
        external_trainable_variables=variables or None,
        verbose=verbose,
    )
    model.train_step = _train_step(model, optimizer, residuals, on_report or _log_notes)
    return optimizer


def _log_notes(report: StepReport) -> None:
    """Where nobody else reads reports, what the first one found of the problem goes to the log."""
    if report.iteration == 0 and report.notes:
        _LOGGER.warning("KSD, first step: %s", " ".join(report.notes))


def _train_step(
    model: Any, optimizer: KSD, residuals: _Residuals, on_report: Callable[[StepReport], object]
) -> Callable[[Any, Any, Any], None]:
    """What ``model.train`` calls at each iteration."""
    nothing = 0

    def train_step(inputs: Any, targets: Any, auxiliary_vars: Any) -> None:
        nonlocal nothing
        if model.batch_size is not None:
            raise ValueError(
                f"train(batch_size={model.batch_size}): a step of KSD minimises over all that it is given, and would "
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
                f"KSD ended the training after step {report.iteration}. {EndReason.STUCK.remedy}", stacklevel=2
            )

    return train_step


class _Residuals:
    """What the loss functions of a model are given, collected while a closure runs."""

    def __init__(self) -> None:
        self._collected: list[Tensor] | None = None

    def of(self, loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
        """A loss function that gives the same and lets its second argument be collected."""

        def collecting(y_true: Any, y_pred: Any) -> Tensor:
            if self._collected is not None and y_pred.requires_grad:
                # A node of its own: of two residuals one may be computed from the other (multi-fidelity networks).
                y_pred = y_pred.view_as(y_pred)
                self._collected.append(y_pred)
            return loss(y_true, y_pred)

        return collecting

    @contextmanager
    def collected(self) -> Iterator[list[Tensor]]:
        """What is collected inside."""
        collected: list[Tensor] = []
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = None


def _keep_values(optimizer: KSD, variables: Sequence[Tensor]) -> None:
    """Put the values of these into the optimizer's state: ``model.save`` writes the network and that, no more."""

    def put(_: Any, state: dict[str, Any]) -> None:
        state[_VARIABLES] = [variable.detach().clone() for variable in variables]

    def take(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        values = state.get(_VARIABLES, ())
        if len(values) != len(variables):
            raise ValueError(
                f"The file has the values of {len(values)} external trainable variables, and the model was compiled "
                f"with {len(variables)}. Give compile_ksd(..., external_trainable_variables=...) those of that run."
            )
        with torch.no_grad():
            for variable, value in zip(variables, values, strict=True):
                variable.copy_(value)
        return {key: value for key, value in state.items() if key != _VARIABLES}

    optimizer.register_state_dict_post_hook(put)
    optimizer.register_load_state_dict_pre_hook(take)
