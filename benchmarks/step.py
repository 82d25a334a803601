"""One whole step of KSD ÷ the bare passes it consists of, and where the rest goes."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.hand import HandWritten
from benchmarks.problems import Problem
from benchmarks.timing import Ratio, spread
from krylov_descent import KSD, StepReport, Subsets
from krylov_descent.distributed import SingleProcess
from krylov_descent.krylov.orthonormal_basis import krylov_basis
from krylov_descent.objective.objective import Objective
from krylov_descent.vectors.storage import BasisStorage


def measure(problem: Problem, *, batch_size: int, krylov_dim: int, rounds: int) -> dict[str, Ratio]:
    """Steps and bare passes in turn; the bare ones repeat what the step before them did, hand-written.

    Bare passes: for every micro-batch of A a gradient with the squares for D; for B the activations and one product for
    each row of V; for each evaluation on C a gradient.
    """
    optimizer = KSD(problem.model.parameters(), krylov_dim=krylov_dim)
    sets = Subsets((problem.x, problem.y), batch_size=batch_size, seed=0)
    net = HandWritten(problem)
    optimizer.step(problem.closure, sets)  # the first has checks of its own
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        with passes_on_C() as on_C:
            start = time.perf_counter()
            report = optimizer.step(problem.closure, sets)
            whole = time.perf_counter() - start
        bare = bare_passes(net, sets.draw(report.iteration, krylov_dim=krylov_dim), report)
        algebra = algebra_of_V(net, report)
        total = sum(bare.values())
        row = {
            "step ÷ bare passes": whole / total,
            "gradient + D: ÷ bare": report.seconds["gradient"] / bare["gradient"],
            "basis: ÷ bare": report.seconds["basis"] / bare["basis"],
            "search: ÷ bare": report.seconds["search"] / bare["search"],
            "share of the search outside passes on C": 1 - on_C.seconds / report.seconds["search"],
            "Gram–Schmidt ÷ all bare passes": algebra["basis"] / total,
            "V̄a and V̄ᵀg ÷ all bare passes": algebra["search"] / total,
            "evaluations on C": report.inner_evaluations,
        }
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {name: spread(values) for name, values in found.items()}


@dataclasses.dataclass
class _Stopwatch:
    seconds: float = 0.0


@contextlib.contextmanager
def passes_on_C() -> Iterator[_Stopwatch]:
    """Time spent inside ``differentiate`` without statistics: the evaluations of the search."""
    watch, original = _Stopwatch(), Objective.differentiate

    def timed(self: Objective, batches: Any, statistics: Any = None, along: Any = None) -> Any:
        start = time.perf_counter()
        result = original(self, batches, statistics, along)
        watch.seconds += (time.perf_counter() - start) * (statistics is None)
        return result

    Objective.differentiate = timed  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        Objective.differentiate = original  # type: ignore[method-assign]


def bare_passes(net: HandWritten, draw: Any, report: StepReport) -> dict[str, float]:
    """Seconds of the hand-written passes of each phase."""
    seconds = {}
    start = time.perf_counter()
    squares = torch.zeros(sum(net.sizes))
    for batch in draw.a:
        x, y = batch.data
        net.gradient(x, y, squares)
    seconds["gradient"] = time.perf_counter() - start
    v = torch.randn_like(squares)
    b, c = draw.b, draw.c  # loaded before the clock starts: a step does it once
    start = time.perf_counter()
    cached = [net.cache(batch.data[0]) for batch in b]
    for _ in range(len(report.ritz_values)):
        for product in cached:
            product(v)
    seconds["basis"] = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(report.inner_evaluations):
        for batch in c:
            net.gradient(*batch.data)
    seconds["search"] = time.perf_counter() - start
    return seconds


def algebra_of_V(net: HandWritten, report: StepReport) -> dict[str, float]:
    """Seconds of Algorithm 2 around its products, and of the moves between R^m and R^P in the search."""
    P, m = sum(net.sizes), len(report.ritz_values)
    g, D = torch.randn(P), torch.rand(P) + 0.1
    w = torch.randn(P)
    start = time.perf_counter()
    # Products that cost almost nothing: what is left is Gram–Schmidt, H̄, and the preconditioner.
    V = krylov_basis(lambda v: v * D, lambda u: u * D, g, None, m, BasisStorage(m, g), SingleProcess()).V
    built = time.perf_counter() - start
    c = torch.randn(m)
    start = time.perf_counter()
    for _ in range(report.inner_evaluations):
        V.combine(c)
        V.dots(w)
    return {"basis": built, "search": time.perf_counter() - start}
