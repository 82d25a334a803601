"""The rivals on a small network: each lowers the loss, ends as NaN where that is NaN, and is the algebra it claims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from experiments.pinn.rivals import GRIDS, METHODS
from experiments.pinn.rivals.damped import DampedSystem, best_halving, gram
from experiments.pinn.rivals.doubly_sketched import (
    Model,
    Tried,
    cosines,
    count_sketch,
    crossing,
    dsgnar,
    longest,
    rising,
)
from experiments.pinn.rivals.least_squares import ALL, LeastSquares, in_turn
from experiments.pinn.rivals.levenberg_marquardt import levenberg_marquardt
from experiments.pinn.rivals.natural import projected_increment, spring
from torch import Tensor, nn

F64 = torch.float64


@dataclass
class Small:
    """u″ = −sin on an interval and u = 0 at its ends, by a network of 61 parameters."""

    model: nn.Module
    closure: Callable[[], tuple[Tensor, tuple[Tensor, ...]]]
    draw: int = 0

    def part(self, count: int, generator: torch.Generator) -> Callable[[], tuple[Tensor, tuple[Tensor, ...]]]:
        """The residuals of some points."""
        sizes = [len(z) for z in self.closure()[1]]
        chosen = [torch.randperm(n, generator=generator)[: max(1, count * n // sum(sizes))] for n in sizes]

        def closure() -> tuple[Tensor, tuple[Tensor, ...]]:
            z = tuple(z[S] for z, S in zip(self.closure()[1], chosen, strict=True))
            return torch.stack([each.square().mean() for each in z]).sum(), z

        return closure


def small(factor: float = 1.0) -> Small:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()
    inside = torch.linspace(0.1, 3, 80, dtype=F64)[:, None]
    ends = torch.tensor([[0.0], [math.pi]], dtype=F64)

    def closure() -> tuple[Tensor, tuple[Tensor, ...]]:
        x = inside.clone().requires_grad_()
        (du,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        r = factor * (ddu + torch.sin(x))[:, 0]
        b = model(ends)[:, 0]
        return r.square().mean() + b.square().mean(), (r, b)

    return Small(model, closure)


# What makes them fit a test of a second: short first phases, few yields.
QUICK: dict[str, tuple[dict[str, Any], int, float]] = {
    "flow": ({"rows": 40}, 60, 0.01),
    "ksd": ({"krylov_dim": 10}, 8, 0.01),
    "adam-lbfgs": ({"adam_steps": 40, "lr": 1e-2}, 10, 0.01),
    "soap": ({"lr": 2e-2}, 8, 0.5),
    "lm": ({}, 12, 0.001),
    "ssbroyden": ({"adam_steps": 40}, 60, 0.01),
    "spring": ({"damping": 1e-4, "rows": 30}, 20, 0.01),
    "dsgnar": ({"rows": 60, "columns": 40, "target": 0.2, "probes": 8}, 25, 0.1),
}


@pytest.mark.parametrize("name", METHODS)
def test_it_lowers_the_loss(name: str) -> None:
    if name == "soap":
        pytest.importorskip("pytorch_optimizer")
    settings, yields, factor = QUICK[name]
    problem = small()
    before = LeastSquares(problem).value()
    losses = list(itertools.islice(METHODS[name](problem, seed=0, **settings), yields))
    assert all(math.isfinite(loss) for loss in losses)
    after = LeastSquares(problem).value()
    assert after < factor * before
    if name not in ("soap", "adam-lbfgs"):  # those yield the last evaluation
        assert losses[-1] == pytest.approx(after, rel=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_a_loss_that_is_nan_ends_it_as_nan(name: str) -> None:
    if name == "soap":
        pytest.importorskip("pytorch_optimizer")
    losses = list(itertools.islice(METHODS[name](small(math.nan), seed=0), 5))
    assert len(losses) == 1
    assert math.isnan(losses[0])


@pytest.mark.parametrize("name", ["lm", "spring", "ssbroyden", "adam-lbfgs", "dsgnar"])
def test_it_ends_where_no_progress_is_left(name: str) -> None:
    """A linear model: the minimum is reached, and then the generator returns."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    x = torch.randn(20, 3, dtype=F64)
    y = torch.randn(20, dtype=F64)

    def closure() -> tuple[Tensor, tuple[Tensor, ...]]:
        r = model(x)[:, 0] - y
        return r.square().mean(), (r,)

    first = {"adam_steps": 20} if name in ("ssbroyden", "adam-lbfgs") else {}
    losses = list(itertools.islice(METHODS[name](Small(model, closure), seed=0, **first), 2000))
    assert len(losses) < 2000
    design = torch.cat([x, torch.ones(20, 1, dtype=F64)], 1)
    best = (design @ torch.linalg.lstsq(design, y[:, None]).solution - y[:, None]).square().mean().item()
    assert closure()[0].item() == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("name", ["lm", "spring", "ssbroyden", "adam-lbfgs", "dsgnar"])
