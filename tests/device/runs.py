"""Loaders, runs, checks, trials, states and checkpoint files, also from one device to the other."""

from __future__ import annotations

import copy
import io
import math
import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from krylov_descent import DEEP, KSD, GaussNewtonFlow, Growing, Storage, Subsets, check, checkpoint
from krylov_descent.progress import Progress
from tests.device.training import (
    CPU,
    Make,
    Training,
    agree,
    assert_same,
    data,
    digest,
    moved,
    numbers,
    on_all,
    on_batches,
    perceptron,
)


def full_batch(method: type[Any] = KSD, **options: Any) -> Make:
    def make(device: torch.device) -> Training:
        model = perceptron(device)
        return Training(model, method(model.parameters(), **options), on_all(model, moved(data(60), device)))

    return make


def with_sets(method: type[Any] = KSD, **options: Any) -> Make:
    def make(device: torch.device) -> Training:
        model = perceptron(device)
        sets = Subsets(data(200), batch_size=37, seed=3, fraction=0.25, device=device)
        return Training(model, method(model.parameters(), **options), on_batches(model), sets)

    return make


def deep(device: torch.device) -> Training:
    model = perceptron(device)
    sets = Growing(data(900), batch_size=128, start=60, seed=0, device=device)
    return Training(model, KSD(model.parameters(), **DEEP), on_batches(model), sets)


KEPT: dict[str, Make] = {
    "default": full_batch(krylov_dim=5),
    "storage on the CPU": full_batch(krylov_dim=5, storage=Storage(device="cpu")),
    "Subsets": with_sets(krylov_dim=5),
    "DEEP": deep,
    "flow": full_batch(GaussNewtonFlow),
    "flow, Subsets": with_sets(GaussNewtonFlow, rows=30),
}
FROM_TO = pytest.mark.parametrize("places", ["device device", "device cpu", "cpu device"])


def placed(places: str, device: torch.device) -> Iterator[torch.device]:
    return (device if place == "device" else CPU for place in places.split())


@FROM_TO
@pytest.mark.parametrize("name", KEPT)
def test_a_checkpoint_resumes_to_the_bit(name: str, places: str, device: torch.device, tmp_path: Path) -> None:
    """Also on the other device, whose results are the same; of DEEP to rounding."""
    begun_on, resumed_on = placed(places, device)
    begun = KEPT[name](begun_on)
    numbers(begun, 3)
    path = checkpoint.save(tmp_path / "run.safetensors", begun.model, begun.optimizer)
    unstopped = numbers(begun, 3)
    resumed = KEPT[name](resumed_on)
    assert checkpoint.load(path, resumed.model, resumed.optimizer) == {}
    assert agree(numbers(resumed, 3), unstopped, exact=name != "DEEP" or begun_on == resumed_on)
    assert {p.device for p in resumed.model.parameters()} == {resumed_on}


@FROM_TO
@pytest.mark.parametrize("name", KEPT)
def test_a_state_dict_resumes_to_the_bit(name: str, places: str, device: torch.device) -> None:
    begun_on, resumed_on = placed(places, device)
    begun = KEPT[name](begun_on)
    numbers(begun, 3)
    file = io.BytesIO()
    torch.save((begun.model.state_dict(), begun.optimizer.state_dict()), file)
    unstopped = numbers(begun, 3)
    for where in (None, resumed_on, "cpu"):
        file.seek(0)
        weights, state = torch.load(file, map_location=where, weights_only=True)
        resumed = KEPT[name](resumed_on)
        resumed.model.load_state_dict(weights)
        resumed.optimizer.load_state_dict(state)
        assert agree(numbers(resumed, 3), unstopped, exact=name != "DEEP" or begun_on == resumed_on)


def test_copies_and_pickles(device: torch.device) -> None:
    model, optimizer, closure, _ = full_batch()(device)
    optimizer.step(closure)
    for other, its_optimizer in (
        copy.deepcopy((model, optimizer)),
        pickle.loads(pickle.dumps((model, optimizer))),
    ):
        assert next(other.parameters()).device == device
        assert digest(other) == digest(model)
        its_optimizer.step(on_all(other, moved(data(60), device)))
        assert digest(other) != digest(model)


