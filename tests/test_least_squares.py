from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.least_squares import PROBLEMS, Problem, large
from torch import Tensor

from krylov_descent import LeastSquaresResult, least_squares

F64 = torch.float64
HARD = PROBLEMS["Kowalik & Osborne"]
T = torch.linspace(0, 3, 25, dtype=F64)


class Counted:
    """Residuals that count their calls."""

    def __init__(self, residuals: Callable[[Any], Any]) -> None:
        self.residuals, self.calls = residuals, 0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return self.residuals(x)


@pytest.mark.parametrize("problem", [*PROBLEMS.values(), large(1000)], ids=[*PROBLEMS, "Broyden tridiagonal"])
def test_finds_the_minimum_of_standard_problems(problem: Problem) -> None:
    residuals = Counted(problem.residuals)
    found = least_squares(residuals, problem.start)
    assert found.success
    assert problem.solved(found.cost)
    assert found.nfev == residuals.calls
    assert torch.equal(found.fun, problem.residuals(found.x))
    assert found.cost == pytest.approx(float(found.fun.square().sum()) / 2)


def test_takes_and_returns_pytrees() -> None:
    def residuals(x: Any) -> Any:
        (size, rate), shift = x["curve"], x["shift"]
        return {"fit": size * torch.exp(-rate * T) + shift[0] - 2 * torch.exp(-T) - 0.5, "prior": [shift.sum() - 1]}

    x0 = {"curve": (torch.ones((), dtype=F64), torch.zeros((), dtype=F64)), "shift": torch.zeros(2, dtype=F64)}
    found = least_squares(residuals, x0)
    assert found.success
    size, rate = found.x["curve"]
    assert [float(size), float(rate), *found.x["shift"].tolist()] == pytest.approx([2, 1, 0.5, 0.5])
    assert found.fun["fit"].shape == (25,)
    assert found.fun["prior"][0].shape == ()
    for x in (size, rate, found.x["shift"], found.fun["fit"]):
        assert not x.requires_grad


def test_leaves_x0_alone() -> None:
    x0 = HARD.start.clone()
    found = least_squares(HARD.residuals, x0)
    assert torch.equal(x0, HARD.start)
    assert not x0.requires_grad
    assert x0.grad is None
    assert not torch.equal(found.x, x0)


def test_x0_may_have_any_strides() -> None:
    wanted = torch.arange(6, dtype=F64).reshape(3, 2)
    found = least_squares(lambda x: x - wanted, torch.ones(2, 3, dtype=F64).T)
    assert found.x.tolist() == wanted.tolist()


def test_float32_ends_at_its_rounding_error() -> None:
    y = 2 * torch.exp(-1.5 * T) + 0.01 * torch.sin(40 * T)
    double = least_squares(lambda x: x[0] * torch.exp(-x[1] * T) - y, torch.ones(2, dtype=F64))
    single = least_squares(lambda x: x[0] * torch.exp(-x[1] * T.float()) - y.float(), torch.ones(2))
    assert single.x.dtype == single.fun.dtype == torch.float32
    assert single.success
    assert single.x.tolist() == pytest.approx(double.x.tolist(), rel=1e-3)
    assert single.cost == pytest.approx(double.cost, rel=1e-5)


def test_callback_sees_every_step() -> None:
    seen: list[LeastSquaresResult] = []
    problem = PROBLEMS["Rosenbrock"]
    found = least_squares(problem.residuals, problem.start, callback=seen.append)
    assert [result.nit for result in seen] == list(range(1, found.nit + 1))
    assert seen[-1] is found
    assert [bool(result.message) for result in seen] == [False] * (found.nit - 1) + [True]
    assert all(before.cost > after.cost for before, after in itertools.pairwise(seen[:-1]))
    for result in seen:
        assert torch.equal(result.fun, problem.residuals(result.x))


def test_callback_ends_the_run_by_stop_iteration() -> None:
    def callback(result: LeastSquaresResult) -> None:
        if result.nit == 2:
            raise StopIteration

    problem = PROBLEMS["Meyer"]
    found = least_squares(problem.residuals, problem.start, callback=callback)
    assert found.nit == 2
    assert not found.success
    assert "callback" in found.message


