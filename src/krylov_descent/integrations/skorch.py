"""skorch nets trained by KSD: ``KSDClassifier``, ``KSDBinaryClassifier``, ``KSDRegressor``, and ``KSDNet`` for others.

They are skorch's nets in everything else: ``GridSearchCV``, ``cross_val_score``, ``Pipeline``, ``clone`` and pickling,
callbacks, history, ``save_params`` and ``load_params`` with the optimizer's state (a run so continued is the
uninterrupted one, to the bit). One epoch is one step of KSD over the training split, or ``steps_per_epoch`` of them.
A step takes three sets of the split (``krylov_descent.Subsets``), or all of it in one evaluation where it is small.

KSD compares the losses of a step, so the modules are in eval mode while training: dropout is off and BatchNorm uses its
running statistics, which a warning says. ``weight_decay`` regularises instead. The ``train_loss`` of the history is
that after the steps, of the same parameters as the ``valid_loss`` beside it. Learning-rate schedules and gradient
clipping do nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from skorch import NeuralNet, NeuralNetBinaryClassifier, NeuralNetClassifier, NeuralNetRegressor
from skorch.dataset import unpack_data
from skorch.utils import to_device, to_tensor
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from krylov_descent.base import ClosureOptimizer
from krylov_descent.optimizer import KSD
from krylov_descent.samples.subsets import Subsets

#: The largest training split that is evaluated at once.
FULL_BATCH_SAMPLES = 4000

# Names that no argument of a module's forward has.
_INPUT, _WEIGHT = "krylov_descent.input", "krylov_descent.sample_weight"


class KSDNet(NeuralNet):  # type: ignore[misc]
    """Trains a skorch net by KSD; also a first base class: ``class MyNet(KSDNet, NeuralNetClassifier)``.

    Args:
        module: as for any skorch net.
        optimizer: ``KSD`` or ``GaussNewtonFlow``; arguments are ``optimizer__krylov_dim`` and so on. There is no
            learning rate.
        batch_size: the largest number of samples in a forward pass; it does not change the steps.
        full_batch: whether a step evaluates the whole training split at once; "auto" for splits of up to 4,000
            samples. False draws three sets at each step.
        steps_per_epoch: the number of steps between two validations.
        seed: the seed of the sets.
        **arguments: arguments of skorch's net.

    Attributes:
        reports_: the ``StepReport.as_dict()`` of each step, from the history: ``krylov_descent.plot`` draws them.

    Example:
        >>> from krylov_descent.integrations.skorch import KSDNet
        >>> net = KSDNet(torch.nn.Linear, criterion=torch.nn.MSELoss, module__in_features=3, module__out_features=1)
        >>> net.get_params()["optimizer"].__name__
        'KSD'
    """

    training_data_: tuple[Callable[..., Any], Subsets | None] | None = None
    new_reports_: tuple[dict[str, Any], ...] = ()

    def __init__(
        self,
        module: Any,
        *,
        optimizer: Any = KSD,
        batch_size: int = 1024,
        full_batch: bool | Literal["auto"] = "auto",
        steps_per_epoch: int = 1,
        seed: int = 0,
        **arguments: Any,
    ) -> None:
        super().__init__(module, optimizer=optimizer, batch_size=batch_size, **arguments)
        self.full_batch = full_batch
        self.steps_per_epoch = steps_per_epoch
        self.seed = seed

    @property
    def reports_(self) -> list[dict[str, Any]]:
        """Return the reports of all steps in the history."""
        return [report for epoch in self.history for report in epoch["batches"][0].get("reports", ())]

    def outputs_of(self, y_pred: Any) -> Any:
        """Return the model outputs that the loss is computed from: all that the module returned, unless overridden."""
        return y_pred

    def initialize_optimizer(self, *args: Any, **kwargs: Any) -> KSDNet:
        """Initialize like skorch, and refuse other optimizers."""
        super().initialize_optimizer(*args, **kwargs)
        if not isinstance(self.optimizer_, ClosureOptimizer):
            raise ValueError(f"optimizer={self.optimizer!r}: for others than KSD use skorch's own nets.")
        return self

    def torch_compile(self, module: Any, name: str) -> Any:
        """Refuse ``compile=True``: a compiled module cannot be differentiated twice, as KSD does."""
        if self.compile:
            raise ValueError("compile=True does not go with KSD, which differentiates twice. Leave it out.")
        return module

    def get_params_for_optimizer(self, prefix: str, named_parameters: Any) -> tuple[Any, dict[str, Any]]:
        """Return skorch's arguments without ``lr``."""
        args, kwargs = super().get_params_for_optimizer(prefix, named_parameters)
        kwargs.pop("lr", None)
        return args, kwargs

    def set_params(self, **params: Any) -> KSDNet:
        """Set parameters like skorch; setting an argument of ``KSD`` on an initialized net creates a new optimizer."""
        in_groups = ("optimizer__param_groups", "optimizer__weight_decay")
        settings = {k: v for k, v in params.items() if k.startswith("optimizer__") and not k.startswith(in_groups)}
        if self.initialized_ and settings:
            self.__dict__.update(settings)
            self._params_to_validate |= set(settings)
            self._initialize_optimizer()
            params = {key: value for key, value in params.items() if key not in settings}
        super().set_params(**params)
        return self

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:
        """Begin like skorch, and warn of modules that behave differently in train mode."""
        super().on_train_begin(net, X=X, y=y, **kwargs)
        if random := sorted({type(m).__name__ for m in self.module_.modules() if _is_other_in_train_mode(m)}):
            warnings.warn(
                f"Training with KSD is in eval mode, where {', '.join(random)} is off or uses its running statistics. "
                "Regularise by optimizer__weight_decay, and normalise by GroupNorm or LayerNorm.",
                stacklevel=2,
            )

    def fit_loop(self, X: Any, y: Any = None, epochs: int | None = None, **fit_params: Any) -> KSDNet:
        """Fit like skorch; ``sample_weight`` among the ``fit_params`` weights the samples, up to its scale."""
        if (weight := fit_params.pop("sample_weight", None)) is not None:
            X = _weighted(X, weight)
        try:
            super().fit_loop(X, y, epochs, **fit_params)
            self._settle()
        except KeyboardInterrupt:  # also how callbacks end a run
            self._settle()
            raise
        finally:
            self.training_data_ = None
        return self

    def run_single_epoch(self, iterator: Any, training: bool, prefix: str, step_fn: Any, **fit_params: Any) -> None:
        """Run an epoch like skorch; a training epoch begins with its steps."""
        if training:
            if self.training_data_ is None:
                self.training_data_ = self._training_data(iterator, fit_params)
            reports = [self.optimizer_.step(*self.training_data_) for _ in range(self.steps_per_epoch)]
            self.history.record("grad_norm", reports[-1].grad_norm)
            self.history.record("event_undone", not all(report.accepted for report in reports))
            self.new_reports_ = tuple(report.as_dict() for report in reports)
        super().run_single_epoch(iterator, training, prefix, step_fn, **fit_params)

    def train_step(self, batch: Any, **fit_params: Any) -> dict[str, Any]:
        """Return the loss and predictions on a batch, after the steps of the epoch."""
        if self.new_reports_:
            self.history.record_batch("reports", list(self.new_reports_))
            self.new_reports_ = ()
        with torch.no_grad():
            loss, y_pred, _ = self._evaluate(batch, fit_params)
        return {"loss": loss, "y_pred": y_pred}

    def infer(self, x: Any, **fit_params: Any) -> Any:
        """Infer like skorch, without passing sample weights to the module."""
        if isinstance(x, Mapping) and _WEIGHT in x:
            x = x[_INPUT] if _INPUT in x else {key: value for key, value in x.items() if key != _WEIGHT}
        return super().infer(x, **fit_params)

    def get_loss(self, y_pred: Any, y_true: Any, X: Any = None, **kwargs: Any) -> Tensor:
        """Return skorch's loss, weighted if the samples are."""
        if not isinstance(X, Mapping) or _WEIGHT not in X:
            loss: Tensor = super().get_loss(y_pred, y_true, X=X, **kwargs)
            return loss
        reduction, self.criterion_.reduction = self.criterion_.reduction, "none"
        try:
            losses: Tensor = super().get_loss(y_pred, y_true, X=X, **kwargs)
        finally:
            self.criterion_.reduction = reduction
        weight: Tensor = to_tensor(X[_WEIGHT], device=self.device).to(losses.dtype)
        return (weight * losses.reshape(len(weight), -1).mean(1)).mean()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "training_data_": None}  # a callback may pickle the net

    def _settle(self) -> None:
        """With sets, roll the last step back if it raised the loss."""
        closure, sets = self.training_data_ or (None, None)
        if sets is not None and hasattr(self.optimizer_, "settle"):
            self.history.record("event_last_step_undone", not self.optimizer_.settle(closure, sets).accepted)

    def _training_data(self, iterator: Any, fit_params: dict[str, Any]) -> tuple[Callable[..., Any], Subsets | None]:
        """Return a closure for KSD, and the sets, or None for a full batch."""
        loader = _require_loader(iterator)
        samples = len(loader.dataset)  # type: ignore[arg-type]
        full = samples <= FULL_BATCH_SAMPLES if self.full_batch == "auto" else self.full_batch

        def closure(batch: Any) -> tuple[Any, ...]:
            loss, y_pred, weight = self._evaluate(batch, fit_params)
            outputs = self.outputs_of(y_pred)
            return (loss, outputs) if weight is None else (loss, outputs, weight)

        loading: dict[str, Any] = {"collate_fn": loader.collate_fn, "num_workers": loader.num_workers}
        if full:
            everything = to_device(next(iter(DataLoader(loader.dataset, batch_size=samples, **loading))), self.device)
            return lambda: closure(everything), None
        batch_size = min(loader.batch_size or samples, samples)
        return closure, Subsets(loader.dataset, batch_size=batch_size, seed=self.seed, device=self.device, **loading)

    def _evaluate(self, batch: Any, fit_params: dict[str, Any]) -> tuple[Tensor, Any, Tensor | None]:
        """Return loss, predictions, and the weight of the mean loss, None for the number of samples."""
        self._set_training(False)
        Xi, yi = unpack_data(batch)
        y_pred = self.infer(Xi, **fit_params)
        return self.get_loss(y_pred, yi, X=Xi, training=True), y_pred, self._weight(Xi, yi)

    def _weight(self, Xi: Any, yi: Any) -> Tensor | None:
        """Return the total class weight of a batch, by which a mean with class weights or ignored samples divides."""
        criterion = self.criterion_
        by_class = isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss)) and criterion.reduction == "mean"
        if not by_class or yi.is_floating_point() or (isinstance(Xi, Mapping) and _WEIGHT in Xi):
            return None
        counted: Tensor = to_tensor(yi[yi != criterion.ignore_index], device=self.device)
        return torch.ones_like(counted).sum() if criterion.weight is None else criterion.weight[counted].sum()


