"""How long a step will take, from one micro-batch of each set."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from krylov_descent.checking.finding import Finding
from krylov_descent.checking.problem import Problem
from krylov_descent.curvature import CURVATURES, CurvatureProduct
from krylov_descent.data import Microbatch
from krylov_descent.precondition import Fisher
from krylov_descent.stepping import pass_with_statistics

_EVALUATIONS = 25  # of a search, in the middle of what was seen
_ENOUGH = 0.05  # seconds after which a measurement ends
_LONG = 0.5  # seconds beside which a warm-up is nothing
_ROWS_PER_VECTOR = 3.0  # rows of V read for each row before a new one: Gram–Schmidt twice, and H̄
_ROWS_PER_EVALUATION = 2.0  # a step into the subspace, and a gradient back to it


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step by phase."""

    gradient: float
    basis: float
    search: float

    @property
    def step(self) -> float:
        """All together."""
        return self.gradient + self.basis + self.search


def timing(problem: Problem) -> Iterator[Finding]:
    """By phase."""
    if problem.working is None:
        return
    seconds = estimate(problem)
    yield Finding(
        "time",
        "ok",
        f"estimated {_in_words(seconds.step)} a step with the Krylov basis: gradient {_in_words(seconds.gradient)}, "
        f"basis {_in_words(seconds.basis)}, search {_in_words(seconds.search)} ({_EVALUATIONS} evaluations)",
    )


def estimate(problem: Problem, clock: Callable[[], float] = time.perf_counter) -> Estimate:
    """Timings of one micro-batch each, times the number of them.

    Args:
        problem: that was checked, as far as its curvature.
        clock: whose seconds count.
    """

    def seconds(work: Callable[[], object]) -> float:
        return _seconds(work, parameters.device, clock)

    objective, parameters = problem.objective, problem.parameters
    assert problem.working is not None
    kind = CURVATURES[problem.working]
    a, parts_of_A = problem.first_microbatch("A")
    b, parts_of_B = problem.first_microbatch("B")
    c, parts_of_C = problem.first_microbatch("C")
    preconditioner = Fisher().prepare()

    def gradient(batch: Microbatch) -> None:
        if problem.evaluation.outputs:
            pass_with_statistics(objective, [batch], lambda: preconditioner.start(objective, 0, 0, 0))
        else:
            objective.value_and_gradient([batch])

    K = min(problem.krylov_dim, parameters.count)
    v = problem.direction()
    product = CurvatureProduct(kind, objective, [b])
    # Ones, as zeros may have no memory behind them.
    V = torch.ones(min(4, K + 1), parameters.numel, dtype=parameters.dtype, device=parameters.device)
    row = seconds(lambda: V @ v) / len(V)
    of_A = seconds(lambda: gradient(a))
    of_build = seconds(lambda: CurvatureProduct(kind, objective, [b]))
    of_product = seconds(lambda: product(v))
    of_C = seconds(lambda: objective.differentiate([c], along=v).gradient())
    vectors = K + 1
    return Estimate(
        parts_of_A * of_A,
        parts_of_B * (of_build + vectors * of_product) + _ROWS_PER_VECTOR * row * vectors * vectors / 2,
        _EVALUATIONS * (parts_of_C * of_C + _ROWS_PER_EVALUATION * row * vectors),
    )


def _seconds(work: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """The median of some runs, after one to warm up, unless that one was long."""
    laps: list[float] = []
    while len(laps) < 2 or (sum(laps) < _ENOUGH and len(laps) < 10):
        _wait_for(device)
        start = clock()
        work()
        _wait_for(device)
        laps.append(clock() - start)
        if laps[0] > _LONG:
            return laps[0]
    return statistics.median(laps[1:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _in_words(seconds: float) -> str:
    if seconds < 1e-3:
        return "under 1 ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.3g} s"
