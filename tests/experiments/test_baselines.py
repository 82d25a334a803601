"""The baselines: conjugate gradients, Martens' rules one by one, whole runs, resume."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from experiments.baselines import HessianFree, NonlinearCG
from experiments.baselines.backtracking import armijo, backtrack, new_damping
from experiments.baselines.conjugate_gradient import Iterate, conjugate_gradient, stalled
from experiments.baselines.line_search import Trial, strong_wolfe
from torch import Tensor, nn

from krylov_descent import StepReport, StopReason, Subsets

f64 = torch.float64


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spd(n: int, condition: float, seed: int = 0) -> Tensor:
    Q, _ = torch.linalg.qr(torch.randn(n, n, generator=rng(seed), dtype=f64))
    A: Tensor = (Q * torch.logspace(0, -math.log10(condition), n, dtype=f64)) @ Q.T
    return A


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


# Conjugate gradients


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_cg_solves(preconditioned: bool, warm: bool) -> None:
    A = spd(10, 1e3)
    b = torch.randn(10, generator=rng(1), dtype=f64)
    x0 = torch.randn(10, generator=rng(2), dtype=f64) if warm else None
    begin = None if x0 is None else x0.clone()
    precondition = (lambda r: r / A.diagonal()) if preconditioned else None
    result = conjugate_gradient(lambda v: A @ v, b, x0, precondition)
    assert result.stop_reason is StopReason.CONVERGED
    last = result.iterates[-1]
    expected = np.linalg.solve(A.numpy(), b.numpy())
    np.testing.assert_allclose(last.x.numpy(), expected, atol=1e-8 * np.abs(expected).max())
    assert last.value == pytest.approx(float(0.5 * last.x @ A @ last.x - b @ last.x), rel=1e-12)
    if x0 is not None:
        assert torch.equal(x0, begin)  # type: ignore[arg-type]


def test_cg_keeps_martens_iterates_and_the_last() -> None:
    A = spd(400, 1e8)
    b = torch.randn(400, generator=rng(1), dtype=f64)
    result = conjugate_gradient(lambda v: A @ v, b, max_iterations=100)
    assert result.stop_reason is StopReason.MAX_ITERATIONS
    assert [it.iteration for it in result.iterates] == [5, 7, 9, 11, 15, 19, 25, 32, 41, 54, 69, 90, 100]
    for it in result.iterates:  # each is a copy, with its own φ
        assert it.value == pytest.approx(float(0.5 * it.x @ A @ it.x - b @ it.x), rel=1e-9)
    values = [it.value for it in result.iterates]
    assert values == sorted(values, reverse=True)


def test_cg_keeps_an_iterate_once() -> None:
    A = spd(50, 1e6)
    result = conjugate_gradient(lambda v: A @ v, torch.ones(50, dtype=f64), max_iterations=7)
    assert [it.iteration for it in result.iterates] == [5, 7]


def test_stop_rule_on_sequences() -> None:
    flat = [-1.0] * 10
    assert not stalled(flat)
    assert stalled([*flat, -1.0])
    # i = 11, k = 10: what counts is φ_1, by 5e-4·10 = 0.5 % of φ_11.
    assert stalled([-1.0, *[-1.0] * 9, -1.0049])
    assert not stalled([-1.0, *[-1.0] * 9, -1.0051])
    assert not stalled([0.5, *[-1.0] * 9, -1.0])  # φ_1 ≥ 0
    # i = 200, k = 20: φ_180, by 1 %.
    assert stalled([-5.0] * 179 + [-1.0] + [-2.0] * 19 + [-1.009])
    assert not stalled([-5.0] * 179 + [-1.0] + [-2.0] * 19 + [-1.011])
    # i = 101, k = 11.
    assert not stalled([-1.0] * 89 + [-0.5] + [-1.0] * 11)
    assert stalled([-1.0] * 90 + [-1.0] + [-1.0] * 10)


def test_cg_ends_at_the_first_iteration_that_stalls() -> None:
    A = spd(120, 1e5)
    b = torch.randn(120, generator=rng(3), dtype=f64)
    result = conjugate_gradient(lambda v: A @ v, b)
    n = result.iterations
    assert result.stop_reason is StopReason.CONVERGED
    assert 11 < n < 250
    values = [conjugate_gradient(lambda v: A @ v, b, max_iterations=i).iterates[-1].value for i in range(1, n + 1)]
    assert [stalled(values[:i]) for i in range(1, n + 1)] == [False] * (n - 1) + [True]


def test_cg_at_a_zero_residual_negative_curvature_and_nan() -> None:
    A = spd(4, 10)
    zero = conjugate_gradient(lambda v: A @ v, torch.zeros(4, dtype=f64))
    assert (zero.stop_reason, zero.iterations) == (StopReason.CONVERGED, 0)
    assert not zero.iterates[-1].x.any()

    indefinite = torch.diag(torch.tensor([3.0, 2.0, 1.0, -1e-3], dtype=f64))
    result = conjugate_gradient(lambda v: indefinite @ v, torch.ones(4, dtype=f64))
    assert result.stop_reason is StopReason.NEGATIVE_CURVATURE
    assert 0 < result.iterations < 4
    assert result.iterates[-1].value < 0

    calls = 0

    def breaks(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return A @ v * (math.nan if calls == 3 else 1)

    broken = conjugate_gradient(breaks, torch.arange(4, dtype=f64))
    assert (broken.stop_reason, broken.iterations) == (StopReason.NON_FINITE, 2)
    assert broken.iterates[-1].x.isfinite().all()


def test_cg_may_be_given_the_same_buffers() -> None:
    A, out, y = spd(20, 100), torch.empty(20, dtype=f64), torch.empty(20, dtype=f64)
    b = torch.randn(20, generator=rng(1), dtype=f64)
    reused = conjugate_gradient(lambda v: torch.mv(A, v, out=out), b, b, lambda r: torch.mul(r, 0.5, out=y))
    fresh = conjugate_gradient(lambda v: A @ v, b, b, lambda r: r * 0.5)
    assert torch.equal(reused.iterates[-1].x, fresh.iterates[-1].x)


# The rules after CG


def test_damping_rule() -> None:
    for rho, factor in (
        (-math.inf, 1.5),
        (0.249, 1.5),
        (math.nan, 1.5),
        (0.25, 1),
        (0.75, 1),
        (0.751, 2 / 3),
        (9, 2 / 3),
    ):
        assert new_damping(4.0, rho) == pytest.approx(4.0 * factor)


def chain(*values: float) -> tuple[list[Iterate], Callable[[Tensor], float], list[int]]:
    seen: list[int] = []

    def value(x: Tensor) -> float:
        seen.append(int(x))
        return values[int(x)]

    return [Iterate(i, torch.tensor(float(i)), 0.0) for i in range(len(values))], value, seen


def test_backtracking_stops_at_the_first_that_is_worse() -> None:
    iterates, value, seen = chain(0.0, 5.0, 2.0, 2.0, 3.0)
    chosen, lowest = backtrack(value, iterates)
    assert (chosen.iteration, lowest) == (2, 2.0)  # a tie goes to the earlier; the best of all is not reached
    assert seen == [4, 3, 2, 1]


def test_backtracking_takes_the_last_the_first_and_leaves_what_is_infinite() -> None:
    assert backtrack(*reversed(chain(3.0, 2.0, 1.0)[:2]))[0].iteration == 2
    assert backtrack(*reversed(chain(1.0, 2.0, 3.0)[:2]))[0].iteration == 0
    assert backtrack(*reversed(chain(1.0)[:2]))[0].iteration == 0
    assert backtrack(*reversed(chain(2.0, 1.0, math.inf, math.inf)[:2]))[0].iteration == 1


def test_armijo() -> None:
    def never(rate: float) -> float:
        rates.append(rate)
        return 1.0

    rates: list[float] = []
    assert armijo(never, 1.0, -1.0, 1.0) == (0.0, 1.0)
    np.testing.assert_allclose(rates, 0.8 ** np.arange(1, 60))
    assert armijo(never, 1.0, -1.0, 0.989) == (1.0, 0.989)  # the value at rate 1 is known
    assert armijo(lambda rate: 1 - 0.0099 * rate, 1.0, -1.0, 0.9901) == (0.0, 1.0)  # less than 1e-2 of the slope
    assert armijo(lambda rate: math.inf if rate > 0.6 else 0.5, 1.0, -1.0, math.inf)[0] == pytest.approx(0.8**3)
    assert armijo(lambda rate: 1.001, 1.0, 1.0, 1.001) == (0.0, 1.0)  # uphill: no rise all the same


# Hessian-free, whole steps


class Regression:
    """Linear least squares with a weight decay, in float64."""

    def __init__(self, n: int = 60, features: int = 8, c: float = 0.0) -> None:
        self.x = torch.randn(n, features, generator=rng(), dtype=f64) * torch.linspace(0.3, 3, features, dtype=f64)
        self.y = torch.randn(n, generator=rng(1), dtype=f64)
        self.layer = nn.Linear(features, 1, bias=False, dtype=f64)  # so that diag F is exact
        self.weight = self.layer.weight
        with torch.no_grad():
            self.weight.copy_(torch.randn(1, features, generator=rng(2), dtype=f64))
        self.c = c

    @property
    def w(self) -> Tensor:
        return self.weight.detach()[0]

    def closure(self) -> tuple[Tensor, Tensor]:
        return self.on((self.x, self.y))

    def on(self, batch: Any) -> tuple[Tensor, Tensor]:
        r = self.layer(batch[0]) - batch[1][:, None]
        return r.square().mean(), r

    @property
    def hessian(self) -> Tensor:
        H: Tensor = 2 * self.x.T @ self.x / len(self.x) + self.c * torch.eye(len(self.w), dtype=f64)
        return H

    @property
    def gradient(self) -> Tensor:
        g: Tensor = 2 * self.x.T @ (self.x @ self.w - self.y) / len(self.x) + self.c * self.w
        return g

    @property
    def minimum(self) -> Tensor:
        w: Tensor = torch.linalg.solve(self.hessian, 2 * self.x.T @ self.y / len(self.x))
        return w

    def f(self, w: Tensor) -> float:
        return float((self.x @ w - self.y).square().mean() + 0.5 * self.c * w.square().sum())


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
@pytest.mark.parametrize("preconditioner", [True, False])
@pytest.mark.parametrize("c", [0.0, 0.3])
def test_least_squares_is_solved(curvature: Any, preconditioner: bool, c: float) -> None:
    problem = Regression(c=c)
    optimizer = HessianFree(
        [problem.weight], damping=1e-9, curvature=curvature, preconditioner=preconditioner, weight_decay=c
    )
    first = optimizer.step(problem.closure)
    assert first.rho == pytest.approx(1, abs=1e-6)  # the model is exact; c belongs to f, g and B alike
    assert first.rate == 1
    assert first.search_loss_after == pytest.approx(problem.f(problem.w), rel=1e-12)
    assert first.preconditioner == ("fisher^0.75" if preconditioner else "none")
    second = optimizer.step(problem.closure)
    assert second.damping == pytest.approx(1e-9 * 2 / 3)
    torch.testing.assert_close(problem.w, problem.minimum, rtol=1e-7, atol=1e-8)


def test_a_step_against_its_definition() -> None:
    """Few CG iterations by hand: dense preconditioner and matrices, warm start, ρ, λ."""
    problem = Regression(c=0.2)
    optimizer = HessianFree([problem.weight], damping=2.0, cg_iterations=3, weight_decay=0.2, warm_start=0.7)
    damping, last = 2.0, None
    for _ in range(4):
        w, g, B = problem.w.clone(), problem.gradient, problem.hessian
        per_sample = 2 * (problem.x @ w - problem.y)[:, None] * problem.x
        M = (per_sample.square().mean(0) + damping + 0.2) ** 0.75
        A = B + damping * torch.eye(8, dtype=f64)
        start = None if last is None else 0.7 * last
        solution = conjugate_gradient(A.mv, -g, start, M.reciprocal().mul, max_iterations=3)
        last = solution.iterates[-1].x
        report = optimizer.step(problem.closure)
        assert report.damping == pytest.approx(damping, rel=1e-12)
        assert report.inner_iterations == 3
        assert report.stop_reason is StopReason.MAX_ITERATIONS
        torch.testing.assert_close(optimizer.state[problem.weight]["cg_solution"][0], last, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(problem.w, w + report.rate * last, rtol=1e-9, atol=1e-12)
        rho = (problem.f(w + last) - problem.f(w)) / float(g @ last + 0.5 * last @ B @ last)
        assert report.rho == pytest.approx(rho, rel=1e-8)
        damping = new_damping(damping, rho)
        assert optimizer.state[problem.weight]["damping"] == pytest.approx(damping)


def test_preconditioner_of_a_network_against_per_sample_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(10, 3, generator=rng(), dtype=f64), torch.randint(0, 2, (10,), generator=rng(1))
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "weight_decay": 0.5},
        {"params": model[2].parameters()},
    ]
    optimizer = HessianFree(groups, damping=0.1, cg_iterations=1)
    c = torch.cat([torch.full((16,), 0.5, dtype=f64), torch.zeros(10, dtype=f64)])

    def flat_gradient(i: slice) -> Tensor:
        gradient = torch.autograd.grad(F.cross_entropy(model(x[i]), y[i]), list(model.parameters()))
        return torch.cat([part.reshape(-1) for part in gradient])

    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    squares = torch.stack([flat_gradient(slice(i, i + 1)).square() for i in range(10)]).mean(0)
    # One iteration of CG from zero goes along M⁻¹g.
    direction = (flat_gradient(slice(None)) + c * theta) / (squares + 0.1 + c) ** 0.75
    optimizer.step(
        lambda batch: (F.cross_entropy(logits := model(batch[0]), batch[1]), logits),
        Subsets((x, y), batch_size=4, fraction=0.5, seed=0),
    )
    found = torch.cat([optimizer.state[p]["cg_solution"].reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(found / found.norm(), -direction / direction.norm(), rtol=1e-9, atol=1e-10)


def test_rho_is_measured_on_the_curvature_set() -> None:
    problem = Regression(n=40)
    sets = Subsets((problem.x, problem.y), batch_size=7, fraction=0.25, seed=3)
    B = torch.cat([batch.data[0] for batch in sets.draw(0, krylov_dim=1).b])
    y = torch.cat([batch.data[1] for batch in sets.draw(0, krylov_dim=1).b])
    w, g = problem.w.clone(), problem.gradient
    optimizer = HessianFree([problem.weight], damping=1.0)
    report = optimizer.step(problem.on, sets)
    assert report.set_sizes == {"A": 40, "B": 10}
    H = 2 * B.T @ B / 10
    # Backtracking may have chosen an earlier iterate than the last.
    x = (problem.w - w) / report.rate
    fall = float((B @ (w + x) - y).square().mean() - (B @ w - y).square().mean())
    assert report.rho == pytest.approx(fall / float(g @ x + 0.5 * x @ H @ x), rel=1e-6)


def test_backtracking_chooses_an_earlier_iterate_in_a_step() -> None:
    """A curvature set of 15 samples for 40 parameters: late iterates overfit it."""
    problem = Regression(n=60, features=40)
    sets = Subsets((problem.x, problem.y), batch_size=60, fraction=0.25, seed=0)
    w = problem.w.clone()
    optimizer = HessianFree([problem.weight], damping=3.0, preconditioner=False)
    report = optimizer.step(problem.on, sets)
    last = optimizer.state[problem.weight]["cg_solution"][0]
    taken = problem.w - w
    assert problem.f(w + last) > problem.f(w + taken)
    assert not torch.allclose(taken, report.rate * last)
    assert report.inner_evaluations >= 2
    assert report.search_loss_after < report.loss


def test_a_hopeless_step_leaves_everything_but_the_damping() -> None:
    """The curvature at zero is a trillionth of that around, so that every rate is too long."""
    w = nn.Parameter(torch.tensor([1.0], dtype=f64))

    def closure() -> tuple[Tensor, Tensor]:
        z = w - 1
        return torch.where(z == 0, z, z.abs() * 1e3).sum() + 1e-12 * z.square().sum(), z

    optimizer = HessianFree([w], damping=1e-9, preconditioner=False, cg_iterations=1)
    report = optimizer.step(closure)
    assert (report.rate, report.stop_reason) == (0.0, StopReason.NOISE)
    assert report.inner_evaluations == 60
    assert w.item() == 1
    assert report.rho == -math.inf
    assert optimizer.step(closure).damping == pytest.approx(1.5e-9)


def test_what_is_not_finite_is_too_far() -> None:
    w = nn.Parameter(torch.tensor([1.0], dtype=f64))
    optimizer = HessianFree([w], damping=1e-6, preconditioner=False)
    # At 1, −log w + w²/8 has the slope −3/4 and hardly any Gauss–Newton curvature in w itself but 1/4.
    report = optimizer.step(lambda: (w.square().sum() / 8 - (4 - w).log().sum() - 2 * w.sum(), w))
    assert math.isfinite(report.search_loss_after)
    assert report.search_loss_after < report.loss
    nowhere = nn.Parameter(torch.tensor([1.0], dtype=f64))
    optimizer = HessianFree([nowhere], damping=1.0)

    def island() -> tuple[Tensor, Tensor]:
        z = nowhere - 1
        return z.square().sum() + z.sum() + (0 if bool((z == 0).all()) else math.nan), z

    report = optimizer.step(island)
    assert report.stop_reason is StopReason.NON_FINITE
    assert nowhere.item() == 1


def test_hessian_on_an_indefinite_problem() -> None:
    w = nn.Parameter(torch.tensor([0.1, 0.5, -0.3], dtype=f64))

    def closure() -> Tensor:
        return (w.square() - 1).square().sum()

    optimizer = HessianFree([w], damping=0.1, curvature="hessian")
    reports = [optimizer.step(closure) for _ in range(60)]
    assert reports[0].stop_reason is StopReason.NEGATIVE_CURVATURE
    assert reports[0].rate == 0  # CG ended where it began: the damping rises until it is positive
    assert reports[1].damping == pytest.approx(0.15)
    assert reports[0].preconditioner == "none"  # no outputs to gather from
    losses = [report.loss for report in reports]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-10


def test_zero_gradient() -> None:
    w = nn.Parameter(torch.tensor([-0.0, 0.0]))
    report = HessianFree([w]).step(lambda: (w.square().sum(), w))
    assert report.stop_reason is StopReason.ZERO_GRADIENT
    assert (report.rate, report.search_loss_after) == (0.0, 0.0)
    assert torch.equal(torch.signbit(w.detach()), torch.tensor([True, False]))


def classifier(seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[[Any], tuple[Tensor, Tensor]]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))
    x = torch.randn(200, 2, generator=rng())
    y = (x[:, 0] * x[:, 1] > 0).long() + (x.norm(dim=1) > 1.5)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]), logits

    return model, (x, y), closure


def test_a_classifier_trains() -> None:
    model, data, closure = classifier()
    sets = Subsets(data, batch_size=64, fraction=0.25, seed=0)
    optimizer = HessianFree(model.parameters(), damping=1.0, weight_decay=1e-5)
    reports = [optimizer.step(closure, sets) for _ in range(40)]
    losses = [report.loss for report in reports]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.2 * losses[0]
    for before, after in itertools.pairwise(reports):
        assert after.loss == pytest.approx(before.search_loss_after, rel=1e-6)
        assert after.damping == pytest.approx(new_damping(before.damping, before.rho))
    report = reports[-1]
    assert set(report.seconds) == {"gradient", "cg", "backtracking"}
    assert report.sample_gradients > 200 + 50 * (1 + 4 / 3 * report.inner_iterations)
    plain = json.loads(json.dumps(report.as_dict()))
    assert plain["damping"] == report.damping
    assert "CG" in str(report)
    assert float(report) == report.loss


def test_sets_without_a_fraction_give_a_quarter_to_the_curvature() -> None:
    model, data, closure = classifier()
    optimizer = HessianFree(model.parameters())
    assert optimizer.step(closure, Subsets(data, batch_size=64, seed=0)).set_sizes == {"A": 200, "B": 50}


# What holds for both


Make = Callable[[nn.Module], HessianFree | NonlinearCG]
BOTH = pytest.mark.parametrize(
    "make",
    [
        lambda model: HessianFree(model.parameters(), damping=1.0, weight_decay=1e-4),
        lambda model: NonlinearCG(model.parameters(), weight_decay=1e-4),
    ],
    ids=["hf", "cg"],
)


def run(optimizer: HessianFree | NonlinearCG, closure: Any, sets: Subsets, steps: int) -> list[dict[str, Any]]:
    reports = [optimizer.step(closure, sets).as_dict() for _ in range(steps)]
    for report in reports:
        del report["seconds"]
    return reports


@BOTH
def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(make: Make) -> None:
    model, data, closure = classifier()
    optimizer = make(model)
    expected = run(optimizer, closure, Subsets(data, batch_size=64, fraction=0.25, seed=1), 12)

    first, _, closure = classifier()
    optimizer = make(first)
    got = run(optimizer, closure, Subsets(data, batch_size=64, fraction=0.25, seed=1), 6)
    checkpoint = saved_and_loaded({"model": first.state_dict(), "optimizer": optimizer.state_dict()})

    second, _, closure = classifier(seed=99)
    optimizer = make(second)
    sets = Subsets(data, batch_size=64, fraction=0.25, seed=1)
    run(optimizer, closure, sets, 2)  # has a state of its own, which must not survive
    second.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    got += run(optimizer, closure, sets, 6)
    assert got == expected
    for p, q in zip(model.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)


def test_loaded_damping_is_used() -> None:
    problem = Regression()
    optimizer = HessianFree([problem.weight], damping=8.0)
    optimizer.step(problem.closure)
    state = saved_and_loaded(optimizer.state_dict())
    again = Regression()
    other = HessianFree([again.weight], damping=123.0)
    other.load_state_dict(state)
    damping = other.step(again.closure).damping
    assert damping == optimizer.state[problem.weight]["damping"] != 123.0


@BOTH
def test_a_failure_leaves_everything_as_it_was(make: Make) -> None:
    model, data, closure = classifier()
    optimizer, sets = make(model), Subsets(data, batch_size=64, fraction=0.25, seed=0)
    run(optimizer, closure, sets, 3)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    generator = torch.get_rng_state()
    calls = 0

    def failing(batch: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        torch.rand(())
        moved = any(not torch.equal(p, q) for p, q in zip(model.parameters(), before[0].values(), strict=True))
        calls += moved
        if calls == 2:
            raise KeyError("data")
        return closure(batch)

    with pytest.raises(KeyError):
        optimizer.step(failing, sets)
    for p, q in zip(model.state_dict().values(), before[0].values(), strict=True):
        assert torch.equal(p, q)
    assert str(optimizer.state_dict()) == str(before[1])
    assert torch.equal(torch.get_rng_state(), generator)


@BOTH
def test_copies_work(make: Make) -> None:
    model, data, closure = classifier()
    optimizer, sets = make(model), Subsets(data, batch_size=64, fraction=0.25, seed=0)
    run(optimizer, closure, sets, 2)
    twin_model, twin = copy.deepcopy((model, optimizer))

    def twin_closure(batch: Any) -> tuple[Tensor, Tensor]:
        logits = twin_model(batch[0])
        return F.cross_entropy(logits, batch[1]), logits

    expected, got = run(optimizer, closure, sets, 3), run(twin, twin_closure, sets, 3)
    assert [r["search_loss_after"] for r in got] == [r["search_loss_after"] for r in expected]


@BOTH
def test_mistakes_are_explained(make: Make) -> None:
    model, data, closure = classifier()
    optimizer = make(model)
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="calls closure"):
        optimizer.step(closure)
    with pytest.raises(ValueError, match="on A is nan"):
        optimizer.step(lambda: ((z := model(data[0]) * math.nan).mean(), z))
    with pytest.raises(ValueError, match="weight_decay"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "weight_decay": -1.0})


@pytest.mark.parametrize(
    "bad",
    [{"damping": 0.0}, {"damping": math.nan}, {"curvature": "fisher"}, {"cg_iterations": 0}, {"warm_start": 1.5}],
    ids=str,
)
def test_arguments_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        HessianFree([nn.Parameter(torch.zeros(1))], **bad)


# Nonlinear CG


def along(f: Callable[[float], float], df: Callable[[float], float]) -> Callable[[float], Trial]:
    none = torch.empty(0)
    return lambda alpha: Trial(alpha, f(alpha), df(alpha), none, none)


@pytest.mark.parametrize("first", [1e-6, 1e-2, 1.0, 1e3, 1e6])
def test_strong_wolfe(first: float) -> None:
    functions = [
        along(lambda a: (a - 3) ** 2, lambda a: 2 * (a - 3)),
        along(lambda a: -a / (a * a + 2), lambda a: (a * a - 2) / (a * a + 2) ** 2),
        along(lambda a: math.cosh(min(a, 700.0) - 2), lambda a: math.sinh(min(a, 700.0) - 2)),
        along(lambda a: -math.log(5 - a) - a if a < 5 else math.nan, lambda a: 1 / (5 - a) - 1 if a < 5 else math.nan),
    ]
    for phi in functions:
        start = phi(0.0)
        found, exact = strong_wolfe(phi, start, first, 0.0)
        assert exact
        assert found is not None
        assert found.f <= start.f + 1e-4 * found.alpha * start.slope
        assert abs(found.slope) <= 0.1 * abs(start.slope)


def test_strong_wolfe_finds_nothing_uphill() -> None:
    found, exact = strong_wolfe(
        along(lambda a: a, lambda a: -1.0), Trial(0.0, 0.0, -1.0, *[torch.empty(0)] * 2), 1.0, 0.0
    )
    assert (found, exact) == (None, False)


def test_nonlinear_cg_on_a_quadratic() -> None:
    n = 12
    A = spd(n, 100)
    b = torch.randn(n, generator=rng(1), dtype=f64)
    w = nn.Parameter(torch.zeros(n, dtype=f64))
    optimizer = NonlinearCG([w])
    lowest = float(-0.5 * b @ torch.linalg.solve(A, b))
    gaps = []
    for _ in range(2 * n):
        report = optimizer.step(lambda: 0.5 * w @ A @ w - b @ w)
        gaps.append(report.search_loss_after - lowest)
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[n + 3] < 1e-4 * gaps[0]
    assert gaps[-1] < 1e-8 * gaps[0]


def test_nonlinear_cg_on_rosenbrock() -> None:
    w = nn.Parameter(torch.tensor([-1.2, 1.0], dtype=f64))
    optimizer = NonlinearCG([w])
    reports: list[StepReport] = []
    while len(reports) < 100 and not (reports and reports[-1].search_loss_after < 1e-12):
        reports.append(optimizer.step(lambda: (1 - w[0]) ** 2 + 100 * (w[1] - w[0] ** 2) ** 2))
    losses = [report.loss for report in reports]
    assert losses == sorted(losses, reverse=True)
    assert len(reports) < 60
    torch.testing.assert_close(w.detach(), torch.ones(2, dtype=f64), rtol=1e-5, atol=1e-5)
    assert sum(report.inner_evaluations for report in reports) < 4 * len(reports)


def test_a_step_of_nonlinear_cg_costs_its_trials() -> None:
    model, data, closure = classifier()
    sets = Subsets(data, batch_size=64, seed=0)
    optimizer = NonlinearCG(model.parameters())
    optimizer.step(closure, sets)
    report = optimizer.step(closure, sets)
    assert report.sample_gradients == 200 * report.inner_evaluations
    assert set(report.seconds) == {"gradient", "search"}
    with torch.no_grad():
        next(model.parameters())[0, 0] += 0.1
    report = optimizer.step(closure, sets)  # edited: another gradient, and a fresh direction
    assert report.sample_gradients == 200 * (report.inner_evaluations + 1)
    before = optimizer.step(closure, sets).search_loss_after
    optimizer.param_groups[0]["weight_decay"] = 0.1
    assert optimizer.step(closure, sets).loss > before


def test_a_direction_that_is_not_downhill_is_replaced() -> None:
    w = nn.Parameter(torch.tensor([3.0, -2.0], dtype=f64))

    def closure() -> Tensor:
        return w[0] ** 2 + 10 * w[1] ** 2

    optimizer = NonlinearCG([w])
    optimizer.step(closure)
    before, g = w.detach().clone(), optimizer.state[w]["gradient"].clone()
    optimizer.state[w]["direction"] = g.clone()
    report = optimizer.step(closure)
    assert report.search_loss_after < report.loss
    step = w.detach() - before
    torch.testing.assert_close(step / step.norm(), -g / g.norm())


def test_nonlinear_cg_trains_and_ends() -> None:
    model, data, closure = classifier()
    model.double()
    double = (data[0].double(), data[1])
    optimizer = NonlinearCG(model.parameters(), weight_decay=1e-3)
    sets = Subsets(double, batch_size=100, seed=0)
    reports = [optimizer.step(closure, sets) for _ in range(150)]
    assert reports[-1].search_loss_after < 0.5 * reports[0].loss
    flat = nn.Parameter(torch.zeros(3))
    assert NonlinearCG([flat]).step(lambda: flat.square().sum()).stop_reason is StopReason.ZERO_GRADIENT
    island = nn.Parameter(torch.zeros(1))
    report = NonlinearCG([island]).step(lambda: island.sum() + (0 if bool((island == 0).all()) else math.nan))
    assert report.stop_reason is StopReason.NON_FINITE
    assert island.item() == 0
