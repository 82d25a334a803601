"""PINA solvers trained by KSD or GaussNewtonFlow: ``KSDPINN(problem, model)`` in place of ``PINN(problem, model)``.

PINA's ``Trainer`` runs as always: callbacks, progress bar, logging, checkpoints. One epoch is one step, and
``trainer.train(ckpt_path=...)`` continues a run to the bit (with ``shuffle=False`` or the same seed: PINA shuffles the
points when the trainer is made).

``Trainer(solver)`` has no ``batch_size``: every evaluation is over all points of all conditions, as their means are
over different points, which three sets could not divide. The loss is PINA's own, and the residuals before its means
are the outputs that a step sees. Weighting schemes that follow the losses (``SelfAdaptiveWeighting``, NTK) are updated
once a step, at its start; unknown parameters of inverse problems are clamped after it. Points may change between epochs
(``R3Refinement``), and ``SwitchOptimizer`` may switch from Adam to either method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import NoneType
from typing import Any

from pina.optim import TorchOptimizer
from pina.solver import (
    AutoregressiveSingleModelSolver,
    CausalPhysicsInformedSingleModelSolver,
    PhysicsInformedSingleModelSolver,
    RBAPhysicsInformedSingleModelSolver,
    SingleModelSolver,
    SupervisedSingleModelSolver,
)
from torch import Tensor, nn

from krylov_descent.base import ClosureOptimizer
from krylov_descent.flow.optimizer import GaussNewtonFlow
from krylov_descent.flow.sketch import why_not_flow
from krylov_descent.integrations._shared import LOGGER, Residuals, log_notes
from krylov_descent.optimizer import KSD
from krylov_descent.report import StepReport

_UNKNOWN = "unknown_parameters"
_KSD: dict[str, Any] = {"krylov_dim": 50}  # these networks are small and ill-conditioned
# Their weights change with every evaluation, so that no two evaluations are of the same function.
_MOVING = (
    AutoregressiveSingleModelSolver,
    CausalPhysicsInformedSingleModelSolver,
    RBAPhysicsInformedSingleModelSolver,
)


class _Fitting(TorchOptimizer):  # type: ignore[misc]
    """Chooses the method once the parameters have the dtype and device of training."""

    def __init__(self) -> None:
        super().__init__(GaussNewtonFlow)

    def hook(self, parameters: Iterable[Tensor]) -> None:
        parameters = list(parameters)
        why_not = why_not_flow(parameters)
        if why_not:
            LOGGER.warning("KSD is taken: %s.", why_not)
        self.optimizer_class: type[ClosureOptimizer] = KSD if why_not else GaussNewtonFlow
        self.kwargs = dict(_KSD) if why_not else {}
        super().hook(parameters)


class KSDSolver(SingleModelSolver):  # type: ignore[misc]
    """Trains a single-model solver of PINA by KSD or GaussNewtonFlow; use it as the first base class.

    ``KSDPINN`` and ``KSDSupervisedSolver`` use it. For another solver:
    ``class KSDGradientPINN(KSDSolver, GradientPhysicsInformedSingleModelSolver): pass``.

    Args:
        problem: as for any solver.
        model: as for any solver.
        optimizer: ``TorchOptimizer(KSD, ...)`` or ``TorchOptimizer(GaussNewtonFlow, ...)``. The default is
            GaussNewtonFlow for the mean squared residuals of a ``KSDPINN`` in float64, for up to 100,000 parameters, if
            its sketch fits in memory, and KSD with K = 50 elsewhere. docs/howto/integrations.md has figures.
        **arguments: arguments of the solver: ``weighting``, ``loss``, ...

    Attributes:
        on_report: a function called with the ``StepReport`` of each step, or None: a writer of
            ``krylov_descent.writers``, or ``reports.append``.

    Raises:
        ValueError: the solver changes its weights with every evaluation.

    Example:
        >>> from pina.solver import GradientPhysicsInformedSingleModelSolver
        >>> from krylov_descent.integrations.pina import KSDSolver
        >>> class KSDGradientPINN(KSDSolver, GradientPhysicsInformedSingleModelSolver):
        ...     pass
    """

    on_report: Callable[[StepReport], object] | None = None
    _clamp_params: Callable[[], None]

    def __init__(self, problem: Any, model: Any, optimizer: Any = None, **arguments: Any) -> None:
        if isinstance(self, _MOVING):
            raise ValueError(
                f"{type(self).__name__} weighs residuals anew with every evaluation, and a step compares "
                "evaluations. Use KSDPINN, with a weighting=... if wanted: that is updated once a step."
            )
        self._residuals = Residuals()
        self._silent = False
        if optimizer is None:
            squares = isinstance(arguments.get("loss"), (nn.MSELoss, NoneType))
            ordinary = squares and isinstance(self, PhysicsInformedSingleModelSolver)
            optimizer = _Fitting() if ordinary else TorchOptimizer(KSD, **_KSD)
        super().__init__(problem, model, optimizer=optimizer, **arguments)
        self.automatic_optimization = False
        self.loss.register_forward_pre_hook(self._collect)
        clamp = self._clamp_params  # PINA calls it in each evaluation; it must not move trial points
        self._clamp_params = lambda: None if self._silent else clamp()
        for layer in self.model.modules():
            if type(layer).__module__.startswith("torch.nn.") and not any(layer.children()):
                layer.register_forward_pre_hook(_without_labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Take one step over all points; log the losses after it, and the gradient's norm before it."""
        optimizer = self.optimizers()
        if not isinstance(optimizer.optimizer, ClosureOptimizer):
            return self._plain_step(optimizer, batch, batch_idx)
        self._require_full_batch()
        with self._silently():
            self.batch_evaluation_step(batch, batch_idx)  # updates the weights of the conditions
        with self._fixed_weights():
            report: StepReport = optimizer.step(lambda: self._evaluate(batch, batch_idx))
            self._clamp_params()
            loss: Tensor = super().training_step(batch, batch_idx)
        self.log("grad_norm", report.grad_norm, on_step=False, on_epoch=True, batch_size=self.get_batch_size(batch))
        (self.on_report or log_notes)(report)
        return loss.detach()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save the unknown parameters of an inverse problem, which belong to the problem, not to the solver."""
        super().on_save_checkpoint(checkpoint)
        if self._params:
            checkpoint[_UNKNOWN] = {name: p.detach().clone() for name, p in self._params.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the unknown parameters."""
        super().on_load_checkpoint(checkpoint)
        for name, value in checkpoint.get(_UNKNOWN, {}).items():
            self._params[name].data.copy_(value)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log like Lightning, except during the evaluations of a step."""
        if not self._silent:
            super().log(*args, **kwargs)

    def _plain_step(self, optimizer: Any, batch: Any, batch_idx: int) -> Tensor:
        """Take a step of the optimizer before a ``SwitchOptimizer``."""
        parent = super().training_step

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = parent(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        loss: Tensor = optimizer.step(closure)
        self.scheduler.instance.step()
        return loss.detach()

    def _evaluate(self, batch: Any, batch_idx: int) -> tuple[Tensor, list[Tensor]]:
        """The loss and its residuals."""
        with self._silently(), self._residuals.collected() as collected:
            return self.batch_evaluation_step(batch, batch_idx), collected

    def _collect(self, _: Any, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
        """Before the loss function: residuals that are collected go on without labels."""
        residual = self._residuals.see(given[0])
        return None if residual is given[0] else (residual, given[1].as_subclass(Tensor))

    @contextmanager
    def _silently(self) -> Iterator[None]:
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    @contextmanager
    def _fixed_weights(self) -> Iterator[None]:
        """Freeze the weights of the conditions, which PINA's schemes would update in every evaluation."""
        weights = {
            name: w.detach() if isinstance(w, Tensor) else w for name, w in self.weighting.last_saved_weights().items()
        }
        self.weighting.update_weights = lambda losses: weights
        try:
            yield
        finally:
            del self.weighting.update_weights

    def _require_full_batch(self) -> None:
        if self.trainer.num_training_batches > 1:
            raise ValueError(
                f"The trainer gives {self.trainer.num_training_batches} batches an epoch, and a step minimises "
                "over all that it is given: it would fit each batch by itself. Use Trainer(solver) without batch_size."
            )
        if self.trainer.world_size > 1:
            raise ValueError(
                f"The trainer has {self.trainer.world_size} processes, each with its points: these solvers train in "
                "one. Use Trainer(solver, devices=1)."
            )


