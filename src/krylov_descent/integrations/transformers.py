"""Hugging Face: ``KSDTrainer`` for transformers' ``Trainer``, and ``prepare`` for your own loop with Accelerate.

The Trainer's loop, callbacks, logging, evaluation, checkpoints and early stopping are used as they are. One step of the
Trainer is one step of KSD on sets drawn from the training set, and an epoch: ``max_steps`` and ``num_train_epochs``
mean the same. ``per_device_train_batch_size`` is the size of micro-batches; it decides memory and speed. A run resumed
by ``resume_from_checkpoint`` is bit for bit the uninterrupted one.

- Steps are taken in eval mode, since KSD compares losses: dropout is off.
- A model with "flash_attention_2" or the like is loaded as ``attn_implementation="sdpa"`` or "eager" instead.
- ``learning_rate``, its scheduler, ``optim`` and the sampling of batches have no effect; ``weight_decay`` is part of
  the loss.
- transformers computes the loss of causal language models in float32, so that a float64 model gains nothing there.
- Errors, with a remedy, refuse gradient accumulation, clipping and checkpointing, mixed precision, NEFTune,
  ``torch_compile``, random masks, several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import Trainer
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from krylov_descent.base import CurvatureOptimizer
from krylov_descent.integrations._shared import evaluating, numbers
from krylov_descent.optimizer import KSD
from krylov_descent.report import StepReport
from krylov_descent.samples.subsets import Subsets

_IGNORED = -100  # the label of ignored positions

Method = TypeVar("Method", bound=CurvatureOptimizer)


class KSDTrainer(Trainer):
    """Trains like ``Trainer``, by KSD; takes the same arguments, and some of ``Subsets``.

    The Trainer's ``optimizer_cls_and_kwargs=(KSD, {"krylov_dim": 30})`` has the settings, and may name
    ``GaussNewtonFlow``; ``compute_loss``, which may be overridden, or ``compute_loss_func`` gives loss and logits. The
    logged "loss" is the loss on A before a step. At its end ``train()`` rolls the last step back if it raised the loss,
    and adds the final loss to its metrics as "settled_loss". Checkpoints are written before that.

    Args:
        *args: as for ``Trainer``.
        fraction: the share of the samples in B and in C; None for 1/K.
        gradient_fraction: the share of the samples in A.
        full_batch: whether to evaluate all samples in one batch, A = B = C; for some hundreds of samples.
        on_report: a function called with the report of each step: ``reports.append``, or a writer of
            ``krylov_descent.writers``.
        **kwargs: as for ``Trainer``.

    Example:
        >>> import tempfile, torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
        >>> from krylov_descent.integrations.transformers import KSDTrainer
        >>> _ = torch.manual_seed(0)
        >>> shape = {"vocab_size": 8, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
        >>> model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None))
        >>> counting = [(torch.arange(8) + start) % 8 for start in range(8)]
        >>> train_set = [{"input_ids": ids, "labels": ids} for ids in counting * 20]
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     arguments = TrainingArguments(directory, max_steps=3, report_to="none", disable_tqdm=True)
        ...     trainer = KSDTrainer(model, arguments, train_dataset=train_set, fraction=0.2)
        ...     output = trainer.train()  # doctest: +ELLIPSIS
        {'train_runtime': ...}
        >>> output.metrics["settled_loss"] < 1.5
        True
    """

    def __init__(
        self,
        *args: Any,
        fraction: float | None = None,
        gradient_fraction: float = 1.0,
        full_batch: bool = False,
        on_report: Callable[[StepReport], object] | None = None,
        **kwargs: Any,
    ) -> None:
        kind, settings = kwargs.get("optimizer_cls_and_kwargs") or (KSD, {})
        if any(kwargs.get("optimizers", (None, None))) or not issubclass(kind, CurvatureOptimizer):
            raise ValueError(
                "KSDTrainer makes its optimizer itself. In place of optimizers=... pass the settings of KSD by "
                "optimizer_cls_and_kwargs=(KSD, {...}); KSD has no learning rate and takes no scheduler."
            )
        kwargs["optimizer_cls_and_kwargs"] = (type(kind.__name__, (_StepsBeforehand, kind), {}), settings)
        super().__init__(*args, **kwargs)
        _require(self)
        self._fractions: dict[str, Any] = {"fraction": fraction, "gradient_fraction": gradient_fraction}
        self._full_batch, self._on_report = full_batch, on_report
        self._report: StepReport | None = None
        self._loader: _OneStep | None = None

    def loss_weight(self, inputs: Mapping[str, Any]) -> float | Tensor | None:
        """Return the weight of a batch's mean loss: the number of predicted labels other than −100.

        Override it for a loss that is another mean; None stands for a mean over samples.
        """
        labels = inputs.get("shift_labels", inputs.get("labels"))
        if not isinstance(labels, Tensor):
            return None
        if "shift_labels" not in inputs and _predicts_the_next(self.model):
            labels = labels[..., 1:]
        return labels.ne(_IGNORED).sum()

    def convex_outputs(self, outputs: Any) -> Any:
        """Return the model outputs that the loss is computed from: names that end in "logits", unless overridden."""
        found = {}
        if isinstance(outputs, Mapping):
            found = {name: z for name, z in outputs.items() if name.endswith("logits") and isinstance(z, Tensor)}
        if not found:
            names = f"only {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else type(outputs).__name__
            raise ValueError(
                f"The model returned no logits, {names}. Override KSDTrainer.convex_outputs(outputs) to return the "
                "tensors that the loss is computed from."
            )
        return found

    def get_train_dataloader(self) -> Any:
        """Return a loader of one step an epoch, on sets drawn from the training set."""
        loader = super().get_train_dataloader()
        data: Any = loader.dataset
        sets = Subsets(
            data,
            batch_size=len(data) if self._full_batch else self.args.train_batch_size,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            collate_fn=loader.collate_fn,
            num_workers=self.args.dataloader_num_workers,
            device=self.args.device,
            **self._fractions,
        )
        self._loader = _OneStep(data, sets, self._full_batch)
        return self._loader

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the number of all samples, for the logged samples per second."""
        data: Any = self.train_dataset
        return 1 if data is None else len(data)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Take one step of KSD and return the loss before it."""
        report: StepReport = self._evaluated(self._ksd.step, inputs)
        self._report = report
        if self._on_report is not None:
            self._on_report(report)
        return torch.tensor(report.loss, device=self.args.device)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train like ``Trainer.train``; then roll the last step back if it raised the loss."""
        output = super().train(*args, **kwargs)
        assert self._loader is not None
        output.metrics["settled_loss"] = self._evaluated(self._ksd.settle, self._loader.inputs).loss
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log numbers of the last step with the loss, in place of a learning rate."""
        if "loss" in logs and self._report is not None:
            logs.pop("learning_rate", None)
            logs.update(numbers(self._report))
        super().log(logs, start_time)

    @property
    def _ksd(self) -> CurvatureOptimizer:
        made: Any = self.optimizer
        ksd: CurvatureOptimizer = getattr(made, "optimizer", made)  # unwrap Accelerate's optimizer
        return ksd

    def _evaluated(self, method: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Call a method of KSD with closure and sets, in eval mode."""
        model: Any = self.model

        def closure(batch: Mapping[str, Any]) -> Any:
            # A copy, since compute_loss may remove the labels.
            loss, outputs = self.compute_loss(model, dict(batch), return_outputs=True)
            weight = self.loss_weight(batch)
            convex = self.convex_outputs(outputs)
            return (loss, convex) if weight is None else (loss, convex, weight)

        with evaluating(model):
            if inputs["sets"] is None:
                return method(lambda: closure(inputs["batch"]))
            return method(closure, inputs["sets"])


