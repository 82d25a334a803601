"""bfgs against SciPy's BFGS, on float32-noisy copies of the same problems, and where the objective breaks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.optimize
import torch
from torch import Tensor

from krylov_descent.krylov.bfgs import BFGSResult, bfgs
from krylov_descent.report import StopReason

TOLERANCE, NOISE = 1e-9, 1e-15  # one setting for every problem
EPS32 = 2.0**-23
NOISE32 = 4 * EPS32  # below, a value is off by 1.5 EPS32 at most, so a difference of two by 3
FLOOR = 1.0  # losses have one; without it, a tolerance relative to |f| = 0 asks for the last denormal

Objective = Callable[[Tensor], tuple[float, Tensor]]
Array = npt.NDArray[np.float64]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:  # the tensors are too small to share out
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclasses.dataclass(frozen=True)
class Problem:
    """FLOOR + value, with its gradient, and where to start."""

    value: Callable[[Tensor], Tensor]
    x0: Tensor

    def __call__(self, x: Tensor) -> tuple[float, Tensor]:
        x = x.detach().clone().requires_grad_()
        f = FLOOR + self.value(x)
        (g,) = torch.autograd.grad(f, x)
        return float(f.detach()), g


def _rosenbrock(x: Tensor) -> Tensor:
    a, b = x[:-1], x[1:]
    return (100 * (b - a**2) ** 2 + (1 - a) ** 2).sum()


def _powell(x: Tensor) -> Tensor:
    return (x[0] + 10 * x[1]) ** 2 + 5 * (x[2] - x[3]) ** 2 + (x[1] - 2 * x[2]) ** 4 + 10 * (x[0] - x[3]) ** 4


def _wood(x: Tensor) -> Tensor:
    a, b, c, d = x.unbind()
    valleys = 100 * (b - a**2) ** 2 + (1 - a) ** 2 + 90 * (d - c**2) ** 2 + (1 - c) ** 2
    return valleys + 10.1 * ((b - 1) ** 2 + (d - 1) ** 2) + 19.8 * (b - 1) * (d - 1)


def _beale(x: Tensor) -> Tensor:
    a, b = x.unbind()
    return (1.5 - a + a * b) ** 2 + (2.25 - a + a * b**2) ** 2 + (2.625 - a + a * b**3) ** 2


def _himmelblau(x: Tensor) -> Tensor:
    return (x[0] ** 2 + x[1] - 11) ** 2 + (x[0] + x[1] ** 2 - 7) ** 2


def _styblinski_tang(x: Tensor) -> Tensor:
    return 0.5 * (x**4 - 16 * x**2 + 5 * x).sum()


def _trigonometric(x: Tensor) -> Tensor:
    n = x.numel()
    i = torch.arange(1, n + 1, dtype=x.dtype)
    return ((n - x.cos().sum() + i * (1 - x.cos()) - x.sin()) ** 2).sum()


def _ill_conditioned(n: int = 40) -> Problem:
    random = torch.Generator().manual_seed(1)
    Q, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=random))
    A = Q @ torch.diag(torch.logspace(-3, 3, n, dtype=torch.float64)) @ Q.T
    b = torch.randn(n, dtype=torch.float64, generator=random)
    return Problem(lambda x: 0.5 * (x - b) @ A @ (x - b), torch.zeros(n, dtype=torch.float64))


def _logistic(samples: int = 200, n: int = 30) -> Problem:
    random = torch.Generator().manual_seed(2)
    X = torch.randn(samples, n, dtype=torch.float64, generator=random)
    w = torch.randn(n, dtype=torch.float64, generator=random)
    sign = (X @ w + torch.randn(samples, dtype=torch.float64, generator=random)).sign()
    return Problem(
        lambda x: torch.nn.functional.softplus(-sign * (X @ x)).mean() + 1e-3 * x @ x,
        torch.zeros(n, dtype=torch.float64),
    )


def _autoencoder_slice(krylov: int = 20) -> Problem:
    """A 30-12-4-12-30 sigmoid autoencoder over 21 whitened directions: the shape of a subspace search."""
    random = torch.Generator().manual_seed(3)
    draw = functools.partial(torch.randn, dtype=torch.float64, generator=random)
    sizes = (30, 12, 4, 12, 30)
    data = torch.sigmoid(draw(500, 5) @ draw(5, 30))  # five factors: there is something to learn
    parameters = [(draw(a, b) / math.sqrt(a), draw(b) * 0) for a, b in itertools.pairwise(sizes)]
    theta = torch.cat([t.flatten() for layer in parameters for t in layer])

    def outputs(theta: Tensor) -> Tensor:
        h, start = data, 0
        for a, b in itertools.pairwise(sizes):
            W, c = theta[start : start + a * b].view(a, b), theta[start + a * b : start + a * b + b]
            h, start = torch.sigmoid(h @ W + c), start + a * b + b
        return h

    def loss(theta: Tensor) -> Tensor:
        return ((outputs(theta) - data) ** 2).sum(1).mean()

    def gradient(theta: Tensor) -> Tensor:
        theta = theta.detach().requires_grad_()
        return torch.autograd.grad(loss(theta), theta)[0]

    for _ in range(100):
        theta = theta - 0.5 * gradient(theta)

    def G(v: Tensor) -> Tensor:  # the loss's Hessian in the outputs is 2/500 I, so G v = 2/500 Jᵀ J v
        at = theta.detach().requires_grad_()
        z = outputs(at)
        u = torch.zeros_like(z, requires_grad=True)
        (Ju,) = torch.autograd.grad(z, at, u, create_graph=True)  # linear in u, so its pullback is J
        (Jv,) = torch.autograd.grad(Ju, u, v)
        return torch.autograd.grad(outputs(at), at, Jv * (2 / len(data)))[0]

    V = gradient(theta).unsqueeze(1)
    for _ in range(krylov - 1):  # orthonormal as they come: raw powers of G would be parallel after a few
        V, _ = torch.linalg.qr(torch.cat([V, G(torch.linalg.qr(V)[0][:, -1]).unsqueeze(1)], 1))
    V, _ = torch.linalg.qr(torch.cat([V, draw(theta.numel(), 1)], 1))
    eigenvalues, Q = torch.linalg.eigh(V.T @ torch.stack([G(v) for v in V.T], 1))
    floored = Q @ torch.diag(eigenvalues.clamp_min(1e-4 * float(eigenvalues[-1]))) @ Q.T
    C = torch.linalg.cholesky(floored)
    basis = torch.linalg.solve_triangular(C, V.T, upper=False).T  # V C⁻ᵀ
    return Problem(lambda a: loss(theta + basis @ a), torch.zeros(krylov + 1, dtype=torch.float64))


def _at(value: Callable[[Tensor], Tensor], *x0: float) -> Problem:
    return Problem(value, torch.tensor(x0, dtype=torch.float64))


@functools.cache
def problems() -> dict[str, Problem]:
    # Rosenbrock's longer versions start at 0: from (-1.2, 1, ...) SciPy ends in their local minimum of 3.98.
    return {
        "rosenbrock-2": _at(_rosenbrock, -1.2, 1.0),
        "rosenbrock-10": _at(_rosenbrock, *[0.0] * 10),
        "rosenbrock-80": _at(_rosenbrock, *[0.0] * 80),
        "powell-singular": _at(_powell, 3.0, -1.0, 0.0, 1.0),
        "wood": _at(_wood, -3.0, -1.0, -3.0, -1.0),
        "beale": _at(_beale, 1.0, 1.0),
        "himmelblau": _at(_himmelblau, 0.0, 0.0),
        "styblinski-tang": _at(_styblinski_tang, *[-1.0] * 8),
        "ill-conditioned": _ill_conditioned(),
        "logistic": _logistic(),
        "trigonometric": _at(_trigonometric, *[1 / 20] * 20),
        "autoencoder": _autoencoder_slice(),
    }


NAMES = (
    *("rosenbrock-2", "rosenbrock-10", "rosenbrock-80", "powell-singular", "wood", "beale", "himmelblau"),
    *("styblinski-tang", "ill-conditioned", "logistic", "trigonometric", "autoencoder"),
)


@functools.cache
def oracle(name: str) -> tuple[float, int]:
    """SciPy's BFGS with its defaults: the value found and the evaluations it took."""
    problem = problems()[name]

    def fun(x: Array) -> tuple[float, Array]:
        f, g = problem(torch.from_numpy(x))
        return f, g.numpy()

    result = scipy.optimize.minimize(fun, problem.x0.numpy(), method="BFGS", jac=True)
    return float(result.fun), int(result.nfev)


