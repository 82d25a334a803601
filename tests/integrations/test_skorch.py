"""skorch nets with KSD: scikit-learn's tools, history, callbacks, weights, exact resume, refusals."""

from __future__ import annotations

import copy
import doctest
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

with warnings.catch_warnings():
    # accelerate, which skorch imports if it is there, compiles a function with torch.jit.script.
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
    pytest.importorskip("skorch")
    from krylov_descent.integrations import skorch as integration

from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch.callbacks import Checkpoint, EarlyStopping, EpochScoring, LoadInitState
from torch.utils.data import WeightedRandomSampler

from krylov_descent import GaussNewtonFlow
from krylov_descent.integrations.skorch import KSDBinaryClassifier, KSDClassifier, KSDNet, KSDRegressor

Data = tuple[np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.int64]]]


class Net(nn.Module):
    def __init__(self, hidden: int = 12, dropout: float = 0.0, outputs: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def rings() -> Data:
    """Two classes, one around the other: no linear model tells them apart."""
    rng = np.random.default_rng(0)
    y = np.arange(240) % 2
    angle, radius = rng.uniform(0, 2 * np.pi, 240), 1 + y + 0.1 * rng.normal(size=240)
    X = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    return X.astype(np.float32), y.astype(np.int64)


def classifier(**arguments: Any) -> KSDClassifier:
    return KSDClassifier(Net, **{"max_epochs": 4, "verbose": 0, "optimizer__krylov_dim": 8, **arguments})


def parameters(net: KSDNet) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.module_.parameters()])


def test_cross_validation_in_a_pipeline(rings: Data) -> None:
    net = classifier(train_split=None, max_epochs=8)
    assert cross_val_score(make_pipeline(StandardScaler(), net), *rings, cv=2).mean() > 0.9


def test_grid_search_sets_arguments_of_the_module_and_of_the_optimizer(rings: Data) -> None:
    grid = {"module__hidden": [1, 12], "optimizer__krylov_dim": [5]}
    search = GridSearchCV(classifier(train_split=None, max_epochs=3), grid, cv=2).fit(*rings)
    assert search.best_params_["module__hidden"] == 12  # one unit makes a half-plane
    assert search.best_estimator_.reports_[0]["krylov_dim"] == 5


@pytest.mark.parametrize("full_batch", [True, False])
def test_history_has_losses_and_reports(rings: Data, full_batch: bool) -> None:
    on_train = EpochScoring("accuracy", name="train_acc", on_train=True, lower_is_better=False)
    net = classifier(full_batch=full_batch, batch_size=50, steps_per_epoch=2, callbacks=[on_train])
    net.fit(*rings)
    losses = net.history[:, "train_loss"]
    assert losses[-1] < 0.3 * losses[0]
    assert len(net.reports_) == 8
    assert net.reports_[0]["set_sizes"] == ({} if full_batch else {"A": 192, "B": 24, "C": 24})
    assert net.history[-1, ("valid_acc", "train_acc")] > (0.9, 0.9)
    assert net.history[-1, "grad_norm"] == net.reports_[-1]["grad_norm"]


def test_train_loss_is_of_the_parameters_after_the_step(rings: Data) -> None:
    X, y = rings
    net = classifier(train_split=None, batch_size=100).fit(X, y)
    loss = nn.functional.cross_entropy(net.module_(torch.tensor(X)), torch.tensor(y)).item()
    assert net.history[-1, "train_loss"] == pytest.approx(loss, rel=1e-5)
    net.partial_fit(X, y)
    assert net.reports_[4]["loss"] == pytest.approx(loss, rel=1e-5)


def test_regression_and_one_logit(rings: Data) -> None:
    X, y = rings
    target = X[:, :1] * X[:, 1:]
    regressor = KSDRegressor(Net, module__outputs=1, max_epochs=8, verbose=0).fit(X, target)
    assert regressor.score(X, target) > 0.95
    binary = KSDBinaryClassifier(Net, module__outputs=1, max_epochs=5, verbose=0).fit(X, y.astype(np.float32))
    assert binary.score(X, y) > 0.95


def test_the_flow_in_place_of_ksd(rings: Data) -> None:
    X, _ = rings
    target = X[:, :1] * X[:, 1:]
    flow: dict[str, Any] = {"optimizer": GaussNewtonFlow, "optimizer__rows": 60}
    net = KSDRegressor(Net, module__outputs=1, max_epochs=30, verbose=0, train_split=None, **flow).fit(X, target)
    assert net.score(X, target) > 0.9
    assert {report["krylov_dim"] for report in net.reports_} == {0}


