"""Every configuration takes the CPU's steps on the device, and the host reads numbers only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from krylov_descent import (
    DEEP,
    KSD,
    PAPER,
    Fisher,
    GaussNewtonFlow,
    Growing,
    Kronecker,
    ModelSearch,
    Points,
    Search,
    Storage,
    Subsets,
    least_squares,
)
from tests.device import mock
from tests.device.training import (
    F64,
    Make,
    Training,
    assert_near,
    assert_same,
    data,
    moved,
    on_all,
    on_batches,
    perceptron,
)


def full_batch(dtype: torch.dtype = F64, method: type[Any] = KSD, **options: Any) -> Make:
    def make(device: torch.device) -> Training:
        model = perceptron(device, dtype)
        return Training(model, method(model.parameters(), **options), on_all(model, moved(data(60, dtype), device)))

    return make


def with_sets(sets: Callable[[Any, torch.device], Any], method: type[Any] = KSD, **options: Any) -> Make:
    def make(device: torch.device) -> Training:
        model = perceptron(device)
        optimizer = method(model.parameters(), **options)
        return Training(model, optimizer, on_batches(model), sets(data(200), device))

    return make


def groups(device: torch.device) -> Training:
    model: Any = perceptron(device)
    optimizer = KSD([{"params": model[0].parameters(), "weight_decay": 1e-3}, {"params": model[2].parameters()}])
    return Training(model, optimizer, on_all(model, moved(data(60), device)))


def classifier(layers: Callable[[], nn.Sequential], shape: tuple[int, ...], **options: Any) -> Make:
    """Random labels on a full batch, or on sets that grow."""

    def make(device: torch.device) -> Training:
        torch.manual_seed(0)
        model = layers().to(device, F64)
        x, y = torch.randn(90, *shape, dtype=F64), torch.randint(5, (90,))

        def closure(batch: Any) -> tuple[Tensor, Tensor]:
            with sdpa_kernel(SDPBackend.MATH):  # the CPU's fused attention rounds otherwise
                z = model(batch[0])
            return F.cross_entropy(z, batch[1]), z

        optimizer = KSD(model.parameters(), **options)
        if "preconditioner" in options:
            return Training(model, optimizer, closure, Growing((x, y), batch_size=30, start=30, seed=0, device=device))
        batch = moved((x, y), device)
        return Training(model, optimizer, lambda: closure(batch))

    return make


def convolution() -> nn.Sequential:
    head = nn.Flatten(), nn.LayerNorm(36), nn.Linear(36, 5)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AvgPool2d(2), *head)


def attention() -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(48, 5))


class LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(3, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.rnn(x)[0][:, -1]
        return last


def normalised() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5)).eval()


def recurrent() -> nn.Sequential:
    return nn.Sequential(LastState(), nn.Linear(8, 5))


def pinn(method: type[Any], **options: Any) -> Make:
    """A closure that differentiates the network, with two terms."""

    def make(device: torch.device) -> Training:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))
        model = model.to(device, F64)
        x = torch.linspace(0, 1, 60, dtype=F64)[:, None].to(device).requires_grad_(True)
        ends = torch.tensor([[0.0], [1.0]], dtype=F64, device=device)

        def closure() -> tuple[Tensor, tuple[Tensor, Tensor]]:
            u = model(x)
            (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (d2u,) = torch.autograd.grad(du.sum(), x, create_graph=True)
            r, b = d2u + torch.pi**2 * torch.sin(torch.pi * x), model(ends)
            return r.square().mean() + 100 * b.square().mean(), (r, b)

        return Training(model, method(model.parameters(), **options), closure)

    return make


def points(device: torch.device) -> Training:
    model = perceptron(device)

    def draw(n: int, generator: torch.Generator) -> Tensor:
        return torch.rand(n, 6, dtype=F64, generator=generator).to(device)

    def closure(x: Tensor) -> tuple[Tensor, Tensor]:
        r = model(x) - torch.sin(3 * x[:, :2] * x[:, 2:4])
        return r.square().mean(), r

    return Training(model, GaussNewtonFlow(model.parameters(), rows=30), closure, Points(draw, 100, seed=0))


def drop_in(sets: bool, method: type[Any]) -> Make:
    """A closure as torch.optim.LBFGS has it."""

    def make(device: torch.device) -> Training:
        model = perceptron(device)
        optimizer = method(model.parameters())
        everything = moved(data(60), device)

        def closure(batch: Any = everything) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(batch[0]), batch[1])
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        return Training(model, optimizer, closure, quarter(data(200), device) if sets else None)

    return make


def quarter(samples: Any, device: torch.device, **options: Any) -> Subsets:
    return Subsets(samples, batch_size=37, seed=3, fraction=0.25, device=device, **options)


def growing(samples: Any, device: torch.device) -> Growing:
    return Growing(samples, batch_size=128, start=60, seed=0, device=device)


CASES: dict[str, Make] = {
    "default": full_batch(),
    "default, float32": full_batch(torch.float32),
    "PAPER": full_batch(**PAPER),
    "Hessian": full_batch(krylov_dim=5, curvature="hessian"),
    "Fisher curvature": full_batch(krylov_dim=5, curvature="fisher"),
    "no preconditioner": full_batch(krylov_dim=5, preconditioner=None),
    "Fisher": full_batch(krylov_dim=5, preconditioner=Fisher(exact=True)),
    "Kronecker": full_batch(krylov_dim=5, preconditioner=Kronecker()),
    "absolute": full_batch(krylov_dim=5, curvature="hessian", search=Search(negative="absolute")),
    "ModelSearch": full_batch(krylov_dim=5, search=ModelSearch()),
    "groups": groups,
    "storage on the CPU": full_batch(krylov_dim=5, storage=Storage(device="cpu")),
    "storage in bfloat16": full_batch(torch.float32, krylov_dim=5, storage=Storage(dtype=torch.bfloat16)),
    "storage on the CPU in float32": full_batch(krylov_dim=5, storage=Storage(device="cpu", dtype=torch.float32)),
    "memory budget": full_batch(krylov_dim=5, memory_budget=100_000),
    "Subsets": with_sets(quarter),
    "Subsets, PAPER": with_sets(quarter, **{**PAPER, "krylov_dim": 5}),
    "Subsets of the device's samples": with_sets(lambda samples, device: quarter(moved(samples, device), device)),
    "Subsets, part of A": with_sets(lambda samples, device: quarter(samples, device, gradient_fraction=0.5)),
    "Growing": with_sets(growing),
    "DEEP": with_sets(growing, **DEEP),
    "BatchNorm": classifier(normalised, (6,)),
    "physics": pinn(KSD),
    "backward": drop_in(False, KSD),
    "backward, Subsets": drop_in(True, KSD),
    "flow": full_batch(method=GaussNewtonFlow),
    "flow, float32": full_batch(torch.float32, GaussNewtonFlow),
    "flow, few rows": pinn(GaussNewtonFlow, rows=20),
    "flow, physics, weight decay": pinn(GaussNewtonFlow, weight_decay=1e-8),
    "flow, Subsets": with_sets(quarter, GaussNewtonFlow, rows=30),
    "flow, Points": points,
    "flow, backward": drop_in(False, GaussNewtonFlow),
}

# torch computes these layers by other operators on a device that has none of its own: the rounding differs.
ROUNDED: dict[str, Make] = {
    "convolution": classifier(convolution, (1, 8, 8)),
    "convolution, DEEP": classifier(convolution, (1, 8, 8), **DEEP),
    "attention": classifier(attention, (6, 8)),
    "attention, DEEP": classifier(attention, (6, 8), **DEEP),
    "recurrent": classifier(recurrent, (5, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_are_the_cpus(name: str, device: torch.device) -> None:
    assert_same(CASES[name], device)


@pytest.mark.parametrize("name", ROUNDED)
def test_steps_are_near_the_cpus(name: str, device: torch.device) -> None:
    assert_near(ROUNDED[name], device)


SAMPLES = 2000
READS: dict[str, Callable[[nn.Module, torch.device], Training]] = {
    "default": lambda model, device: fixed(model, device, KSD),
    "PAPER": lambda model, device: fixed(model, device, KSD, **PAPER),
    "Hessian": lambda model, device: fixed(model, device, KSD, curvature="hessian"),
    "Fisher curvature": lambda model, device: fixed(model, device, KSD, curvature="fisher"),
    "bfloat16": lambda model, device: fixed(model, device, KSD, storage=Storage(dtype=torch.bfloat16)),
    "Subsets": lambda model, device: Training(
        model, KSD(model.parameters()), on_batches(model), quarter(data(SAMPLES), device)
    ),
    "DEEP": lambda model, device: Training(
        model, KSD(model.parameters(), **DEEP), on_batches(model), growing(data(SAMPLES), device)
    ),
    "flow": lambda model, device: fixed(model, device, GaussNewtonFlow),
}


def fixed(model: nn.Module, device: torch.device, method: type[Any], **options: Any) -> Training:
    return Training(model, method(model.parameters(), **options), on_all(model, moved(data(SAMPLES), device)))


@pytest.mark.parametrize("name", READS)
def test_the_host_reads_numbers_and_no_vectors(name: str, device: torch.device) -> None:
    """A step's values on the host are fewer than parameters, and the flow's about two for each residual at most."""
    layers = nn.Linear(6, 100), nn.Tanh(), nn.Linear(100, 100), nn.Tanh(), nn.Linear(100, 2)
    model = nn.Sequential(*layers).to(device, F64)
    training = READS[name](model, device)
    arguments = (training.closure,) if training.sets is None else (training.closure, training.sets)
    for _ in range(3):
        before = mock.counts()
        training.optimizer.step(*arguments)
        assert mock.counts().values - before.values < 5 * SAMPLES < sum(p.numel() for p in model.parameters())


def test_a_basis_on_the_cpu_is_moved(device: torch.device) -> None:
    """So that the counts of the test above tell a vector on the host."""
    model = perceptron(device)
    training = fixed(model, device, KSD, storage=Storage(device="cpu"))
    before = mock.counts()
    training.optimizer.step(training.closure)
    assert mock.counts().values - before.values > 20 * sum(p.numel() for p in model.parameters())


def test_least_squares(device: torch.device) -> None:
    def fit(place: torch.device) -> tuple[float, list[float]]:
        t = torch.linspace(0, 1, 30, dtype=F64, device=place)
        y = 2.0 * torch.exp(-3.0 * t)
        found = least_squares(lambda x: x[0] * torch.exp(-x[1] * t) - y, torch.ones(2, dtype=F64, device=place))
        assert found.x.device == place
        return found.cost, found.x.tolist()

    there = fit(device)
    assert there == fit(torch.device("cpu"))
    assert there[1] == pytest.approx([2.0, 3.0])
