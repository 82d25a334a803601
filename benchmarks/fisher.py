"""Gradient + Fisher diagonal ÷ gradient, ours and BackPACK's, on the same batch."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import hand, rivals
from benchmarks.problems import Problem
from benchmarks.timing import Ratio, interleaved, ratio
from krylov_descent.preconditioners.fisher import Fisher
from krylov_descent.samples.interface import StepKey

MICROBATCHES = 6


def measure(problem: Problem, rounds: int) -> dict[str, Ratio]:
    """Each candidate's time for a pass over the batch in micro-batches, in units of a pass for the gradient alone."""
    objective = problem.objective()
    batches = problem.microbatches(MICROBATCHES)
    data = [batch.data for batch in batches]

    def both() -> None:
        objective.value_and_gradient(batches, Fisher().gather(objective, StepKey(0, 0)))

    candidates: dict[str, Callable[[], object]] = {
        "gradient": lambda: objective.value_and_gradient(batches),
        "gradient + D": both,
        "BackPACK": rivals.backpack_fisher(problem, batches),
    }
    if problem.name in hand.WRITTEN:
        net = hand.HandWritten(problem)
        squares = objective.parameters.zeros()
        candidates["hand-written"] = lambda: [net.gradient(x, y, squares) for x, y in data]
        candidates["hand-written gradient"] = lambda: [net.gradient(x, y) for x, y in data]
    seconds = interleaved(candidates, rounds)
    return {name: ratio(seconds[name], seconds["gradient"]) for name in candidates if name != "gradient"}
