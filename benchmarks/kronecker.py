"""Kronecker factors ÷ a gradient, ours and curvlinops', on the same batch; seconds of CPU, taken in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from curvlinops import KFACLinearOperator
from torch import nn

from benchmarks.problems import Problem
from benchmarks.timing import Ratio, interleaved, ratio
from krylov_descent.preconditioners.kronecker import Kronecker
from krylov_descent.preconditioners.statistics import PassOverSet

_WARMUP = 2
_FEW = 32  # outputs up to which curvlinops' exact factors, a backward pass for each, are measured


def curvlinops_factors(problem: Problem, fisher_type: str) -> Callable[[], object]:
    """Factors of one batch; an operator computes them once, so that each step needs a new one."""
    params = list(problem.model.parameters())

    def run() -> object:
        operator = KFACLinearOperator(
            problem.model,
            problem.loss,
            params,
            [(problem.x, problem.y)],
            fisher_type=fisher_type,
            separate_weight_and_bias=False,
            check_deterministic=False,
            num_data=len(problem.x),
            num_per_example_loss_terms=1,
        )
        operator.compute_kronecker_factors()
        return operator

    return run


def measure(problem: Problem, rounds: int) -> dict[str, Ratio]:
    """Each candidate's CPU time in units of a gradient on the same batch."""
    objective = problem.objective()
    batches = [problem.microbatch]
    kronecker = Kronecker()
    first = kronecker.refresh(objective, batches, kronecker.init(), (0,))
    solve = first.solve
    assert solve is not None
    stale, young = replace(first.state, age=1.0), replace(first.state, updates=100)
    w = torch.randn(objective.parameters.numel)
    layers = range(len(objective.parameters.params))
    candidates: dict[str, Callable[[], object]] = {
        "gradient": lambda: objective.value_and_gradient(batches),
        "factors": lambda: PassOverSet(objective, (1,), (), layers).run(batches),
        "factors, averaged": lambda: kronecker.refresh(objective, batches, young, (1,)),
        "factors, averaged, and new inverses": lambda: kronecker.refresh(objective, batches, stale, (1,)),
        "D⁻¹w": lambda: solve(w),
        "curvlinops, one sample": curvlinops_factors(problem, "mc"),
    }
    if isinstance(problem.loss, nn.CrossEntropyLoss) or problem.y.shape[-1] <= _FEW:
        candidates["curvlinops, exact"] = curvlinops_factors(problem, "type-2")
    seconds: dict[str, list[float]] = {name: [] for name in candidates}

    def timed(name: str) -> Callable[[], None]:
        def run() -> None:
            start = time.process_time()
            candidates[name]()
            seconds[name].append(time.process_time() - start)

        return run

    interleaved({name: timed(name) for name in candidates}, rounds, _WARMUP)
    kept = {name: taken[_WARMUP:] for name, taken in seconds.items()}
    found = {name: ratio(kept[name], kept["gradient"]) for name in candidates if name != "gradient"}
    return found | {"curvlinops, one sample ÷ factors": ratio(kept["curvlinops, one sample"], kept["factors"])}
