"""What a step of DEEP costs by phase, in gradients over A, at sizes of A that stay."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from experiments.common.markdown import section
from experiments.supervised.interface import closure_of
from experiments.supervised.kronecker import NeverGrowing
from experiments.supervised.problems import Problem, load_problem
from krylov_descent import DEEP, KSD, Kronecker
from krylov_descent.distributed import SingleProcess
from krylov_descent.krylov import step
from krylov_descent.krylov.subspace import Krylov
from krylov_descent.objective.objective import Objective
from krylov_descent.stepping.acceptance import arrive
from krylov_descent.vectors.parameters import ParameterVector

PHASES = ("gradient", "preconditioner", "basis", "search")
_WARM_UP = 3  # first steps, in which every step has new inverses


def table(tasks: Sequence[str], sizes: Sequence[int], steps: int, data: Path | None) -> str:
    """Return CPU time ÷ that of a gradient over the same A, phase by phase."""
    rows = []
    for task in tasks:
        problem = load_problem(task, data)
        for size in sizes:
            found = costs(problem, size, steps)
            rows.append([task, f"{size:,}", *(f"{found[name]:.2f}" for name in (*PHASES, "step"))])
    note = "CPU time ÷ that of a gradient over A by autograd: means over steps, inverses of factors included."
    return section("Cost of a step in gradients over A", ["task", "A", *PHASES, "step"], rows, note)


def costs(problem: Problem, size: int, steps: int) -> dict[str, float]:
    """Return the cost of each phase and of a step."""
    model = problem.make_model(0)
    closure = closure_of(problem, model)
    optimizer = KSD(model.parameters(), weight_decay=problem.weight_decay, seed=0, **DEEP)
    sets = NeverGrowing(problem.train, batch_size=problem.batch_size, start=size, seed=0)
    group = {"params": list(model.parameters()), "weight_decay": problem.weight_decay}
    bare = Objective(closure, ParameterVector([group]), SingleProcess())
    taken: dict[str, list[float]] = {name: [] for name in (*PHASES, "step", "bare")}
    for i in range(_WARM_UP + steps):
        draw = sets.draw(i, krylov_dim=1)
        start = time.process_time()
        bare.value_and_gradient(draw.a)
        found = {"bare": time.process_time() - start}
        with _timed() as spent:
            start = time.process_time()
            optimizer.step(closure, sets)
            found["step"] = time.process_time() - start
        rest = found["step"] - sum(spent.values())
        for name, seconds in {**found, **spent, "search": rest}.items():
            taken[name].append(seconds)
    unit = statistics.median(taken["bare"][_WARM_UP:])
    return {name: statistics.fmean(several[_WARM_UP:]) / unit for name, several in taken.items()}


@contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """Collect the seconds of the first three phases of one step; what is left of the step is the search."""
    spent = dict.fromkeys(PHASES[:-1], 0.0)

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **more: Any) -> Any:
            start = time.process_time()
            try:
                return work(*arguments, **more)
            finally:
                spent[name] += time.process_time() - start

        return run

    with (
        mock.patch.object(step, "arrive", timed("gradient", arrive)),
        mock.patch.object(Kronecker, "solve", timed("preconditioner", Kronecker.solve)),
        mock.patch.object(Krylov, "build", timed("basis", Krylov.build)),
    ):
        yield spent