def test_sample_weights_leave_out_what_has_none(rings: Data) -> None:
    X, y = rings
    wrong = np.arange(len(y)) % 3 == 0
    corrupted = np.where(wrong, 1 - y, y)
    weight = np.where(wrong, 0.0, 7.0)
    net = classifier(train_split=None).fit(X, corrupted, sample_weight=weight)
    assert net.score(X, y) > 0.95
    without = classifier(train_split=None)
    torch.manual_seed(0)
    without.fit(X[~wrong], y[~wrong])
    torch.manual_seed(0)
    net.fit(X, corrupted, sample_weight=weight)
    assert net.reports_[0]["loss"] == pytest.approx(without.reports_[0]["loss"], rel=1e-5)


def test_sample_weights_go_through_cross_validation_and_sets(rings: Data) -> None:
    X, y = rings
    weight = np.linspace(1, 2, len(y))
    net = classifier(full_batch=False, batch_size=64, max_epochs=10)
    assert cross_val_score(net, X, y, cv=2, params={"sample_weight": weight}).mean() > 0.9


def test_class_weights_and_ignored_samples_are_a_weighted_mean(rings: Data) -> None:
    X, y = rings
    y = np.where(np.arange(len(y)) % 5 == 0, -100, y)
    classes = torch.tensor([1.0, 3.0])
    net = classifier(criterion__weight=classes, full_batch=False, batch_size=30, train_split=None, max_epochs=1)
    net.initialize()
    loss = nn.functional.cross_entropy(net.module_(torch.tensor(X)), torch.tensor(y), weight=classes).item()
    net.partial_fit(X, y)
    assert net.reports_[0]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("full_batch", [True, False])
def test_resume_is_exact(rings: Data, tmp_path: Path, full_batch: bool) -> None:
    whole = classifier(full_batch=full_batch, max_epochs=4).fit(*rings)
    torch.manual_seed(0)
    saved = Checkpoint(monitor=None, dirname=tmp_path, f_pickle="net.pkl")
    classifier(full_batch=full_batch, max_epochs=2, callbacks=[saved]).fit(*rings)
    torch.manual_seed(1)
    resumed = classifier(full_batch=full_batch, max_epochs=2, callbacks=[LoadInitState(saved)]).fit(*rings)
    assert torch.equal(parameters(resumed), parameters(whole))
    assert len(resumed.reports_) == 4
    with (tmp_path / "net.pkl").open("rb") as file:
        pickled = pickle.load(file)
    pickled.set_params(callbacks=None)
    pickled.partial_fit(*rings)
    assert torch.equal(parameters(pickled), parameters(whole))
    assert (tmp_path / "net.pkl").stat().st_size < 50_000  # without the data


def test_early_stopping_and_the_best_checkpoint(rings: Data, tmp_path: Path) -> None:
    best = Checkpoint(monitor="valid_loss_best", dirname=tmp_path, load_best=True)
    stop = EarlyStopping(monitor="valid_loss", patience=2)
    net = classifier(max_epochs=60, callbacks=[("stop", stop), best], callbacks__stop__sink=io.StringIO().write)
    net.fit(*rings)
    assert len(net.history) < 60
    assert min(net.history[:, "valid_loss"]) == net.history[-1, "valid_loss"]  # load_best takes the history back, too
    again = classifier().initialize()
    again.load_params(checkpoint=best)
    assert torch.equal(parameters(again), parameters(net))


def test_clones_and_copies(rings: Data) -> None:
    net = classifier(full_batch=False).fit(*rings)
    assert clone(net).get_params()["full_batch"] is False
    assert not clone(net).initialized_
    assert np.array_equal(copy.deepcopy(net).predict_proba(rings[0]), net.predict_proba(rings[0]))


def test_dropout_is_off_and_said_to_be(rings: Data) -> None:
    net = classifier(module__dropout=0.5)
    with pytest.warns(UserWarning, match="eval mode, where Dropout is off"):
        net.fit(*rings)
    assert net.score(*rings) > 0.9


def test_an_argument_of_the_optimizer_can_be_changed_later(rings: Data) -> None:
    net = classifier(max_epochs=1).fit(*rings)
    net.set_params(optimizer__krylov_dim=3, optimizer__weight_decay=0.5)
    net.partial_fit(*rings)
    assert net.reports_[-1]["krylov_dim"] == 3
    assert net.optimizer_.param_groups[0]["weight_decay"] == 0.5
    assert net.reports_[-1]["loss"] > net.history[0, "train_loss"]  # the decay counts


def test_refusals(rings: Data) -> None:
    with pytest.raises(ValueError, match="skorch's own nets"):
        KSDClassifier(Net, optimizer=torch.optim.SGD, verbose=0).fit(*rings)
    with pytest.raises(ValueError, match="compile=True does not go with KSD"):
        classifier(compile=True).fit(*rings)
    sampler = WeightedRandomSampler([1.0] * 192, 192)
    with pytest.raises(ValueError, match="sample_weight="):
        classifier(iterator_train__sampler=sampler).fit(*rings)
    with pytest.raises(ValueError, match="not all 0"):
        classifier().fit(*rings, sample_weight=np.zeros(240))


def test_docstrings() -> None:
    assert doctest.testmod(integration, extraglobs={"torch": torch}).failed == 0