def test_after_new_points_it_goes_by_their_loss(name: str) -> None:
    """Residuals become ten times as large: by the loss of before, no step would be a descent."""
    plain = small()

    def closure() -> tuple[Tensor, tuple[Tensor, ...]]:
        r, b = (z * 10**problem.draw for z in plain.closure()[1])
        return r.square().mean() + b.square().mean(), (r, b)

    problem = Small(plain.model, closure)
    run = METHODS[name](problem, seed=0, **QUICK[name][0])
    for _ in range(6):
        next(run)
    problem.draw = 1
    before = LeastSquares(problem).value()
    losses = list(itertools.islice(run, 6))
    assert len(losses) == 6
    assert LeastSquares(problem).value() < before


def test_grids_name_methods_and_are_small() -> None:
    assert GRIDS.keys() == METHODS.keys() - {"flow"}
    assert all(sum(math.prod(map(len, grid.values())) for grid in grids) <= 9 for grids in GRIDS.values())


def test_phases_end_at_the_first_loss_that_is_not_finite() -> None:
    assert list(in_turn(iter([3.0, 2.0]), iter([1.0]))) == [3.0, 2.0, 1.0]
    ended = list(in_turn(iter([3.0, math.inf]), iter([1.0])))
    assert ended[0] == 3.0
    assert len(ended) == 2
    assert math.isnan(ended[1])


def test_rows_are_the_gradient_and_half_their_square_the_loss() -> None:
    squares = LeastSquares(small())
    J, rho = squares.rows(ALL)
    f, g = squares.gradient()
    torch.testing.assert_close(J.T @ rho, g)
    assert 0.5 * float(rho.square().sum()) == pytest.approx(f)
    assert squares.value() == pytest.approx(f)


def test_the_gram_matrix_has_its_lower_triangle() -> None:
    X = torch.randn(150, 300, dtype=F64)
    torch.testing.assert_close(gram(X).tril(), (X.T @ X).tril())


@pytest.mark.parametrize("shape", [(40, 15), (15, 40)])
def test_a_damped_step_is_that_of_dense_algebra_on_either_side(shape: tuple[int, int]) -> None:
    J, rho = torch.randn(*shape, dtype=F64), torch.randn(shape[0], dtype=F64)
    dense = torch.linalg.solve(J.T @ J + 0.3 * torch.eye(shape[1], dtype=F64), J.T @ rho)
    found = DampedSystem(J).solve(rho, 0.3)
    assert found is not None
    torch.testing.assert_close(found, dense)


def test_a_matrix_that_is_not_positive_definite_has_no_step() -> None:
    J = torch.ones(4, 3, dtype=F64)
    assert DampedSystem(J).solve(torch.ones(4, dtype=F64), -20.0) is None


@pytest.mark.parametrize(("lowest", "size"), [(1.0, 1.0), (0.2, 0.25), (1e-3, 2.0**-10)])
def test_halving_finds_the_valley(lowest: float, size: float) -> None:
    found = best_halving(lambda t: (t - lowest) ** 2, lowest**2)
    assert found is not None
    assert found[0] == size


def test_halving_passes_over_nan_and_gives_up() -> None:
    found = best_halving(lambda t: math.nan if t > 0.1 else t, 1.0)
    assert found == (2.0**-30, 2.0**-30)
    tried: list[float] = []
    assert best_halving(lambda t: tried.append(t) or (t - 0.25) ** 2, 0.1, largest=0.5) == (0.25, 0.0)  # type: ignore[func-returns-value]
    assert tried == [0.5, 0.25, 0.125]
    assert best_halving(lambda t: 1 + t, 1.0) is None


