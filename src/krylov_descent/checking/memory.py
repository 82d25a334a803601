"""What a step holds: the basis V, the graphs of B, and the factors of a preconditioner that has some."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from krylov_descent.basis import EARLIER
from krylov_descent.budget import Need, Storage, at_hand, share
from krylov_descent.checking.finding import Finding, bytes_in_words
from krylov_descent.checking.problem import Problem
from krylov_descent.curvature import CURVATURES, CurvatureProduct
from krylov_descent.kronecker_memory import step_bytes

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
