"""Checks of the cost of a step: memory, and exact rules of the preconditioner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from krylov_descent.checking.finding import Finding, bytes_in_words, listed
from krylov_descent.checking.problem import Problem
from krylov_descent.curvature import CURVATURES, CurvatureProduct
from krylov_descent.krylov.subspace import EARLIER
from krylov_descent.preconditioners.fisher import Fisher
from krylov_descent.preconditioners.kronecker import step_bytes
from krylov_descent.safety.budget import Need, Storage, at_hand, share
from krylov_descent.samples.interface import Microbatch, StepKey
from krylov_descent.stepping.gradient_pass import pass_with_statistics

_ANYTHING = 1 << 62  # a budget that keeps everything and still measures


def memory(problem: Problem, available: int | None) -> Iterator[Finding]:
    """Report the memory of the basis for some K, of the graphs of B and of the factors, with remedies."""
    if problem.working is None:
        return
    deep = problem.draw.grows  # then the line to paste has **DEEP: K = 1, and factors
    chosen = 1 if deep else problem.krylov_dim
    batch, parts = problem.first_of_b()
    kind = CURVATURES[problem.working]
    product = CurvatureProduct(kind, problem.objective, [batch], memory_budget=_ANYTHING)
    graphs, factors = product.kept_bytes * parts, step_bytes(problem.objective)
    if available is None:
        available = at_hand(problem.parameters.device)
    budget = _ANYTHING if available is None else share(available)
    problem.room = budget - graphs
    parameters = problem.parameters
    need = {
        K: Need(
            budget,
            min(K, parameters.count) + 1,
            parameters.numel,
            parameters.dtype,
            parameters.device,
            Storage(),
            factors=factors if deep else 0,
        )
        for K in ([1] if deep else sorted({10, 20, 50, chosen}))
    }
    bases = ", ".join(f"{bytes_in_words(x.basis)} for K = {K}" for K, x in need.items())
    of_graphs = bytes_in_words(graphs) if product.measured else "unknown (torch.func does not tell)"
    detail = f"basis of KSD {bases}; graphs of B {of_graphs}; "
    detail += f"factors {'of' if deep else 'with'} preconditioner='kronecker' up to {bytes_in_words(factors)}"
    # Earlier steps and their rows in V, which a memory_budget leaves out.
    later = 2 * EARLIER * parameters.numel * parameters.dtype.itemsize if deep else 0
    detail += f"; earlier steps, once A has all samples, {bytes_in_words(later)}" if deep else ""
    left = need[chosen].for_graphs - graphs
    if available is None or left >= later:
        yield Finding("memory", "ok", detail)
        return
    detail += f"; at hand {bytes_in_words(available)}"
    if left >= 0:
        problem.line["memory_budget"] = str(budget)
        remedy = f"KSD(memory_budget={budget}) leaves earlier steps out of the basis."
        yield Finding("memory", "warn", f"{detail}: earlier steps may not fit", remedy)
    elif need[chosen].for_graphs >= 0:
        problem.line["memory_budget"] = str(budget)
        remedy = (
            f"KSD(memory_budget={budget}): graphs that do not fit are rebuilt for every product, which makes one 1.7 "
            "times as long. Or a smaller Subsets(fraction=...)."
        )
        yield Finding("memory", "warn", f"{detail}: the graphs do not fit", remedy)
    else:
        yield _beyond(problem, need[chosen], detail)


def _beyond(problem: Problem, need: Need, detail: str) -> Finding:
    """Return the finding for a basis or factors that do not fit; a basis in bfloat16 may fit."""
    remedy = f"{'; '.join(need.smaller())}; or several ranks, which share the basis."
    if need.factors and need.basis <= need.budget:  # a warning, as the figure is a bound
        return Finding("memory", "warn", f"{detail}: the factors may not fit", remedy)
    fits = replace(need, storage=Storage(dtype=torch.bfloat16)).for_graphs >= 0
    if fits:
        problem.line["storage"] = "Storage(dtype=torch.bfloat16)"
        problem.line["memory_budget"] = str(need.budget)
    return Finding("memory", "warn" if fits else "fail", f"{detail}: the basis does not fit", remedy)


def in_words(seconds: float) -> str:
    """Return seconds in a readable unit."""
    if seconds < 1e-3:
        return "under 1 ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.3g} s"


def fisher(problem: Problem) -> Iterator[Finding]:
    """Report the modules with exact Fisher diagonals, and those with random probes."""
    if not problem.evaluation.outputs:
        yield Finding("fisher", "warn", "no preconditioner: the closure returns no outputs to make it of")
        return
    _, _, gathered = _statistics(problem, problem.batch)
    exact: dict[str, bool] = {}
    for i, p in enumerate(problem.parameters.params):
        if i not in problem.unused:
            owner = problem.names.owner(p)
            exact[owner] = exact.get(owner, True) and i in gathered.trust.trusted
    groups = {
        "exact": [owner for owner, is_exact in exact.items() if is_exact],
        "probe": [owner for owner, is_exact in exact.items() if not is_exact],
    }
    yield Finding("fisher", "ok", "; ".join(f"{how}: {listed(owners)}" for how, owners in groups.items() if owners))


def _statistics(problem: Problem, batch: Microbatch) -> Any:
    objective = problem.objective
    return pass_with_statistics(objective, [batch], lambda: Fisher().gather(objective, StepKey(0, 0)))
