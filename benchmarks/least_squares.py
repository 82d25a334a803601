"""``least_squares`` against SciPy's on problems of Moré, Garbow & Hillstrom (1981).

There are ten, one that it does not solve, and a large one. Starts are the standard ones. A run solves a problem if
its cost is within 1e-6 of the known minimum, or 1e-10 if that is more. The numbers are calls of the residuals; with
exact derivatives, SciPy's calls of the Jacobian are added.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import scipy.optimize
import torch
from scipy.sparse import diags_array
from torch import Tensor

from krylov_descent import least_squares

F64 = torch.float64


class Problem(NamedTuple):
    """Residuals, their standard start, and the cost ½·Σ r² at known minima."""

    residuals: Callable[[Tensor], Tensor]
    start: Tensor
    minima: tuple[float, ...] = (0.0,)

    def solved(self, cost: float) -> bool:
        """Return whether this is the cost of a minimum."""
        return any(cost - least <= max(1e-6 * least, 1e-10) for least in self.minima)


def _at(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=F64)


def _range(first: int, last: int) -> Tensor:
    return torch.arange(first, last + 1, dtype=F64)


def rosenbrock(x: Tensor) -> Tensor:
    """Problem 1."""
    return torch.stack([10 * (x[1] - x[0] ** 2), 1 - x[0]])


def freudenstein_roth(x: Tensor) -> Tensor:
    """Problem 2."""
    return torch.stack([-13 + x[0] + ((5 - x[1]) * x[1] - 2) * x[1], -29 + x[0] + ((x[1] + 1) * x[1] - 14) * x[1]])


def powell_badly_scaled(x: Tensor) -> Tensor:
    """Problem 3."""
    return torch.stack([1e4 * x[0] * x[1] - 1, torch.exp(-x[0]) + torch.exp(-x[1]) - 1.0001])


def brown_badly_scaled(x: Tensor) -> Tensor:
    """Problem 4."""
    return torch.stack([x[0] - 1e6, x[1] - 2e-6, x[0] * x[1] - 2])


def jennrich_sampson(x: Tensor) -> Tensor:
    """Problem 6."""
    i = _range(1, 10)
    return 2 + 2 * i - torch.exp(i * x[0]) - torch.exp(i * x[1])


def helical_valley(x: Tensor) -> Tensor:
    """Problem 7."""
    turn = torch.atan(x[1] / x[0]) / (2 * torch.pi) + torch.where(x[0] < 0, 0.5, 0.0)
    return torch.stack([10 * (x[2] - 10 * turn), 10 * (torch.hypot(x[0], x[1]) - 1), x[2]])


def meyer(x: Tensor) -> Tensor:
    """Problem 10."""
    y = _at(34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744, 8261, 7030, 6005, 5147, 4427, 3820, 3307, 2872)
    return x[0] * torch.exp(x[1] / (45 + 5 * _range(1, 16) + x[2])) - y


def gulf(x: Tensor) -> Tensor:
    """Problem 11 with 99 residuals."""
    t = _range(1, 99) / 100
    return torch.exp(-((25 + (-50 * torch.log(t)) ** (2 / 3) - x[1]).abs() ** x[2]) / x[0]) - t


def powell_singular(x: Tensor) -> Tensor:
    """Problem 13."""
    return torch.stack([x[0] + 10 * x[1], 5**0.5 * (x[2] - x[3]), (x[1] - 2 * x[2]) ** 2, 10**0.5 * (x[0] - x[3]) ** 2])


def kowalik_osborne(x: Tensor) -> Tensor:
    """Problem 15."""
    y = _at(0.1957, 0.1947, 0.1735, 0.1600, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246)
    u = _at(4, 2, 1, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625)
    return y - x[0] * (u**2 + u * x[1]) / (u**2 + u * x[2] + x[3])


def watson(x: Tensor) -> Tensor:
    """Problem 20."""
    powers = (_range(1, 29)[:, None] / 29) ** _range(0, len(x) - 1)
    slope = (powers[:, :-1] * _range(1, len(x) - 1) * x[1:]).sum(1)
    return torch.cat([slope - (powers @ x) ** 2 - 1, x[:1], x[1:2] - x[:1] ** 2 - 1])


def broyden_tridiagonal(x: Tensor) -> Tensor:
    """Problem 30."""
    padded = torch.nn.functional.pad(x, (1, 1))
    return (3 - 2 * x) * x - padded[:-2] - 2 * padded[2:] + 1


PROBLEMS = {
    "Rosenbrock": Problem(rosenbrock, _at(-1.2, 1)),
    "Freudenstein & Roth": Problem(freudenstein_roth, _at(0.5, -2), (0.0, 24.49212683962)),
    "Powell badly scaled": Problem(powell_badly_scaled, _at(0, 1)),
    "Brown badly scaled": Problem(brown_badly_scaled, _at(1, 1)),
    "Jennrich & Sampson": Problem(jennrich_sampson, _at(0.3, 0.4), (62.181091177805,)),
    "Helical valley": Problem(helical_valley, _at(-1, 0, 0)),
    "Meyer": Problem(meyer, _at(0.02, 4000, 250), (43.972927585,)),
    "Powell singular": Problem(powell_singular, _at(3, -1, 0, 1)),
    "Kowalik & Osborne": Problem(kowalik_osborne, _at(0.25, 0.39, 0.415, 0.39), (1.5375280192462e-4,)),
    "Watson, n = 9": Problem(watson, torch.zeros(9, dtype=F64), (6.9988006905e-7,)),
}

MISSED = {"Gulf": Problem(gulf, _at(5, 2.5, 0.15))}  # least_squares ends in another valley


def large(n: int) -> Problem:
    """Return Broyden's tridiagonal problem with n unknowns."""
    return Problem(broyden_tridiagonal, -torch.ones(n, dtype=F64))