@functools.cache
def ours(name: str) -> BFGSResult:
    problem = problems()[name]
    return bfgs(problem, problem.x0, max_iterations=1000, max_evaluations=5000, tolerance=TOLERANCE, noise=NOISE)


def _random(x: Tensor, salt: int) -> Array:
    """n + 1 numbers in [-1, 1) that look random but are a function of x, as rounding errors are."""
    digest = hashlib.blake2b(x.numpy().tobytes() + bytes([salt]), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).uniform(-1, 1, x.numel() + 1)


def in_float32(fun: Objective, salt: int = 0) -> Objective:
    """The objective as a float32 computation would return it: f and every entry of g off by EPS32."""

    def noisy(x: Tensor) -> tuple[float, Tensor]:
        f, g = fun(x)
        r = _random(x, salt)
        f = float(np.float32(f * (1 + EPS32 * r[0])))
        return f, g + EPS32 * max(1.0, float(g.norm())) * torch.from_numpy(r[1:])

    return noisy


class Recorder:
    """Every call of an objective and what it answered."""

    def __init__(self, fun: Objective) -> None:
        self.fun = fun
        self.calls: list[tuple[Tensor, float]] = []

    def __call__(self, x: Tensor) -> tuple[float, Tensor]:
        f, g = self.fun(x)
        self.calls.append((x.clone(), f))
        return f, g