def loaded(sets: Callable[[torch.device], Any], non_blocking: bool = False) -> Make:
    """A closure that moves its batch, as a loop over a DataLoader does."""

    def make(device: torch.device) -> Training:
        model = perceptron(device)
        regression = on_batches(model)

        def closure(batch: Any) -> tuple[Tensor, Tensor]:
            return regression([x.to(device, non_blocking=non_blocking) for x in batch])

        return Training(model, KSD(model.parameters(), krylov_dim=5), closure, sets(device))

    return make


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_pinned_memory(device: torch.device, workers: int) -> None:
    others = multiprocessing.active_children()
    dataset = TensorDataset(*data(200))

    def loader(place: torch.device) -> Any:
        pinned = place.type != "cpu"
        return DataLoader(dataset, batch_size=50, shuffle=True, num_workers=workers, pin_memory=pinned)

    assert_same(loaded(loader, non_blocking=True), device, 2)
    assert workers or multiprocessing.active_children() == others


def test_workers_and_a_device(device: torch.device) -> None:
    rows = [tuple(row) for row in zip(*data(120), strict=True)]

    def sets(place: torch.device) -> Subsets:
        return Subsets(rows, batch_size=30, fraction=0.3, seed=1, num_workers=2, device=place)

    assert_same(loaded(sets), device, 2)


def test_batches_are_mappings_on_the_device(device: torch.device) -> None:
    x, y = data(120)
    rows = [{"x": a, "more": [b]} for a, b in zip(x, y, strict=True)]

    def make(place: torch.device) -> Training:
        model = perceptron(place)

        def closure(batch: Any) -> tuple[Tensor, Tensor]:
            assert batch["x"].device == batch["more"][0].device == place
            r = model(batch["x"]) - batch["more"][0]
            return r.square().mean(), r

        return Training(
            model, KSD(model.parameters(), krylov_dim=5), closure, Subsets(rows, batch_size=40, seed=0, device=place)
        )

    assert_same(make, device, 2)


@pytest.mark.parametrize("name", KEPT)
def test_a_run_ends_and_gives_its_best_point(name: str, device: torch.device) -> None:
    def outcome(place: torch.device) -> tuple[Any, ...]:
        model, optimizer, closure, sets = KEPT[name](place)
        seen: list[Progress] = []
        optimizer.on_progress = seen.append
        run = optimizer.run(closure, sets, max_steps=6, patience=5)
        losses = [report.loss for report in run]
        run.restore_best()
        assert seen
        assert run.loss <= losses[0]
        return losses, run.loss, run.reason, digest(model)

    found, expected = outcome(device), outcome(CPU)
    if name == "DEEP":
        assert found[0] == pytest.approx(expected[0], rel=1e-9)
    else:
        assert found == expected


@pytest.mark.parametrize("name", ["default", "Subsets"])
def test_check_is_the_cpus(name: str, device: torch.device) -> None:
    found = []
    for place in (CPU, device):
        model, _, closure, sets = KEPT[name](place)
        before, state = digest(model), torch.get_device_module(device).get_rng_state()
        report = check(closure, model, sets, available_memory=10**9)
        assert report.ok, str(report)
        assert digest(model) == before
        assert torch.equal(torch.get_device_module(device).get_rng_state(), state)
        found.append([(x.name, x.status) for x in report.findings])
    assert found[0] == found[1]


def test_a_trial(device: torch.device) -> None:
    model, _, closure, sets = with_sets()(device)
    report = check(closure, model, sets, try_seconds=0.2)
    assert report.ok, str(report)
    assert len(report.trial) >= 5
    assert all(not row.note and math.isfinite(row.loss_after) for row in report.trial), str(report)


def test_a_default_device(device: torch.device) -> None:
    """Tensors that the closure and the optimizer make without a device are there, too."""
    with torch.device(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).double()
        x = torch.linspace(-1, 1, 240, dtype=torch.float64).reshape(40, 6)

        def closure(batch: Any = x) -> tuple[Tensor, Tensor]:
            r = model(batch) - torch.ones(2, dtype=torch.float64)
            return r.square().mean(), r

        for optimizer in (KSD(model.parameters()), GaussNewtonFlow(model.parameters())):
            losses = [optimizer.step(closure).loss for _ in range(3)]
            assert losses[-1] < losses[0]
        for sets in (Subsets(x, batch_size=20, seed=0), Growing(x, batch_size=20, start=20, seed=0)):
            method = KSD(model.parameters(), **(DEEP if isinstance(sets, Growing) else {}))
            assert math.isfinite([method.step(closure, sets).loss for _ in range(2)][-1])
        assert check(closure, model).ok