def prepare(accelerator: Accelerator, optimizer: Method) -> Method:
    """Register an optimizer with Accelerate, for ``save_state`` and ``load_state``, and return the optimizer.

    Take steps with the returned optimizer: the ``step`` of the wrapper that ``accelerator.prepare(optimizer)`` returns
    takes no sets and returns no report.

    Raises:
        ValueError: there are several processes or mixed precision; the message has a remedy.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from krylov_descent import KSD, Subsets
        >>> from krylov_descent.integrations.transformers import prepare
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(torch.nn.Linear(3, 1))
        >>> optimizer = prepare(accelerator, KSD(model.parameters(), krylov_dim=3))
        >>> x = torch.randn(100, 3)
        >>> sets = Subsets((x, x.sum(1, keepdim=True)), batch_size=50, seed=0, device=accelerator.device)
        >>> def closure(batch):
        ...     residual = model(batch[0]) - batch[1]
        ...     return residual.square().mean(), residual
        >>> reports = [optimizer.step(closure, sets) for _ in range(3)]
        >>> reports[2].loss < 1e-3 * reports[0].loss
        True
    """
    if accelerator.num_processes > 1:
        raise ValueError(
            f"Accelerate runs {accelerator.num_processes} processes, and would save the optimizer's state of the first "
            f"alone. {_SEVERAL_PROCESSES}"
        )
    if accelerator.mixed_precision != "no":
        raise ValueError(f"Accelerator(mixed_precision={accelerator.mixed_precision!r}). {_PRECISION}")
    accelerator.prepare(optimizer)
    return optimizer