def search(fun: Objective, *x0: float, tolerance: float = TOLERANCE, **options: Any) -> BFGSResult:
    return bfgs(fun, torch.tensor(x0, dtype=torch.float64), tolerance=tolerance, noise=NOISE, **options)


@pytest.mark.parametrize("name", NAMES)
def test_not_above_scipy(name: str) -> None:
    f, _ = oracle(name)
    result = ours(name)
    assert result.stop_reason is StopReason.CONVERGED
    assert result.f <= f + 1e-6 * max(1.0, abs(f))
    assert result.f == problems()[name](result.x)[0]


@pytest.mark.parametrize(
    ("name", "minimum"),
    [(name, 0.0) for name in ("rosenbrock-2", "rosenbrock-10", "rosenbrock-80", "powell-singular", "wood")]
    + [(name, 0.0) for name in ("beale", "himmelblau", "ill-conditioned")]
    + [("styblinski-tang", -39.16616570377142 * 8)],
)
def test_known_minimum(name: str, minimum: float) -> None:
    assert ours(name).f - FLOOR == pytest.approx(minimum, rel=1e-8, abs=1e-6)


def test_fewer_evaluations_than_scipy() -> None:
    counts = {name: (ours(name).evaluations, oracle(name)[1]) for name in problems()}
    total, total_scipy = (sum(column) for column in zip(*counts.values(), strict=True))
    assert total <= total_scipy, f"{total} against SciPy's {total_scipy}; each (ours, SciPy's): {counts}"