def by_scipy(problem: Problem, **options: Any) -> tuple[float, int, int]:
    """Return SciPy's cost, its calls of the residuals, those for finite differences included, and of the Jacobian."""
    calls = 0

    def residuals(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return problem.residuals(torch.from_numpy(x)).numpy()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overflow far from the minimum
        found = scipy.optimize.least_squares(residuals, problem.start.numpy().copy(), **options)
    return float(found.cost), calls, int(found.njev or 0)


def measure(*, quick: bool) -> dict[str, Any]:
    """Return calls by problem and method, marked where the problem was not solved."""
    found: dict[str, Any] = {}
    for name, problem in (PROBLEMS | MISSED).items():
        ours = least_squares(problem.residuals, problem.start)
        row = {"least_squares": _told(problem, ours.cost, str(ours.nfev))}

        def jacobian(x: Any, problem: Problem = problem) -> Any:
            return torch.func.jacrev(problem.residuals)(torch.from_numpy(x)).numpy()

        for method in ("trf", "lm"):
            cost, calls, _ = by_scipy(problem, method=method)
            row[method] = _told(problem, cost, str(calls))
            cost, calls, jacobians = by_scipy(problem, method=method, jac=jacobian)
            row[f"{method}, exact"] = _told(problem, cost, f"{calls} + {jacobians}")
        found[name] = row
    n = 2_000 if quick else 20_000
    problem, ours = large(n), least_squares(broyden_tridiagonal, large(n).start)
    pattern = diags_array([1.0, 1.0, 1.0], offsets=[-1, 0, 1], shape=(n, n))
    cost, calls, _ = by_scipy(problem, jac_sparsity=pattern)
    found[f"Broyden tridiagonal, n = {n:,}"] = {
        "least_squares": _told(problem, ours.cost, str(ours.nfev)),
        "trf, sparse differences": _told(problem, cost, str(calls)),
    }
    return found


def _told(problem: Problem, cost: float, calls: str) -> str:
    return calls if problem.solved(cost) else f"{calls}, not solved: cost {cost:.3g}"
