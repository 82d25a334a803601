"""Checks of what a step costs: memory, time, and exact rules of the preconditioner."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from krylov_descent.checking.finding import Finding, bytes_in_words, listed
from krylov_descent.checking.problem import Problem
from krylov_descent.curvature import CURVATURES, CurvatureProduct
from krylov_descent.krylov.basis import EARLIER
from krylov_descent.krylov.step import pass_with_statistics
from krylov_descent.preconditioners.fisher import Fisher
from krylov_descent.preconditioners.kronecker import step_bytes
from krylov_descent.safety.budget import Need, Storage, at_hand, share
from krylov_descent.samples.subsets import Microbatch

_ANYTHING = 1 << 62  # a budget that keeps everything and still measures


def memory(problem: Problem, available: int | None) -> Iterator[Finding]:
    """The basis for some K, the graphs of B, the factors, and what to do where they do not fit."""
    if problem.working is None:
        return
    deep = problem.draw.grows  # the line to paste has **DEEP then: K = 1, and factors
    chosen = 1 if deep else problem.krylov_dim
    need = {K: _need(problem, K) for K in ([1] if deep else sorted({10, 20, 50, chosen}))}
    factors = step_bytes(problem.objective)
    batch, parts = problem.first_microbatch("B")
    kind = CURVATURES[problem.working]
    product = CurvatureProduct(kind, problem.objective, [batch], memory_budget=_ANYTHING)
    graphs = product.kept_bytes * parts
    if available is None:
        available = at_hand(problem.parameters.device)
    budget = _ANYTHING if available is None else share(available)
    problem.room = budget - graphs
    bases = ", ".join(f"{bytes_in_words(x.basis)} for K = {K}" for K, x in need.items())
    of_graphs = bytes_in_words(graphs) if product.measured else "unknown (torch.func does not tell)"
    detail = f"basis {bases}; graphs of B {of_graphs}; "
    detail += f"factors {'of' if deep else 'with'} preconditioner='kronecker' up to {bytes_in_words(factors)}"
    basis = need[chosen].basis
    held = basis + factors * deep
    # Earlier steps, and their rows in V; with a budget there are none.
    later = 2 * EARLIER * problem.parameters.numel * problem.parameters.dtype.itemsize if deep else 0
    detail += f"; earlier steps, once A has all samples, {bytes_in_words(later)}" if deep else ""
    if available is None or held + later + graphs <= budget:
        yield Finding("memory", "ok", detail)
        return
    detail += f"; at hand {bytes_in_words(available)}"
    if held + graphs <= budget:
        problem.line["memory_budget"] = str(budget)
        remedy = f"KSD(memory_budget={budget}) leaves earlier steps out of the basis."
        yield Finding("memory", "warn", f"{detail}: earlier steps may not fit", remedy)
        return
    if held <= budget:
        problem.line["memory_budget"] = str(budget)
        remedy = (
            f"KSD(memory_budget={budget}): graphs that do not fit are rebuilt for every product, which makes one 1.7 "
            "times as long. Or a smaller Subsets(fraction=...)."
        )
        yield Finding("memory", "warn", f"{detail}: the graphs do not fit", remedy)
        return
    if deep and basis <= budget:  # a warning, as the figure is a bound
        remedy = "KSD(model.parameters(), **{**DEEP, 'preconditioner': 'fisher'}) has no factors."
        yield Finding("memory", "warn", f"{detail}: the factors may not fit", remedy)
        return
    halved = Storage(dtype=torch.bfloat16)
    if not deep and _need(problem, chosen, halved).basis <= budget:
        problem.line["storage"] = "Storage(dtype=torch.bfloat16)"
        problem.line["memory_budget"] = str(budget)
        remedy = f"KSD(storage=Storage(dtype=torch.bfloat16), memory_budget={budget}) keeps the basis in bfloat16."
        yield Finding("memory", "warn", f"{detail}: the basis does not fit", remedy)
        return
    fitting = budget // max(1, basis // (chosen + 1)) - 1
    remedy = f"KSD(krylov_dim={fitting}), or" if fitting >= 1 else "Train fewer parameters, or use"
    yield Finding("memory", "fail", f"{detail}: the basis does not fit", f"{remedy} several ranks, which share it.")


def _need(problem: Problem, K: int, storage: Storage = Storage()) -> Need:  # noqa: B008 — frozen
    parameters = problem.parameters
    vectors = min(K, parameters.count) + 1
    return Need(_ANYTHING, vectors, parameters.numel, parameters.dtype, parameters.device, storage)


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


def fisher(problem: Problem) -> Iterator[Finding]:
    """By path of the module."""
    if not problem.evaluation.outputs:
        yield Finding("fisher", "warn", "no preconditioner: the closure returns no outputs to make it of")
        return
    preconditioner = Fisher().prepare()
    _, _, statistics = pass_with_statistics(
        problem.objective, [problem.batch], lambda: preconditioner.start(problem.objective, 0, 0, 0)
    )
    exact: dict[str, bool] = {}
    for i, p in enumerate(problem.parameters.params):
        if i in problem.unused:
            continue
        owner = problem.names.owner(p)
        exact[owner] = exact.get(owner, True) and i in statistics.verdict.trusted
    groups = {
        "exact": [owner for owner, is_exact in exact.items() if is_exact],
        "probe": [owner for owner, is_exact in exact.items() if not is_exact],
    }
    detail = "; ".join(f"{how}: {listed(alike(owners, exact))}" for how, owners in groups.items() if owners)
    yield Finding("fisher", "ok", detail)


def alike(paths: Iterable[str], among: Iterable[str]) -> list[str]:
    """Paths, with those of repeated blocks as one.

    Args:
        paths: to be told.
        among: all paths there are: a pattern stands for all that fit it, or for none.

    Example:
        >>> alike(["layers.0.q", "layers.1.q", "head"], ["layers.0.q", "layers.1.q", "layers.0.norm", "head"])
        ['layers.*.q', 'head']
    """
    paths = list(paths)
    inside, everywhere = Counter(map(_pattern, paths)), Counter(map(_pattern, among))
    told = (_pattern(path) if inside[_pattern(path)] == everywhere[_pattern(path)] > 1 else path for path in paths)
    return list(dict.fromkeys(told))


def _pattern(path: str) -> str:
    """The numbers of blocks left open; those of plain layers in a row, "0" or "features.3", stay."""
    parts = path.split(".")
    return ".".join("*" if part.isdigit() and i < len(parts) - 1 else part for i, part in enumerate(parts))
