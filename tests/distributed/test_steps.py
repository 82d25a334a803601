"""R ranks must do what one process does: the same steps, to rounding, or to the bit where that is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from krylov_descent import DEEP, Rational
from tests.distributed.pool import Pool, RanksFailedError
from tests.distributed.runs import scattered, train, wrapped

RANKS = (2, 3, 4)

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight decay": {"weight_decay": 1e-2},
    "a subset for A, and steps undone": {"gradient_fraction": 0.5, "fraction": 0.02, "steps": 6},
    "steps undone": {"fraction": 0.03, "steps": 6},
    "no preconditioner": {"preconditioner": None},
    "hessian": {"curvature": "hessian"},
    "fisher": {"curvature": "fisher"},
    "the paper's first vector": {"previous": "e1"},
    "without sets": {"full_batch": True},
    "graphs rebuilt": {"memory_budget": 8_200, "warns": True},
    "two parameters, ranks without a part, five samples": {"kind": "tiny", "n": 5, "fraction": None, "krylov_dim": 3},
    "ranks without samples of B and C": {"n": 9, "batch_size": 1, "steps": 3},
    # All rows are drawn: which of them, were it some, would depend on how the ranks share them.
    "rational": {"basis": "rational"},
    "rational, without sets": {"basis": "rational", "full_batch": True, "weight_decay": 1e-2},
    "kronecker": {"preconditioner": "kronecker", "weight_decay": 1e-2},
    "kronecker, sets that grow": {**DEEP, "growing": 20, "steps": 16},
    "kronecker, a model that promises too much": {**DEEP, "kind": "cube", "n": 400, "growing": 300},
    "kronecker, all samples and earlier steps": {**DEEP, "growing": 103, "steps": 9},
    "kronecker, ranks without samples of B": {**DEEP, "growing": 3, "batch_size": 1},
    "rational, ranks without samples of B and C": {"basis": "rational", "n": 9, "batch_size": 1, "steps": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_do_as_one_process(pool: Pool, name: str) -> None:
    work: Callable[[Any], dict[str, Any]] = functools.partial(train, **CASES[name])
    one = work(None)
    for R in RANKS:
        results = pool.run(R, work)
        for result in results:
            assert torch.equal(result["theta"], results[0]["theta"])
            assert result["losses"] == results[0]["losses"]
        # Two or three samples in C are met almost exactly, and along e₁ there is next to no curvature: both amplify
        # rounding.
        # Sixteen steps on twenty samples do, too.
        tolerance = 1e-3 if "undone" in name else 1e-7 if "first vector" in name or "grow" in name else 1e-10
        for key in ("losses", "after"):
            assert results[0][key] == pytest.approx(one[key], rel=tolerance), (key, R)
        assert results[0]["accepted"] == one["accepted"]
        assert results[0]["B"] == one["B"]
        assert results[0]["rows"] == one["rows"] or "undone" in name
        if tolerance == 1e-10:
            torch.testing.assert_close(results[0]["theta"], one["theta"], rtol=0, atol=1e-6)
            assert results[0]["evaluations"] == one["evaluations"]
    if "undone" in name:
        assert not all(one["accepted"])
    if "earlier" in name:
        assert one["rows"] == [*range(1, 8), 7, 7]
    if "promises" in name:
        assert one["B"][0] == 64 < 128 <= one["B"][-1]


def test_float32_agrees_to_its_rounding(pool: Pool) -> None:
    work = functools.partial(train, dtype=torch.float32)
    one = work(None)
    for R in RANKS:
        assert pool.run(R, work)[0]["losses"] == pytest.approx(one["losses"], rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": torch.float32},
        {"kind": "lstm", "weight_decay": 1e-3},  # signs of the probe
        {"gradient_fraction": 0.5, "dtype": torch.float32, "steps": 8},
        {"kind": "tiny", "n": 5, "fraction": None, "krylov_dim": 3},
        {"basis": Rational(rows=20), "batch_size": 4},
        {"basis": Rational(rows=20), "batch_size": 4, "dtype": torch.float32},
    ],
    ids=str,
)
def test_reproducible_means_the_same_bits(pool: Pool, settings: dict[str, Any]) -> None:
    one = train(None, reproducible=8, **settings)
    for R in (1, 2, 4):
        for result in pool.run(R, functools.partial(train, reproducible=8, **settings)):
            assert result["hash"] == one["hash"]
            assert result["losses"] == one["losses"]


def test_reproducible_is_not_the_default(pool: Pool) -> None:
    """Otherwise the test above would show nothing."""
    one = train(None, dtype=torch.float32)
    assert any(pool.run(R, functools.partial(train, dtype=torch.float32))[0]["hash"] != one["hash"] for R in RANKS)


def test_a_narrow_wire_halves_what_is_sent_and_still_trains(pool: Pool) -> None:
    settings: dict[str, Any] = {"dtype": torch.float32, "steps": 6}
    wide = pool.run(4, functools.partial(train, **settings))[0]
    narrow = pool.run(4, functools.partial(train, wire=torch.bfloat16, **settings))[0]
    assert narrow["losses"][-1] < 0.5 * narrow["losses"][0]
    assert narrow["losses"][-1] == pytest.approx(wide["losses"][-1], rel=0.5)
    assert narrow["sent"][0] < 0.85 * wide["sent"][0]  # directions stay wide


def test_what_is_to_be_inverted_does_not_take_the_narrow_wire(pool: Pool) -> None:
    for narrow, exact in pool.run(2, scattered):
        assert narrow > 1e-4
        assert exact < 1e-15


def test_cost_is_that_of_all_ranks(pool: Pool) -> None:
    """The check before the first step is made by each of them; later steps cost the same for any R."""
    one = train(None)
    for result in pool.run(3, train):
        assert result["cost"][1:] == pytest.approx(one["cost"][1:])


def test_a_wrapped_model_is_refused(pool: Pool) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, wrapped)
    assert all("model.module" in text for text in failed.value.said.values())
