"""Frameworks that can be told of a device of one's own train on it as on the CPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("DDE_BACKEND", "pytorch")
with warnings.catch_warnings():
    # torch_geometric, which PINA imports, and accelerate compile functions with torch.jit.script.
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
    formatwarning = warnings.formatwarning
    pytest.importorskip("pina")
    pytest.importorskip("skorch")
    pytest.importorskip("transformers")
    from krylov_descent.integrations.pina import KSDPINN
    from krylov_descent.integrations.skorch import KSDClassifier
    from krylov_descent.integrations.transformers import prepare
    from tests.integrations import test_lightning, test_pina, test_transformers

    warnings.formatwarning = formatwarning  # PINA's import replaces it

from accelerate import Accelerator as Accelerate
from accelerate.state import AcceleratorState, PartialState
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from krylov_descent import KSD, StepReport, Subsets
from krylov_descent.integrations.lightning import StepsLoader
from tests.device.training import CPU, data, on_batches, perceptron

pytestmark = test_pina.pytestmark + test_lightning.pytestmark


class Mock(Accelerator):
    """What Lightning asks for in place of ``accelerator="cpu"``."""

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return 1

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("mock", 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "mock"


def lightning_on(device: torch.device) -> dict[str, Any]:
    if device == CPU:
        return {"accelerator": "cpu"}
    return {"accelerator": Mock(), "devices": 1, "strategy": SingleDeviceStrategy(device=device)}


class Net(test_lightning.Net):
    device_of_batches: torch.device

    def loss_and_outputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        self.device_of_batches = batch[0].device
        return super().loss_and_outputs(batch)


def test_lightnings_trainer(device: torch.device, tmp_path: Path) -> None:
    def fit(place: torch.device, steps: int = 6, **resume: Any) -> list[float]:
        net = Net()
        files = ModelCheckpoint(tmp_path / place.type, "{step}", every_n_train_steps=1, save_top_k=-1)
        settings = {"callbacks": [files], "enable_checkpointing": True, **lightning_on(place)}
        trainer = test_lightning.trainer(tmp_path, max_steps=steps, **settings)
        trainer.fit(net, StepsLoader(test_lightning.sets(), steps=2), **resume)
        assert net.device_of_batches == place
        return [report.loss for report in net.reports]

    there = fit(device)
    assert there == fit(CPU)
    assert there[-1] < 0.1 * there[0]
    assert fit(device, ckpt_path=str(tmp_path / "mock" / "step=3.ckpt")) == there[3:]
    assert fit(CPU, ckpt_path=str(tmp_path / "mock" / "step=3.ckpt")) == there[3:]


def test_pinas_solver(device: torch.device) -> None:
    def solve(place: torch.device) -> float:
        torch.manual_seed(0)
        solver = KSDPINN(test_pina.poisson(), test_pina.network())
        test_pina.train(solver, 5, **lightning_on(place))
        return test_pina.error(solver.to(CPU))

    there = solve(device)
    assert there == solve(CPU)
    assert there < 0.1


def test_a_skorch_net(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 2)).astype(np.float32)
    y = (X[:, 0] * X[:, 1] > 0).astype(np.int64)

    def fit(place: str) -> list[float]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 2))
        net = KSDClassifier(layers, max_epochs=4, verbose=0, optimizer__krylov_dim=5, device=place)
        net.fit(X, y)
        assert next(net.module_.parameters()).device.type == place
        assert net.score(X, y) > 0.9
        losses: list[float] = net.history[:, "train_loss"]
        return losses

    assert fit("mock") == fit("cpu")


@pytest.fixture
def accelerate_picks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Accelerate, and with it the Trainer, takes its device from the environment."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(device))
    for state in (AcceleratorState, PartialState):
        state._reset_state()
    yield device
    for state in (AcceleratorState, PartialState):
        state._reset_state()


def test_prepared_by_accelerate(accelerate_picks: torch.device) -> None:
    accelerator = Accelerate()
    assert accelerator.device == accelerate_picks
    model = accelerator.prepare(perceptron(CPU))
    optimizer = prepare(accelerator, KSD(model.parameters(), krylov_dim=3))
    sets = Subsets(data(200), batch_size=50, seed=0, device=accelerator.device)
    there = [optimizer.step(on_batches(model), sets).loss for _ in range(3)]
    plain = perceptron(CPU)
    own, sets = KSD(plain.parameters(), krylov_dim=3), Subsets(data(200), batch_size=50, seed=0)
    assert there == [own.step(on_batches(plain), sets).loss for _ in range(3)]


def test_hugging_faces_trainer(accelerate_picks: torch.device, tmp_path: Path) -> None:
    def fit(model: nn.Module, **arguments: Any) -> list[float]:
        reports: list[StepReport] = []
        limits = {"max_steps": 3, **arguments}
        made = test_transformers.trainer(tmp_path, model, arguments=limits, on_report=reports.append)
        made.train()
        return [report.loss for report in reports]

    model = test_transformers.gpt2()
    there = fit(model, use_cpu=False)
    assert next(model.parameters()).device == accelerate_picks
    for state in (AcceleratorState, PartialState):
        state._reset_state()
    os.environ.pop("ACCELERATE_TORCH_DEVICE")
    here = fit(test_transformers.gpt2())
    assert there[0] == pytest.approx(here[0], rel=1e-6)
    assert there[-1] < 0.9 * there[0]


def test_a_deepxde_model(device: torch.device) -> None:
    dde = pytest.importorskip("deepxde")
    from krylov_descent.integrations.deepxde import compile_ksd

    before = dde.config.default_float()
    dde.config.set_default_float("float64")

    def equation(x: Tensor, u: Tensor) -> Tensor:
        residual: Tensor = dde.grad.hessian(u, x) + np.pi**2 * torch.sin(np.pi * x)
        return residual

    def fit() -> tuple[list[float], torch.device]:
        dde.config.set_random_seed(0)
        interval = dde.geometry.Interval(0, 1)
        ends = dde.icbc.DirichletBC(interval, lambda x: np.sin(np.pi * x), lambda x, at_end: at_end)
        points = dde.data.PDE(interval, equation, [ends], num_domain=30, num_boundary=2)
        model = dde.Model(points, dde.nn.FNN([1, 16, 16, 1], "tanh", "Glorot uniform"))
        compile_ksd(model)
        losses, _ = model.train(iterations=4, display_every=1, verbose=0)
        return np.concatenate(losses.loss_train).tolist(), next(model.net.parameters()).device

    try:
        there, place = on_default(device, fit)
        assert place == device
        assert there[-2] < there[0]
        assert there == on_default(CPU, fit)[0]
    finally:
        dde.config.set_default_float(before)


def on_default(device: torch.device, work: Any) -> Any:
    """DeepXDE uses torch's default device."""
    torch.set_default_device(device)
    try:
        return work()
    finally:
        torch.set_default_device(None)