_SEVERAL_PROCESSES = (
    "Use a loop of your own under torchrun, with the bare model, KSD(process_group=torch.distributed.group.WORLD) and "
    "krylov_descent.checkpoint: docs/tutorials/several_processes.md."
)
_PRECISION = "KSD compares losses and needs them in the parameters' precision: leave it out, with a float32 model."


class _StepsBeforehand:
    """An optimizer whose step ``training_step`` has taken before the Trainer calls ``step()``."""

    warns_of_lr = False  # the Trainer always has a scheduler

    def step(self, closure: Any = None, sets: Subsets | None = None) -> Any:
        """Take a step with a closure; do nothing without."""
        return None if closure is None else super().step(closure, sets)  # type: ignore[misc]


class _OneStep:
    """The training loader: one batch that holds the sets of a step, or all samples."""

    def __init__(self, dataset: Any, sets: Subsets, full_batch: bool) -> None:
        self.dataset = dataset  # the Trainer counts its samples
        self.inputs: dict[str, Any] = {"sets": sets}
        if full_batch:
            (everything,) = sets.draw(0, krylov_dim=1).a
            self.inputs = {"sets": None, "batch": everything.data}

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield self.inputs


def _require(trainer: Trainer) -> None:
    """Refuse arguments that KSD would ignore or cannot support.

    Raises:
        ValueError: an argument is refused; the message has a remedy.
    """
    args = trainer.args
    accumulated, clipped = args.gradient_accumulation_steps != 1, args.max_grad_norm not in (0, 1)  # 1 is the default
    recomputed = "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"
    refused = {
        "gradient_accumulation_steps": (accumulated, "a step sums over its micro-batches anyway; leave it out."),
        "max_grad_norm": (clipped, "KSD has no gradient to clip, and finds the length of a step itself; leave it out."),
        "fp16": (args.fp16, _PRECISION),
        "bf16": (args.bf16, _PRECISION),
        recomputed: (getattr(args, recomputed), "it is off in eval mode; use smaller micro-batches."),
        "neftune_noise_alpha": (args.neftune_noise_alpha is not None, "KSD needs a loss without noise; leave it out."),
        "torch_compile": (args.torch_compile, "compiled models cannot be differentiated twice; leave it out."),
        "auto_find_batch_size": (args.auto_find_batch_size, "set per_device_train_batch_size."),
        "world_size": (args.world_size > 1, _SEVERAL_PROCESSES),
        "n_gpu": (args.n_gpu > 1, "KSDTrainer runs on one device: set CUDA_VISIBLE_DEVICES to it."),
    }
    for name, (found, remedy) in refused.items():
        if found:
            raise ValueError(f"TrainingArguments: {name} is {getattr(args, name)!r}: {remedy}")
    if getattr(trainer.data_collator, "mlm", False):
        raise ValueError(
            "The data collator masks tokens at random, anew at each pass over a set (mlm=True), and KSD compares the "
            "losses of a set. Mask once: let the data set return masked input_ids with their labels."
        )


def _predicts_the_next(model: Any) -> bool:
    """Whether the model's loss compares position i with label i + 1."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    causal = LOSS_MAPPING.get(str(getattr(model, "loss_type", None))) is ForCausalLMLoss
    return causal or type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
