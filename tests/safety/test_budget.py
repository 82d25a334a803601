"""Memory: what is announced, what is refused, and what other storages of V cost in accuracy."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Search, StepReport, Storage, Subsets
from krylov_descent.distributed import SingleProcess
from krylov_descent.krylov.orthonormal_basis import krylov_basis
from krylov_descent.vectors.storage import BasisStorage
from tests.krylov.test_basis import setup


def network(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Subsets, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 1)).to(dtype)
    x = torch.randn(400, 20, dtype=dtype)
    y = torch.sin(x.sum(1, keepdim=True))

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        r = model(batch[0]) - batch[1]
        return r.square().mean(), r

    return model, Subsets((x, y), batch_size=25, fraction=0.25, seed=0), closure


P = 20 * 50 + 50 + 50 + 1
V = 11 * P * 4


def test_a_basis_that_does_not_fit_is_refused_before_anything_runs() -> None:
    model, sets, closure = network()
    calls = []

    def counted(batch: Any) -> Any:
        calls.append(len(batch[0]))
        return closure(batch)

    before = [p.clone() for p in model.parameters()]
    optimizer = KSD(model.parameters(), krylov_dim=10, memory_budget=V - 1)
    with pytest.raises(ValueError, match=rf"takes {V:,} bytes \(11 vectors of {P:,} parameters in float32\)") as error:
        optimizer.step(counted, sets)
    with pytest.raises(ValueError, match="memory_budget"):  # and again
        optimizer.step(counted, sets)
    assert calls == []
    assert f"Storage(dtype=torch.bfloat16), {V // 2:,} bytes" in str(error.value)
    assert "krylov_dim=9" in str(error.value)
    assert "float32" not in str(error.value).split("Remedies")[1]
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))
    # What it says is true.
    KSD(model.parameters(), krylov_dim=10, memory_budget=10**7, storage=Storage(dtype=torch.bfloat16)).step(
        closure, sets
    )
    with pytest.warns(UserWarning, match="rebuilt"):
        KSD(model.parameters(), krylov_dim=9, memory_budget=V - 1).step(closure, sets)


def test_graphs_that_do_not_fit_are_announced_and_rebuilt() -> None:
    def run(budget: int | None) -> tuple[StepReport, list[str]]:
        model, sets, closure = network()
        optimizer = KSD(model.parameters(), krylov_dim=10, memory_budget=budget)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = optimizer.step(closure, sets)
            optimizer.step(closure, sets)
        return report, [str(w.message) for w in caught]

    free, said = run(None)
    assert said == []
    none_kept, (message,) = run(V)  # said once
    assert "about 0 of 4 graphs are kept" in message
    found = re.search(r"memory_budget=([\d,]+);", message)
    assert found is not None
    enough = int(found[1].replace(",", ""))
    some_kept, (message,) = run(V + (enough - V) * 3 // 10)
    assert "about 1 of 4 graphs are kept" in message
    all_kept, said = run(enough)
    assert said == []
    # The same step, by more passes.
    for report in (none_kept, some_kept, all_kept):
        assert report.search_loss_after == pytest.approx(free.search_loss_after, rel=1e-3)
    build = 100 * 11  # the 100 samples of B, for each of 11 products instead of once
    assert none_kept.sample_gradients - free.sample_gradients > 0.8 * build
    assert none_kept.sample_gradients > some_kept.sample_gradients > all_kept.sample_gradients


@pytest.mark.parametrize(("dtype", "stored"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)])
def test_rows_in_another_dtype(dtype: torch.dtype, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All operations on V agree with those on the tensor it holds, in parts that do not divide P."""
    monkeypatch.setattr("krylov_descent.vectors.storage._CHUNK", 70)
    H, D, g, d_prev = setup(53, dtype=dtype)
    rows = BasisStorage(9, g, stored)
    subspace = krylov_basis(lambda v: H @ v, lambda w: w / D, g, d_prev, 8, rows, SingleProcess())
    held = rows.tensor()
    assert held.dtype == dtype
    assert torch.equal(held, held.to(stored).to(dtype))
    x, c = torch.randn(53, dtype=dtype), torch.randn(9, dtype=dtype)
    tolerance: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    torch.testing.assert_close(rows.dots(x), held @ x, **tolerance)
    torch.testing.assert_close(rows.combine(c), held.T @ c, **tolerance)
    torch.testing.assert_close(rows.gram(), held @ held.T, **tolerance)
    left = x.clone()
    rest = x - held.T @ c
    torch.testing.assert_close(rows.sweep(c, left), torch.cat([held @ rest, (rest @ rest)[None]]), **tolerance)
    torch.testing.assert_close(rows.products([x, rest]), torch.stack([held @ x, held @ rest]), **tolerance)
    torch.testing.assert_close(rows.row(3), held[3])
    torch.testing.assert_close(left, x - held.T @ c, **tolerance)
    rows.subtract(c, left)
    torch.testing.assert_close(left, x - 2 * held.T @ c, **tolerance)
    # H̄ is that of the rows as stored, so that the search is over what it believes to search.
    torch.testing.assert_close(subspace.H.to(dtype), held @ H @ held.T, rtol=1e-3, atol=1e-4)
    assert subspace.orthogonality_error < 40 * torch.finfo(stored).eps


@pytest.mark.parametrize(("dtype", "stored"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)])
def test_training_with_a_smaller_basis(dtype: torch.dtype, stored: torch.dtype) -> None:
    losses = []
    for storage in (Storage(), Storage(dtype=stored), Storage(dtype=stored, device="cpu")):
        model, sets, closure = network(dtype)
        optimizer = KSD(model.parameters(), storage=storage, search=Search(iterations=10))
        losses.append([optimizer.step(closure, sets).loss for _ in range(6)][-1])
    assert losses[1] == losses[2]
    assert max(losses) < 1.5 * min(losses)


@pytest.mark.parametrize("bad", [{"dtype": torch.int8}, {"dtype": "bf16"}, {"device": "nowhere"}])
def test_options_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a"):
        Storage(**bad)
    with pytest.raises(ValueError, match="storage="):
        KSD([nn.Parameter(torch.ones(2))], storage="bf16")  # type: ignore[arg-type]
