"""A step where others have switched something: autocast, determinism, inference mode, threads, workers, TF32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import Dataset

from krylov_descent import KSD, GaussNewtonFlow, Subsets
from krylov_descent.objective.precision import reduced, warn_if_reduced

pytestmark = pytest.mark.nightly


def made(method: str, model: nn.Module, krylov_dim: int) -> Any:
    if method == "ksd":
        return KSD(model.parameters(), krylov_dim=krylov_dim)
    return GaussNewtonFlow(model.parameters(), rows=60)


def problem(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    x = torch.randn(200, 8, dtype=dtype)
    return model, x, (x[:, :3].sin() + x[:, 3:6]).argmax(1)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# Autocast


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("method", ["ksd", "flow"])
def test_an_autocast_inside_the_closure_trains_in_float32(method: str, outside: bool) -> None:
    model, x, y = problem()

    def closure() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model(x)
        assert hidden.dtype == torch.bfloat16
        return F.cross_entropy(hidden.float(), y), hidden

    optimizer = made(method, model, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
        losses = [optimizer.step(closure).loss for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < (0.5 if method == "ksd" else 0.99) * losses[0]
    if method == "flow":
        return
    V = optimizer.basis()
    assert V.dtype == torch.float32
    # Products would lose this in bfloat16, whose rounding is 4e-3.
    assert float((V @ V.T - torch.eye(len(V))).abs().max()) < 1e-5


@pytest.mark.parametrize("method", ["ksd", "flow"])
def test_an_autocast_around_the_step_changes_no_bit(method: str) -> None:
    def trained(outside: bool) -> Tensor:
        model, x, y = problem()
        optimizer = made(method, model, 6)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
            for _ in range(2):
                optimizer.step(lambda: (F.cross_entropy(z := model(x), y), z))
        return flat(model)

    assert torch.equal(trained(True), trained(False))


# Determinism and threads


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Scattered(nn.Module):
    """With an embedding, a convolution and a scatter, which have nondeterministic kernels on some devices."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.convolution = nn.Conv1d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.convolution(self.embedding(x).transpose(1, 2)))
        out: Tensor = self.head(h.new_zeros(len(x), 4).index_add(1, torch.tensor([0, 1, 2, 3]), h.sum(2)))
        return out


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("method", ["ksd", "flow"])
def test_deterministic_algorithms(method: str) -> None:
    def trained() -> tuple[float, float, Tensor]:
        torch.manual_seed(1)
        model, x = Scattered(), torch.randint(0, 5, (60, 7))
        y = x.sum(1) % 3
        sets = Subsets((x, y), batch_size=20, fraction=0.3, seed=0)
        optimizer = made(method, model, 4)

        def closure(batch: Any) -> Any:
            z = model(batch[0])
            return F.cross_entropy(z, batch[1]), z

        first = optimizer.step(closure, sets).loss
        for _ in range(3):
            optimizer.step(closure, sets)
        return first, optimizer.settle(closure, sets).loss, flat(model)

    first, last, theta = trained()
    assert last < first
    assert torch.equal(theta, trained()[2])


@pytest.mark.parametrize("method", ["ksd", "flow"])
def test_any_number_of_threads(method: str) -> None:
    """Sums are taken in another order, so that figures agree to rounding: the first step's, before it grows."""
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 8, 64):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(30, 300), nn.Tanh(), nn.Linear(300, 4)).double()
            x = torch.randn(400, 30, dtype=torch.float64)  # enough numbers for threads to share
            optimizer = made(method, model, 3)

            def closure(model: nn.Module = model, x: Tensor = x) -> Any:
                r = model(x) - x[:, :4].sin()
                return r.square().mean(), r

            report = optimizer.step(closure)
            found.append((report.loss, report.grad_norm, report.search_loss_after))
            assert optimizer.step(closure).loss == pytest.approx(report.search_loss_after, rel=1e-12)
    finally:
        torch.set_num_threads(before)
    for figures in found[1:]:
        assert figures == pytest.approx(found[0], rel=1e-8)


# Grad modes


