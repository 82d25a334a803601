"""``memory_of``: what it counts, of whom, and that nothing is allocated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import DEEP, KSD, GaussNewtonFlow, Storage
from krylov_descent.checking import memory_of
from krylov_descent.flow.sketch import expected_bytes
from krylov_descent.preconditioners.kronecker import kept_bytes

MIB = 1 << 20


def layers(count: int, width: int = 10_000) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


@pytest.mark.parametrize("R", [1, 2, 8, 1024])
@pytest.mark.parametrize("K", [5, 20])
def test_vectors_of_ksd_are_those_of_the_formula(K: int, R: int) -> None:
    model = layers(8)
    P = sum(p.numel() for p in model.parameters())
    found = memory_of(KSD(model.parameters(), krylov_dim=K), ranks=R)
    assert found.total / (4 * P) == pytest.approx((K + 3) / R + 5 + (R > 1), rel=0.01)
    assert found.owners["basis"] == 4 * (K + 1) * -(-P // R)
    assert sum(found.owners.values()) == found.total


def test_storage_and_dtype_count() -> None:
    params = list(layers(1).double().parameters())
    whole, half = (
        memory_of(KSD(params, storage=Storage(dtype=dtype))).owners["basis"] for dtype in (None, torch.float32)
    )
    assert whole == 2 * half
    assert memory_of(KSD(params, storage=Storage(device="cpu"))).owners["basis"] == 0  # not on the parameters' device


def test_factors_fall_with_ranks() -> None:
    """Eight layers of n² parameters: before and after a step, A, G and their inverses."""
    params = list(layers(8, 4000).parameters())
    for R in (1, 4, 8):
        found = memory_of(KSD(params, **DEEP), ranks=R)
        assert found.owners["factors"] == 2 * kept_bytes(params, torch.float32, R)
        assert found.owners["factors"] == pytest.approx(4 * 8 * 8 * 4000**2 / R, rel=0.01)
        assert found.owners["earlier steps"] == pytest.approx(4 * 5 * 8 * 4000**2 / R, rel=0.01)


def test_a_single_layer_is_not_cut() -> None:
    params = list(layers(1, 4000).parameters())
    one, four = (kept_bytes(params, torch.float32, R) for R in (1, 4))
    assert four == pytest.approx(one, rel=1e-3)
    assert memory_of(KSD(params, **DEEP), ranks=4).owners["factors"] >= 2 * four


def test_the_flow_has_a_sketch() -> None:
    params = list(layers(1, 1000).double().parameters())
    P = sum(p.numel() for p in params)
    for R in (1, 4):
        found = memory_of(GaussNewtonFlow(params, rows=300), ranks=R)
        assert found.owners["sketch"] == expected_bytes(300, P, torch.float64) // R == 2 * 8 * 300 * P // R


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_graphs_are_those_of_the_batch(device: str) -> None:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(3, 200), nn.Tanh(), nn.Linear(200, 1))

    def closure(x: Any) -> tuple[Tensor, Tensor]:
        z = model(x)
        return z.square().mean(), z

    optimizer = KSD(model.parameters(), krylov_dim=2)
    few, many = (memory_of(optimizer, closure, torch.ones(n, 3, device=device)) for n in (1000, 2000))
    assert "graphs" in str(few)
    assert 1000 * 200 * 4 < few.owners["graphs"] == pytest.approx(many.owners["graphs"] / 2, rel=0.01)
    assert few.phase == "basis"
    held = memory_of(optimizer).owners
    assert held["graphs"] == 0


def test_figures_do_not_depend_on_the_device() -> None:
    figures = []
    for device in ("meta", "cpu"):
        params = [torch.nn.Parameter(torch.ones(n, 50, device=device)) for n in (30, 50)]
        figures.append([memory_of(KSD(params, **settings), ranks=2).owners for settings in ({}, DEEP)])
    assert figures[0] == figures[1]


def test_it_is_a_table() -> None:
    text = str(memory_of(KSD(layers(1).parameters()), ranks=8))
    assert text.splitlines()[0] == "3.3 GiB on each of 8 ranks, at the peak of a step (search):"
    assert "  763.0 MiB  parameters" in text
    assert "in one process" in str(memory_of(KSD(layers(1).parameters())))


@pytest.mark.parametrize("ranks", [0, -1, 1.5])
def test_ranks_are_a_number(ranks: Any) -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        memory_of(KSD(layers(1).parameters()), ranks=ranks)


def test_it_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def closure(x: Any) -> tuple[Tensor, Tensor]:
        z = model(x)
        return z.square().mean(), z

    before, generator = {name: x.clone() for name, x in model.state_dict().items()}, torch.get_rng_state()
    memory_of(KSD(model.parameters()), closure, torch.ones(6, 3))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