class KSDClassifier(KSDNet, NeuralNetClassifier):  # type: ignore[misc]
    """Trains a skorch classifier by KSD; the module returns logits for ``CrossEntropyLoss``.

    skorch's default, ``NLLLoss`` on probabilities, works too, but its curvature in the probabilities gives worse steps.
    Other arguments are those of ``KSDNet``.

    Example:
        >>> import numpy as np
        >>> from sklearn.model_selection import cross_val_score
        >>> from krylov_descent.integrations.skorch import KSDClassifier
        >>> X = np.random.default_rng(0).normal(size=(300, 2)).astype(np.float32)
        >>> y = (X[:, 0] * X[:, 1] > 0).astype(np.int64)
        >>> def module():
        ...     return torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        >>> net = KSDClassifier(module, max_epochs=5, train_split=None, verbose=0)
        >>> bool(cross_val_score(net, X, y, cv=3).mean() > 0.8)
        True
    """

    def __init__(self, module: Any, *, criterion: Any = nn.CrossEntropyLoss, **arguments: Any) -> None:
        super().__init__(module, criterion=criterion, **arguments)


class KSDBinaryClassifier(KSDNet, NeuralNetBinaryClassifier):  # type: ignore[misc]
    """Trains a skorch binary classifier (one logit) by KSD; arguments are those of ``KSDNet``."""


