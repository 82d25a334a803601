"""What the Kronecker factors take: the figures against what steps hold, and what is said where they do not fit."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from krylov_descent import DEEP, KSD, Growing, StepReport, Subsets, check
from krylov_descent.preconditioners.kronecker import kept_bytes, step_bytes
from krylov_descent.preconditioners.statistics import LARGE

Closure = Callable[[Any], tuple[Tensor, Tensor]]


def dense() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 30), nn.Tanh(), nn.Linear(30, 3))
    return model, torch.randn(200, 20)


def convolutional() -> tuple[nn.Module, Tensor]:
    body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 12, 3, bias=False), nn.ReLU())
    return nn.Sequential(body, nn.Flatten(), nn.Linear(192, 3)), torch.randn(200, 1, 8, 8)


def embedding() -> tuple[nn.Module, Tensor]:
    """One of each: below and beyond the size from which other matrices have a diagonal."""
    small, large = nn.Embedding(40, 6), nn.Embedding(LARGE + 4, 6)
    return nn.Sequential(Sum(small, large), nn.Linear(24, 3)), torch.randint(40, (200, 4))


class Sum(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x).flatten(1) for part in self.parts]).sum(0)


def problem(build: Callable[[], tuple[nn.Module, Tensor]], dtype: torch.dtype) -> tuple[nn.Module, Growing, Closure]:
    torch.manual_seed(0)
    model, x = build()
    model.to(dtype)
    data = x.to(dtype) if x.is_floating_point() else x, torch.randint(3, (200,))

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch[0])
        return F.cross_entropy(z, batch[1]), z

    return model, Growing(data, batch_size=25, start=100, seed=0), closure


def held(optimizer: KSD) -> int:
    return sum(x.nbytes for x in optimizer.whole_state().tensors.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("build", "tolerance"), [(dense, 0.02), (convolutional, 0.02), (embedding, 40.0)])
def test_the_figure_is_what_factors_hold(
    build: Callable[[], tuple[nn.Module, Tensor]], tolerance: float, dtype: torch.dtype
) -> None:
    """From above; to 2 % where there is no embedding."""
    model, sets, closure = problem(build, dtype)
    optimizer = KSD(model.parameters(), **DEEP)
    for _ in range(3):
        optimizer.step(closure, sets)
    assert held(optimizer) <= kept_bytes(optimizer.trained(), dtype) <= (1 + tolerance) * held(optimizer)


def test_half_precision_parameters_have_factors_in_float32() -> None:
    model, sets, closure = problem(dense, torch.bfloat16)
    optimizer = KSD(model.parameters(), **DEEP)
    optimizer.step(closure, sets)
    assert held(optimizer) <= kept_bytes(optimizer.trained(), torch.float32) < 1.02 * held(optimizer)


@pytest.mark.parametrize("build", [dense, convolutional])
def test_in_a_step_there_are_the_old_and_the_new(build: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    model, sets, closure = problem(build, torch.float32)
    optimizer = KSD(model.parameters(), **DEEP)
    for _ in range(2):
        optimizer.step(closure, sets)
    shapes = {x.shape for x in optimizer.whole_state().tensors.values() if x.ndim == 2}
    assert shapes.isdisjoint(p.shape for p in model.parameters())
    found = []

    def look(_: Any) -> None:
        matrices = (x for x in gc.get_objects() if type(x) is Tensor and x.shape in shapes)
        found.append(sum({x.untyped_storage().data_ptr(): x.nbytes for x in matrices}.values()))

    optimizer.on_progress = look
    optimizer.step(closure, sets)
    assert optimizer.whole_state().numbers["preconditioner.age"] == 0  # the inverses are new, too
    figure = step_bytes(optimizer._objective(closure, sets, optimizer._parameters()))
    assert 1.95 * held(optimizer) < max(found) <= figure
    # Beside them, of the largest matrix, what inverts it in float64.
    largest = max(max(shape) for shape in shapes)
    assert figure == 2 * kept_bytes(optimizer.trained(), torch.float32) + 3 * 8 * largest**2


def test_what_does_not_fit_is_refused_or_announced() -> None:
    def run(budget: int, **settings: Any) -> tuple[StepReport, list[str]]:
        model, sets, closure = problem(dense, torch.float32)
        optimizer = KSD(model.parameters(), **{**DEEP, **settings}, memory_budget=budget)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = optimizer.step(closure, sets)
        return report, [str(w.message) for w in caught]

    model, sets, closure = problem(dense, torch.float32)
    optimizer = KSD(model.parameters(), **DEEP)
    factors = step_bytes(optimizer._objective(closure, sets, optimizer._parameters()))
    V = 2 * optimizer.numel * 4
    with pytest.raises(ValueError, match=rf"takes {V:,} bytes .*, the factors of .* up to {factors:,}, more") as error:
        run(V + factors - 1)
    assert "preconditioner='fisher', which has no factors" in str(error.value)
    run(V, preconditioner="fisher")  # what it says is true
    _, (message,) = run(V + factors)
    assert "about 0 of 3 graphs are kept" in message
    found = re.search(r"memory_budget=([\d,]+);", message)
    assert found is not None
    enough = int(found[1].replace(",", ""))
    assert enough > V + factors
    assert run(enough)[1] == []
    with pytest.raises(ValueError, match=r"krylov_dim=3;"):
        run(factors + 4 * (V // 2), krylov_dim=10)


def test_check_counts_them_where_it_advises_them() -> None:
    model, sets, closure = problem(dense, torch.float32)
    optimizer = KSD(model.parameters(), **DEEP)
    factors = step_bytes(optimizer._objective(closure, sets, optimizer._parameters()))

    def memory(sets: Any, available: int | None = None) -> tuple[str, str, str]:
        report = check(closure, model, sets, available_memory=available)
        (finding,) = (f for f in report.findings if f.name == "memory")
        return finding.status, finding.detail, report.line

    words = f"up to {factors / 1024:.1f} KiB"
    status, detail, _ = memory(sets)
    assert status == "ok"
    assert "for K = 1;" in detail
    assert words in detail
    V = 2 * optimizer.numel * 4
    status, detail, line = memory(sets, (V + factors) * 5 // 4 + 10)
    assert (status, detail.rpartition(": ")[2]) == ("warn", "the graphs do not fit")
    scope: dict[str, Any] = {"model": model}
    exec(line, scope)
    with pytest.warns(UserWarning, match="about 0 of 3 graphs are kept"):  # its budget holds the rest
        scope["optimizer"].step(closure, sets)
    status, detail, _ = memory(sets, (V + factors) * 5 // 4 - 10)
    assert (status, detail.rpartition(": ")[2]) == ("warn", "the factors may not fit")
    assert memory(sets, 1000)[0] == "fail"
    # Of sets that do not grow they are told, and do not count: nothing advises them there.
    data = torch.randn(200, 20), torch.randint(3, (200,))
    status, detail, _ = memory(Subsets(data, batch_size=25, fraction=0.25, seed=0))
    assert words in detail
    assert "for K = 20" in detail