def _without_labels(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Remove PINA's labels from the inputs of a torch layer: they do not survive a step's operations."""
    return tuple(x.as_subclass(Tensor) if isinstance(x, Tensor) else x for x in given)


class KSDPINN(KSDSolver, PhysicsInformedSingleModelSolver):  # type: ignore[misc]
    """Trains a physics-informed network (PINA's ``PINN``) by KSD or GaussNewtonFlow.

    Arguments are those of ``KSDSolver``.

    Example:
        >>> import torch
        >>> from pina import Trainer
        >>> from pina.model import FeedForward
        >>> from pina.problem.zoo import Poisson2DSquareProblem
        >>> from krylov_descent.integrations.pina import KSDPINN
        >>> _ = torch.manual_seed(0)
        >>> problem = Poisson2DSquareProblem()
        >>> problem.discretise_domain(10, "grid")
        >>> model = FeedForward(2, 1, inner_size=16, n_layers=2)
        >>> solver = KSDPINN(problem, model)
        >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        >>> trainer = Trainer(solver, max_epochs=4, accelerator="cpu", enable_model_summary=False, **quiet)
        >>> trainer.train()
        >>> bool(trainer.callback_metrics["train_loss"] < 1)
        True
    """


class KSDSupervisedSolver(KSDSolver, SupervisedSingleModelSolver):  # type: ignore[misc]
    """Trains a supervised solver of PINA by KSD, over all data at once.

    For data too large for one evaluation, use ``krylov_descent.KSD`` with ``Subsets``.
    Arguments are those of ``KSDSolver``, and ``use_lt``.
    """