def test_inference_mode_is_refused_where_it_begins() -> None:
    model, x, y = problem()
    optimizer = KSD(model.parameters())
    closure: Callable[[], Any] = lambda: (F.cross_entropy(z := model(x), y), z)  # noqa: E731
    with torch.inference_mode():
        for call in (optimizer.step, optimizer.settle, lambda closure: list(optimizer.run(closure, max_steps=1))):
            with pytest.raises(ValueError, match=r"inside torch\.inference_mode\(\)\. Leave it first"):
                call(closure)
        inner = nn.Linear(8, 3)
        data = torch.randn(200, 8)
    with pytest.raises(ValueError, match=r"parameters that were made inside torch\.inference_mode\(\)"):
        KSD(inner.parameters()).step(closure)
    theta = flat(model)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):  # torch's own words
        optimizer.step(lambda: (F.cross_entropy(z := model(data), y), z))
    assert torch.equal(flat(model), theta)

    def without(context: Any) -> Any:
        with context:
            z = model(x)
            return F.cross_entropy(z, y), z

    for context in (torch.inference_mode(), torch.no_grad()):
        with pytest.raises(ValueError, match="does not depend on the parameters given to KSD"):
            optimizer.step(lambda context=context: without(context))
    assert optimizer.step(closure).search_loss_after < optimizer.step(closure).search_loss_before + 1  # and it goes on
    assert not torch.equal(flat(model), theta)


@pytest.mark.parametrize("method", ["ksd", "flow"])
def test_no_grad_around_the_step_changes_no_bit_and_stays(method: str) -> None:
    def trained(grad: bool) -> Tensor:
        model, x, y = problem()
        optimizer = made(method, model, 6)
        with torch.set_grad_enabled(grad):
            optimizer.step(lambda: (F.cross_entropy(z := model(x), y), z))
            assert torch.is_grad_enabled() == grad
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
            assert torch.is_grad_enabled() == grad
        return flat(model)

    assert torch.equal(trained(True), trained(False))


# Workers


class Squares(Dataset[tuple[Tensor, Tensor]]):
    """Of a class that processes can be started with."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 60)[i : i + 1]
        return x, x.square()


_WITH_WORKERS = """
import json, multiprocessing, sys, warnings
warnings.simplefilter("error")
import torch
from krylov_descent import KSD, Subsets
from tests.reliability.test_surroundings import Squares

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    losses = []
    for workers in (0, int(sys.argv[2])):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(1, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        sets = Subsets(Squares(), batch_size=20, fraction=0.3, num_workers=workers, seed=0)
        optimizer = KSD(model.parameters(), krylov_dim=3)

        def closure(batch):
            r = model(batch[0]) - batch[1]
            return r.square().mean(), r

        generator = torch.get_rng_state()
        losses.append([optimizer.step(closure, sets).loss for _ in range(3)])
        assert torch.equal(generator, torch.get_rng_state())
    json.dump(losses, sys.stdout)
"""


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
def test_workers_that_are_forked_or_spawned(method: str, workers: int) -> None:
    command = [sys.executable, "-c", _WITH_WORKERS, method, str(workers)]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert process.returncode == 0, process.stderr
    alone, together = json.loads(process.stdout)
    assert alone == together
    assert alone[-1] < alone[0]


# TF32


@pytest.fixture
def precision() -> Iterator[Callable[[str], None]]:
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def test_a_first_step_warns_of_reduced_precision(precision: Callable[[str], None]) -> None:
    def step(dtype: torch.dtype) -> KSD:
        model, x, y = problem(dtype)
        optimizer = KSD(model.parameters(), krylov_dim=3)
        for _ in range(2):
            optimizer.step(lambda: (F.cross_entropy(z := model(x), y), z))
        return optimizer

    step(torch.float32)  # warnings are errors
    precision("high")
    step(torch.float64)
    with pytest.warns(UserWarning, match=r"TF32.*the line search stalls.*set_float32_matmul_precision") as said:
        step(torch.float32)
    assert len(said) == 1
    assert said[0].filename == __file__


def test_the_rule_for_cuda_by_its_settings(precision: Callable[[str], None]) -> None:
    """Without a device: what torch would do there is read from its settings."""
    cuda = torch.device("cuda")
    precision("highest")
    assert "Matrix products" not in list(reduced(cuda))
    precision("medium")
    assert next(iter(reduced(cuda))) == "Matrix products"
    before = torch.backends.cudnn.allow_tf32
    assert ("Convolutions and recurrent layers" in list(reduced(cuda))) == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_reduced([torch.zeros(3, 3, dtype=torch.float64)])