def test_a_step_of_levenberg_marquardt_is_the_dense_one() -> None:
    problem = small()
    squares = LeastSquares(problem)
    J, rho = squares.rows(ALL)
    theta = squares.point()
    expected = theta - torch.linalg.solve(J.T @ J + 10.0 * torch.eye(len(theta), dtype=F64), J.T @ rho)
    next(levenberg_marquardt(problem, seed=0, start=10.0))
    torch.testing.assert_close(squares.point(), expected)


def test_spring_is_its_recursion() -> None:
    problem, twin = small(), small()
    squares, naive = LeastSquares(problem), LeastSquares(twin)
    run = spring(problem, seed=5, damping=1e-3, momentum=0.8, rows=30, lr=0.1, norm=0.05)
    theta, generator = naive.point(), torch.Generator().manual_seed(5)
    phi = torch.zeros_like(theta)
    for k in range(1, 6):
        naive.move(theta)
        J, rho = naive.rows_of_batch(30, generator)
        K = J @ J.T + 1e-3 * torch.eye(len(J), dtype=F64)
        phi = 0.8 * phi + J.T @ torch.linalg.solve(K, rho - 0.8 * J @ phi)
        step = phi / math.sqrt(1 - 0.8 ** (2 * k))
        theta = theta - min(0.1, 0.05 / float(step.norm())) * step
        assert next(run) == pytest.approx(0.5 * float(rho @ rho))
        torch.testing.assert_close(squares.point(), theta)


def test_rows_of_a_batch_are_those_of_its_points() -> None:
    problem = small()
    squares = LeastSquares(problem)
    J, rho = squares.rows_of_batch(30, torch.Generator().manual_seed(3))
    loss, _ = problem.part(30, torch.Generator().manual_seed(3))()
    g = torch.cat([x.reshape(-1) for x in torch.autograd.grad(loss, list(problem.model.parameters()))])
    torch.testing.assert_close(J.T @ rho, g)
    assert len(J) == 30  # 29 of 80 points inside, and one of two ends


def test_spring_lowers_the_loss_on_batches() -> None:
    problem = small()
    before = LeastSquares(problem).value()
    for _ in itertools.islice(spring(problem, seed=0, damping=1e-4, rows=30, lr=0.2), 60):
        pass
    assert LeastSquares(problem).value() < 0.1 * before


def test_lbfgs_descends_however_small_the_loss_is() -> None:
    """torch's keeps no pair with yᵀs ≤ 1e-10: on its own, it would descend along the gradient for ever."""
    plain = small()

    def closure() -> tuple[Tensor, tuple[Tensor, ...]]:
        z = tuple(1e-5 * each for each in plain.closure()[1])
        return torch.stack([each.square().mean() for each in z]).sum(), z

    problem = Small(plain.model, closure)
    started = LeastSquares(problem).value()
    *_, last = itertools.islice(METHODS["adam-lbfgs"](problem, seed=0, adam_steps=20), 15)
    assert last < 1e-3 * started


def test_springs_increment_is_the_nearest_to_the_last_that_solves_the_rows() -> None:
    """As λ → 0, Jφ = ρ with φ − μφ_prev in the row space."""
    torch.manual_seed(0)
    J, rho, phi = torch.randn(6, 20, dtype=F64), torch.randn(6, dtype=F64), torch.randn(20, dtype=F64)
    found = projected_increment(J, rho, phi, 0.7, 1e-12)
    assert found is not None
    torch.testing.assert_close(J @ found, rho)
    torch.testing.assert_close(found - 0.7 * phi, torch.linalg.pinv(J) @ J @ (found - 0.7 * phi))


@pytest.mark.parametrize("target", [0.3, 0.9])
def test_an_unsketched_step_of_dsgnar_is_the_dense_damped_one_of_that_gain(target: float) -> None:
    problem = small()
    squares = LeastSquares(problem)
    J, rho = squares.rows(ALL)
    theta, before = squares.point(), squares.value()
    after = next(dsgnar(problem, seed=0, target=target, probes=100, window=100.0))
    step = squares.point() - theta
    radius = float(step.norm())
    g, H = J.T @ rho, J.T @ J
    low, high = 1e-12, 1e6
    for _ in range(200):
        damping = math.sqrt(low * high)
        dense = -torch.linalg.solve(H + damping * torch.eye(len(theta), dtype=F64), g)
        low, high = (damping, high) if float(dense.norm()) > radius else (low, damping)
    torch.testing.assert_close(step, dense, rtol=1e-6, atol=1e-8)
    predicted = -float(g @ dense + 0.5 * dense @ H @ dense)
    assert (before - after) / predicted == pytest.approx(target, abs=0.01)