def test_residuals_may_be_x_itself() -> None:
    seen: list[LeastSquaresResult] = []
    found = least_squares(lambda x: x, torch.tensor([3.0, 4.0], dtype=F64), callback=seen.append)
    assert found.cost == 0
    found.x.fill_(7)
    assert found.fun.tolist() == [0, 0]


def test_residuals_may_differentiate_inside_where_gradients_are_off() -> None:
    def residuals(x: Tensor) -> Tensor:
        t = T.clone().requires_grad_()
        u = x[0] * torch.exp(x[1] * t)
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        return torch.cat([du + 2 * u, u[:1] - 3])

    with torch.no_grad():
        found = least_squares(residuals, torch.ones(2, dtype=F64))
    assert found.x.tolist() == pytest.approx([3, -2])


def test_the_message_tells_the_criterion() -> None:
    assert "tol=1e-08" in least_squares(HARD.residuals, HARD.start).message
    exact = least_squares(HARD.residuals, HARD.start, tol=0)
    assert exact.success
    assert "rounding" in exact.message
    at_rest = least_squares(lambda x: x.square() + 1, torch.zeros(3))
    assert (at_rest.success, at_rest.nit, at_rest.message) == (True, 1, "The gradient is zero.")


def test_a_larger_tol_takes_fewer_calls() -> None:
    problem = PROBLEMS["Meyer"]
    rough = least_squares(problem.residuals, problem.start, tol=0.5)
    assert rough.success
    assert rough.nfev < 100


def test_no_success_without_a_criterion(monkeypatch: pytest.MonkeyPatch) -> None:
    walled = least_squares(lambda x: torch.where(x == 1, x, math.nan), torch.ones(1, dtype=F64))
    assert not walled.success
    assert "No lower cost" in walled.message
    assert walled.x.tolist() == [1]
    monkeypatch.setattr(importlib.import_module("krylov_descent.least_squares"), "_STEPS", 2)
    cut = least_squares(PROBLEMS["Meyer"].residuals, PROBLEMS["Meyer"].start)
    assert (cut.success, cut.nit) == (False, 2)
    assert "2 steps were taken" in cut.message


@pytest.mark.parametrize(
    ("residuals", "x0", "told"),
    [
        (lambda x: x, torch.ones(2, dtype=torch.int64), "x0 has a tensor of torch.int64"),
        (lambda x: x, torch.ones(2, dtype=torch.complex64), "x0 has a tensor of torch.complex64"),
        (lambda x: x[0], [torch.ones(2), 1.5], "x0 has 1.5"),
        (lambda x: x, {}, "x0 is empty"),
        (lambda x: x[0], [torch.ones(2), torch.ones(2, dtype=F64)], "x0 mixes torch.float32"),
        (lambda x: x[:0], torch.ones(2), "The result of residuals is empty"),
        (lambda x: float(x.detach().sum()), torch.ones(2), "The result of residuals has 2.0"),
        (lambda x: x > 0, torch.ones(2), "The result of residuals has a tensor of torch.bool"),
        (lambda x: None, torch.ones(2), "The result of residuals has None"),
        (lambda x: x.detach(), torch.ones(2), "do not depend on x"),
        (lambda x: torch.ones(2, requires_grad=True) * 2, torch.ones(2), "do not depend on x"),
        (lambda x: torch.log(x), torch.tensor([1.0, -1.0]), "1 of 2 entries that are not finite"),
        (lambda x: 1e30 * x, torch.ones(2), "0 of 2 entries that are not finite"),
    ],
)
def test_mistakes_are_told_in_words(residuals: Callable[[Any], Any], x0: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        least_squares(residuals, x0)


def test_inference_mode_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        least_squares(lambda x: x - 1, torch.ones(2))


@pytest.mark.parametrize("tol", [-1.0, 1.0, math.nan])
def test_tol_is_checked(tol: float) -> None:
    with pytest.raises(ValueError, match="tol="):
        least_squares(lambda x: x, torch.ones(2), tol=tol)
