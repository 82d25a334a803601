"""PyTorch Lightning: ``KSDModule``, whose training steps are steps of KSD, and ``StepsLoader``, its training data.

Lightning's loop, callbacks, loggers, checkpoints and progress bar are used as they are: one batch of the training
loader is one step, and ``trainer.global_step`` counts it. The loader decides between two ways to train:

- ``StepsLoader(Subsets(...))``: each step draws its three sets from the data set. An epoch is a number of steps.
- Any other loader: a step evaluates its batch alone, A = B = C. Right for one batch that holds everything.

A run resumed by ``trainer.fit(..., ckpt_path=...)`` is bit for bit the uninterrupted one. Steps are taken in eval mode,
since KSD compares losses. Refused, with what to do instead: gradient clipping and accumulation, learning-rate
schedulers, mixed precision, and strategies other than one device and DDP.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor

from krylov_descent.base import CurvatureOptimizer
from krylov_descent.distributed import ProcessGroup
from krylov_descent.integrations._shared import evaluating, numbers
from krylov_descent.optimizer import KSD
from krylov_descent.report import Settlement, StepReport
from krylov_descent.samples.subsets import Subsets

_STATE_OF_RANKS = "krylov_descent"  # its entry in a checkpoint


class StepsLoader:
    """Gives ``KSDModule`` its training data: an epoch is ``steps`` steps on sets drawn from all samples.

    Args:
        sets: the sampler of A, B and C.
        steps: the number of steps in an epoch. A step passes over all of A at least once, so that 1 is the usual sense.

    Example:
        >>> import torch
        >>> from krylov_descent import Subsets
        >>> from krylov_descent.integrations.lightning import StepsLoader
        >>> loader = StepsLoader(Subsets(torch.randn(100, 3), batch_size=50, seed=0), steps=4)
        >>> len(loader)
        4
    """

    def __init__(self, sets: Subsets, steps: int = 1) -> None:
        if not hasattr(sets, "draw"):
            raise ValueError(f"sets is a {type(sets).__name__}; pass Subsets(train_set, batch_size=..., seed=...).")
        if steps < 1:
            raise ValueError(f"steps={steps!r}: an epoch has at least one step.")
        self.sets = sets
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Subsets]:
        for _ in range(self.steps):
            yield self.sets

    def state_dict(self) -> dict[str, Any]:
        """Return {}: the optimizer's state determines the sets. Lightning needs it to resume within an epoch."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing."""