class KSDRegressor(KSDNet, NeuralNetRegressor):  # type: ignore[misc]
    """Trains a skorch regressor by KSD; arguments are those of ``KSDNet``.

    Example:
        >>> import numpy as np
        >>> from krylov_descent.integrations.skorch import KSDRegressor
        >>> X = np.linspace(-1, 1, 100, dtype=np.float32)[:, None]
        >>> module = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        >>> net = KSDRegressor(module, max_epochs=10, train_split=None, verbose=0).fit(X, np.sin(4 * X))
        >>> bool(net.score(X, np.sin(4 * X)) > 0.99)
        True
    """


def _is_other_in_train_mode(module: nn.Module) -> bool:
    if isinstance(module, (nn.modules.dropout._DropoutNd, nn.RNNBase, nn.MultiheadAttention)):
        return bool(getattr(module, "p", 0) or getattr(module, "dropout", 0))
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats


def _weighted(X: Any, weight: Any) -> dict[str, Any]:
    """Return X with sample weights of mean 1, so that the loss is a mean over samples in any batch."""
    if isinstance(X, torch.utils.data.Dataset) or hasattr(X, "iloc"):
        raise ValueError(f"sample_weight goes with X as an array or a dict of arrays; this is a {type(X).__name__}.")
    w = np.asarray(weight, dtype=np.float64)
    if w.ndim != 1 or not (w >= 0).all() or not w.sum() > 0:
        raise ValueError(f"sample_weight must be numbers ≥ 0, one for each sample, not all 0; got shape {w.shape}.")
    return {**(X if isinstance(X, Mapping) else {_INPUT: X}), _WEIGHT: w * (len(w) / w.sum())}


def _require_loader(iterator: Any) -> DataLoader[Any]:
    """Refuse iterators that do not pass over all samples: KSD draws its own sets from the data set."""
    if not isinstance(iterator, DataLoader):
        raise ValueError(f"iterator_train gives a {type(iterator).__name__}; KSD needs a torch DataLoader's data set.")
    if not isinstance(iterator.sampler, (SequentialSampler, RandomSampler)):
        raise ValueError(
            f"iterator_train__sampler is a {type(iterator.sampler).__name__}, and KSD passes over all samples of the "
            "training split. Weigh them instead: fit(X, y, sample_weight=...)."
        )
    return iterator