@pytest.mark.parametrize("salt", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_float32_stops_by_itself_near_the_minimum(name: str, salt: int) -> None:
    problem = problems()[name]
    f, evaluations = oracle(name)
    result = bfgs(
        in_float32(problem, salt),
        problem.x0,
        max_iterations=10_000,
        max_evaluations=20 * evaluations,
        tolerance=TOLERANCE,
        noise=NOISE32,
    )
    assert result.stop_reason in (StopReason.CONVERGED, StopReason.NOISE)
    minimum = min(f, ours(name).f)
    assert problem(result.x)[0] - minimum <= 10 * NOISE32 * max(abs(minimum), FLOOR)


@pytest.mark.parametrize("name", NAMES)
def test_noise_understated_still_stops(name: str) -> None:
    problem = problems()[name]
    result = bfgs(
        in_float32(problem),
        problem.x0,
        max_iterations=10_000,
        max_evaluations=5000,
        tolerance=1e-12,
        noise=NOISE,
    )
    assert result.stop_reason in (StopReason.CONVERGED, StopReason.NOISE)


def test_whitened_quadratic_takes_one_iteration() -> None:
    random = torch.Generator().manual_seed(0)
    b = torch.randn(21, dtype=torch.float64, generator=random)
    fun = Recorder(lambda x: (1 + 0.5 * float((x - b) @ (x - b)), x - b))
    result = search(fun, *[0.0] * 21)
    assert (result.iterations, result.evaluations) == (1, 2)
    assert torch.equal(fun.calls[1][0], b)  # the first trial is x0 - g
    assert result.stop_reason is StopReason.CONVERGED


@pytest.mark.parametrize("name", ["rosenbrock-2", "rosenbrock-80", "powell-singular", "wood", "beale"])
def test_first_search_recovers_from_overshoot(name: str) -> None:
    problem = problems()[name]
    f0, _ = problem(problem.x0)
    fun = Recorder(problem)
    result = bfgs(fun, problem.x0, max_iterations=1, tolerance=TOLERANCE, noise=NOISE)
    assert result.stop_reason is StopReason.MAX_ITERATIONS
    assert result.f < f0
    assert result.evaluations <= 5


def _barrier(outside: float) -> Objective:
    """The sum of x - log x, minimal at 1; ``outside`` and a NaN gradient where x is not positive."""

    def fun(x: Tensor) -> tuple[float, Tensor]:
        if bool((x <= 0).any()):
            return outside, torch.full_like(x, math.nan)
        return float((x - x.log()).sum()), 1 - 1 / x

    return fun


@pytest.mark.parametrize("outside", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("x0", [(0.01, 3.0, 9.0), (5.0,), (1e-3, 1e-3)])
def test_non_finite_region_is_too_far(outside: float, x0: tuple[float, ...]) -> None:
    result = search(_barrier(outside), *x0, max_iterations=200, max_evaluations=500)
    assert result.stop_reason is StopReason.CONVERGED
    torch.testing.assert_close(result.x, torch.ones_like(result.x), rtol=1e-3, atol=0)


def test_non_finite_gradient_is_too_far() -> None:
    def fun(x: Tensor) -> tuple[float, Tensor]:
        f, g = float((x**4).sum()) + 1, 4 * x**3
        return (f - 100, g * math.nan) if float(x[0]) < -1 else (f, g)  # tempting, but not to be taken

    result = search(fun, 2.0, 1.0)
    assert result.stop_reason is StopReason.CONVERGED
    assert 1 <= result.f < 1 + 1e-6


@pytest.mark.parametrize("start", [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan)])
def test_non_finite_start(start: tuple[float, float]) -> None:
    fun = Recorder(lambda x: (start[0], x * start[1]))
    result = search(fun, 1.0, 2.0)
    assert result.stop_reason is StopReason.NON_FINITE
    assert result.x.tolist() == [1.0, 2.0]
    assert result.evaluations == len(fun.calls) == 1


@pytest.mark.parametrize("cap", [5, 500])
def test_nothing_finite_but_the_start(cap: int) -> None:
    def fun(x: Tensor) -> tuple[float, Tensor]:
        return (1.0 if x.tolist() == [1.0, 2.0] else math.nan), torch.ones_like(x)

    result = search(fun, 1.0, 2.0, max_evaluations=cap)
    assert result.stop_reason is StopReason.NON_FINITE
    assert (result.x.tolist(), result.f) == ([1.0, 2.0], 1.0)
    assert result.evaluations <= min(cap, 50)


@pytest.mark.parametrize("f", [0.0, 3.0, -3.0])
def test_constant(f: float) -> None:
    result = search(lambda x: (f, torch.zeros_like(x)), 1.0, 2.0)
    assert result.stop_reason is StopReason.CONVERGED
    assert (result.x.tolist(), result.f, result.iterations, result.evaluations) == ([1.0, 2.0], f, 0, 1)


def test_one_dimension() -> None:
    result = search(lambda x: (float(x.cosh().sum()), x.sinh()), 3.0)
    assert result.stop_reason is StopReason.CONVERGED
    assert result.f == pytest.approx(1, abs=1e-8)


def test_zero_minimum_without_floor() -> None:
    result = search(lambda x: (float(x @ x), 2 * x), 3.0, -4.0)
    assert result.stop_reason is StopReason.CONVERGED
    assert result.f < 1e-20


@pytest.mark.parametrize("steepness", [0.1, 3.0])
@pytest.mark.parametrize("cap", [60, 3000])
def test_unbounded_below(steepness: float, cap: int) -> None:
    c = torch.tensor([steepness, 0.0, -steepness], dtype=torch.float64)
    result = search(lambda x: (float(c @ x), c.clone()), 1.0, 2.0, 3.0, max_evaluations=cap)
    assert bool(result.x.isfinite().all())
    assert math.isfinite(result.f)
    assert result.f < -1e40
    assert result.evaluations <= cap
    if cap == 60:
        assert result.stop_reason is StopReason.MAX_EVALUATIONS


def test_negative_curvature_is_followed_outward() -> None:
    def saddle(x: Tensor) -> tuple[float, Tensor]:
        a, b = x.tolist()
        return a**2 - b**2 + b**4, torch.tensor([2 * a, -2 * b + 4 * b**3], dtype=torch.float64)

    result = search(saddle, 1.0, 1e-6)
    assert result.stop_reason is StopReason.CONVERGED
    assert result.f == pytest.approx(-0.25, abs=1e-8)


@pytest.mark.parametrize("name", ["rosenbrock-10", "wood", "autoencoder"])
def test_caps(name: str) -> None:
    problem = problems()[name]
    for cap in range(1, 20):
        fun = Recorder(problem)
        result = bfgs(fun, problem.x0, max_iterations=1000, max_evaluations=cap, tolerance=TOLERANCE, noise=NOISE)
        assert result.evaluations == len(fun.calls) == cap
        assert result.stop_reason is StopReason.MAX_EVALUATIONS
        result = bfgs(
            problem,
            problem.x0,
            max_iterations=cap - 1,
            max_evaluations=1000,
            tolerance=TOLERANCE,
            noise=NOISE,
        )
        assert result.iterations == cap - 1
        assert result.stop_reason is StopReason.MAX_ITERATIONS


@pytest.mark.parametrize("name", NAMES)
def test_start_is_not_counted(name: str) -> None:
    problem = problems()[name]
    plain = bfgs(problem, problem.x0, tolerance=TOLERANCE, noise=NOISE)
    given = bfgs(
        problem,
        problem.x0,
        tolerance=TOLERANCE,
        noise=NOISE,
        max_evaluations=59,
        start=problem(problem.x0),
    )
    assert torch.equal(given.x, plain.x)
    assert (given.f, given.iterations, given.stop_reason) == (plain.f, plain.iterations, plain.stop_reason)
    assert given.evaluations == plain.evaluations - 1


def test_no_evaluations() -> None:
    x0 = torch.ones(2, dtype=torch.float64)
    result = bfgs(Recorder(_fail), x0, max_evaluations=0, tolerance=0.0, noise=0.0, start=(1.0, x0))
    assert (result.stop_reason, result.f, result.evaluations) == (StopReason.MAX_EVALUATIONS, 1.0, 0)
    with pytest.raises(ValueError, match="max_evaluations"):
        bfgs(_fail, x0, max_evaluations=0, tolerance=0.0, noise=0.0)


def _fail(x: Tensor) -> tuple[float, Tensor]:
    raise AssertionError(f"called at {x}")


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_result_is_the_best_point_seen(name: str, noisy: bool) -> None:
    problem = problems()[name]
    fun = Recorder(in_float32(problem) if noisy else problem)
    x0 = problem.x0.clone()
    for cap in (2, 3, 4, 7, 60):
        fun.calls.clear()
        noise = NOISE32 if noisy else NOISE
        result = bfgs(fun, x0, max_evaluations=cap, tolerance=TOLERANCE, noise=noise)
        x, f = min(fun.calls, key=lambda call: call[1])
        assert result.f == f <= fun.calls[0][1]
        assert torch.equal(result.x, x)
        assert result.x.dtype == torch.float64
        assert result.evaluations == len(fun.calls)
    assert torch.equal(x0, problem.x0)


def test_gradient_buffer_may_be_reused() -> None:
    problem = problems()["wood"]
    buffer = torch.empty(4, dtype=torch.float64)

    def fun(x: Tensor) -> tuple[float, Tensor]:
        f, g = problem(x)
        return f, buffer.copy_(g)

    result = bfgs(fun, problem.x0, max_iterations=1000, max_evaluations=5000, tolerance=TOLERANCE, noise=NOISE)
    assert torch.equal(result.x, ours("wood").x)