class KSDModule(LightningModule):
    """Trains a LightningModule by KSD: define ``loss_and_outputs``; all other methods have defaults.

    - ``configure_optimizers`` returns ``KSD(self.parameters())``; override it to return another ``KSD(...)``, or
      ``GaussNewtonFlow(...)``.
    - Each step logs ``train_loss``, the loss on A before the step, and ``ksd/...``, numbers of the step. Give the
      trainer ``log_every_n_steps=1``: steps are few. ``outputs["report"]`` in ``on_train_batch_end`` is the whole
      ``StepReport``.
    - When training ends, the last step is rolled back if it raised the loss on A: ``self.settlement``. Checkpoints are
      written before that.
    - Several processes (``Trainer(strategy="ddp")``): the ranks take each step together, each with its share of the
      samples. An overridden ``configure_optimizers`` passes ``process_group=self.process_group``. Checkpoints load on
      any number of ranks if they were written by several.
    - Overridden ``on_train_start``, ``on_train_end``, ``on_save_checkpoint`` or ``on_load_checkpoint`` must call
      ``super()``.

    Attributes:
        settlement: the outcome of the last training; None before, and for a full batch.

    Example:
        >>> import torch
        >>> from lightning.pytorch import Trainer
        >>> from krylov_descent import Subsets
        >>> from krylov_descent.integrations.lightning import KSDModule, StepsLoader
        >>> class Regression(KSDModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        ...     def loss_and_outputs(self, batch):
        ...         x, y = batch
        ...         residual = self.net(x) - y
        ...         return residual.square().mean(), residual
        >>> x = torch.linspace(-1, 1, 400)[:, None]
        >>> sets = Subsets((x, torch.sin(3 * x)), batch_size=400, fraction=0.2, seed=0)
        >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        >>> trainer = Trainer(max_steps=5, log_every_n_steps=1, enable_model_summary=False, **quiet)
        >>> trainer.fit(model := Regression(), StepsLoader(sets))
        >>> trainer.global_step, model.settlement.loss < 0.01
        (5, True)
    """

    settlement: Settlement | None = None
    _sets: Any = None
    _loaded: Any = None

    def loss_and_outputs(self, batch: Any) -> Any:
        """Return the mean loss of a batch, the model outputs it was computed from, and optionally its weight.

        Do not call ``backward``. The batch has gone through Lightning's transfer hooks.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no loss_and_outputs(self, batch). Write it: it returns the mean loss and the "
            "outputs it was computed from, for example `return torch.nn.functional.cross_entropy(logits, y), logits`."
        )

    def configure_optimizers(self) -> Any:
        """Return ``KSD`` with its defaults."""
        return KSD(self.parameters(), process_group=self.process_group)

    @property
    def process_group(self) -> ProcessGroup | None:
        """Return the group of the trainer's processes, for ``KSD(process_group=...)``; None in a single process."""
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            return None
        return torch.distributed.group.WORLD

    def training_step(self, batch: Any, batch_idx: int = 0) -> dict[str, Any]:
        """Take one step of KSD."""
        optimizer = _ksd_of(self.trainer)
        sets = batch if hasattr(batch, "draw") else None
        if sets is None and self.trainer.num_training_batches > 1:
            warnings.warn(
                f"The training loader has {self.trainer.num_training_batches} batches, and each step of KSD fits one "
                "of them alone. Pass StepsLoader(Subsets(train_set, ...)) to step over the data set, or one batch that "
                "holds everything; large batches of like data, thousands of samples, may serve.",
                stacklevel=2,
            )
        self._sets = sets
        with evaluating(self):
            report = optimizer.step(self._closure(batch), sets)
        self._log_report(report)
        return {"loss": torch.tensor(report.loss, dtype=torch.float64), "report": report}

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``training_step`` takes the step."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Run ``training_step``, as one optimizer step for Lightning."""
        assert optimizer_closure is not None
        optimizer_closure()

    def on_train_start(self) -> None:
        """Load a state that several ranks saved."""
        super().on_train_start()
        if self._loaded is not None:
            optimizer = _ksd_of(self.trainer)
            optimizer.state.clear()  # the state of the rank that wrote the file
            optimizer.load_whole_state(self._loaded)
            self._loaded = None

    def on_train_end(self) -> None:
        """Roll the last step back if it raised the loss."""
        super().on_train_end()
        if self._sets is not None:
            with evaluating(self):
                self.settlement = _ksd_of(self.trainer).settle(self._closure(self._sets), self._sets)
            self._sets = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Gather the state of several ranks; a collective."""
        super().on_save_checkpoint(checkpoint)
        for optimizer in self.trainer.optimizers if "optimizer_states" in checkpoint else ():
            if isinstance(optimizer, CurvatureOptimizer) and optimizer.comm.ranks > 1:
                checkpoint[_STATE_OF_RANKS] = tuple(optimizer.whole_state())  # plain: weights_only=True loads it

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep a state that several ranks saved until there is an optimizer."""
        super().on_load_checkpoint(checkpoint)
        with suppress(RuntimeError):  # no trainer: load_from_checkpoint
            self._loaded = checkpoint.get(_STATE_OF_RANKS) if self.trainer.training else None

    def _closure(self, batch: Any) -> Callable[..., Any]:
        if not hasattr(batch, "draw"):
            return lambda: self.loss_and_outputs(batch)
        return lambda microbatch: self.loss_and_outputs(self._transferred(microbatch))

    def _transferred(self, batch: Any) -> Any:
        """Return a batch after the loop's conversions: dtype, device, and the user's hooks."""
        batch = self.trainer.precision_plugin.convert_input(batch)
        batch = self.on_before_batch_transfer(batch, 0)
        return self.trainer.strategy.batch_to_device(batch)

    def _log_report(self, report: StepReport) -> None:
        self.log("train_loss", report.loss, prog_bar=True, batch_size=1)
        self.log_dict({f"ksd/{name}": value for name, value in numbers(report).items()}, batch_size=1)


def _ksd_of(trainer: Trainer) -> CurvatureOptimizer:
    """Return the optimizer, if the trainer's settings suit it.

    Raises:
        ValueError: a setting does not; the message has a remedy.
    """
    optimizers = trainer.optimizers
    if len(optimizers) != 1 or not isinstance(optimizers[0], CurvatureOptimizer):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ValueError(
            f"configure_optimizers returned {names}; KSDModule needs one KSD(...) or GaussNewtonFlow(...)."
        )
    optimizer: CurvatureOptimizer = optimizers[0]
    if trainer.lr_scheduler_configs:
        raise ValueError("configure_optimizers returned a scheduler; KSD has no learning rate. Return the KSD alone.")
    if trainer.gradient_clip_val:
        raise ValueError(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}): KSD has no gradient to clip; the search over the "
            "subspace finds the length of a step. Leave it out."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ValueError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}): a step passes over all of its set A, "
            "in micro-batches of Subsets(batch_size=...). Leave it out."
        )
    if trainer.precision not in ("32-true", "64-true"):
        raise ValueError(
            f"Trainer(precision={trainer.precision!r}): KSD compares losses and needs them in the parameters' "
            "precision. Use '32-true' or '64-true'; to run the network alone in bfloat16, put torch.autocast around it "
            "inside loss_and_outputs."
        )
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise ValueError(
            f"Trainer(strategy={type(trainer.strategy).__name__}): KSDModule knows one device and DDP. For sharded "
            "parameters use KSD without Lightning, under torchrun: docs/appendix/scale.md."
        )
    if trainer.world_size > 1 and optimizer.comm.ranks != trainer.world_size:
        raise ValueError(
            f"The trainer has {trainer.world_size} processes, and KSD steps with {optimizer.comm.ranks}. Return "
            "KSD(..., process_group=self.process_group) from configure_optimizers."
        )
    return optimizer