def test_a_sketched_step_of_dsgnar_stays_in_the_columns_of_its_sketch() -> None:
    problem = small()
    squares = LeastSquares(problem)
    J, rho = squares.rows(ALL)
    theta = squares.point()
    next(dsgnar(problem, seed=3, rows=50, columns=20))
    step = squares.point() - theta
    generator = torch.Generator().manual_seed(3)
    S = count_sketch(50, len(rho), 4, generator, rho).to_dense()
    Omega = cosines(len(theta), 20, generator, rho)
    torch.testing.assert_close(Omega @ (Omega.T @ step), step)
    B, r, p = S @ J @ Omega, S @ rho, Omega.T @ step
    gradient = B.T @ (B @ p + r)
    torch.testing.assert_close(gradient, -float(-gradient @ p / (p @ p)) * p)  # = −λp


@pytest.mark.parametrize("shape", [(40, 15), (15, 15), (15, 40)])
def test_the_model_of_dsgnar_is_that_of_dense_algebra(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    B, rho = torch.randn(*shape, dtype=F64), torch.randn(shape[0], dtype=F64)
    model = Model.of(B, rho)
    p = model.step(0.3)
    torch.testing.assert_close(p, -torch.linalg.solve(B.T @ B + 0.3 * torch.eye(shape[1], dtype=F64), B.T @ rho))
    assert model.decrease(0.3) == pytest.approx(0.5 * float(rho @ rho - (B @ p + rho).square().sum()))
    assert model.damping(float(p.norm())) == pytest.approx(0.3, rel=1e-6)
    assert model.damping(1e6) == 0.0  # no step is that long
    assert model.damping(1e-9) == pytest.approx(1e9 * float((B.T @ rho).norm()), rel=1e-6)


def test_the_sketches_of_dsgnar_keep_lengths() -> None:
    generator, like = torch.Generator().manual_seed(0), torch.zeros(1, dtype=F64)
    Omega = cosines(30, 30, generator, like)
    torch.testing.assert_close(Omega.T @ Omega, torch.eye(30, dtype=F64))
    S = torch.stack([count_sketch(20, 60, 4, generator, like).to_dense() for _ in range(1000)])
    torch.testing.assert_close((S.mT @ S).mean(0), torch.eye(60, dtype=F64), rtol=0.0, atol=0.12)  # so on average


def test_dsgnar_takes_the_longest_step_of_the_gain() -> None:
    tried: list[float] = []

    def step(length: float) -> Tried:
        tried.append(length)
        return Tried(1 - length if length < 0.95 else 1.0, 0.0, 0.0, torch.zeros(1))  # it falls, and is 1 again

    lengths = [0.1 * 1.1**i for i in range(30)]
    length, found = longest(step, lengths, 0.4)
    assert length == pytest.approx(0.6, rel=1e-3)
    assert found.gain == pytest.approx(0.4, abs=1e-3)
    assert max(tried) < 0.8  # longer ones are not looked at
    assert longest(step, lengths[:5], 0.4)[0] == lengths[4]
    assert longest(step, lengths[:5], 0.95)[0] == lengths[0]


@pytest.mark.parametrize("i", [1, 2, 3])
def test_the_crossing_is_that_of_the_monotone_cubic(i: int) -> None:
    interpolate = pytest.importorskip("scipy.interpolate")
    values = [0.9, 0.7, 0.2, 0.1]
    cubic = interpolate.PchipInterpolator(range(4), values)
    target = float(cubic(i - 0.4))
    assert crossing(values, i, target) == pytest.approx(0.6, abs=1e-3)


def test_dsgnar_sees_that_the_damping_rises() -> None:
    noise = [1.1 ** ((7 * i) % 5) for i in range(30)]
    assert rising([x * 1.2**i for i, x in enumerate(noise)])
    assert not rising([x * 1.2**-i for i, x in enumerate(noise)])
    assert not rising([1.0] * 30)
