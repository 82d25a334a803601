"""A trial: optimizers run on the user's problem, each for the same processor time from the same weights.

What runs is what may be printed: the lines of a method are executed to make its optimizer.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from krylov_descent.base import CurvatureOptimizer
from krylov_descent.checking.advice import flow_line, line, unfit
from krylov_descent.checking.finding import Finding, TrialRow
from krylov_descent.checking.problem import Problem, first_line
from krylov_descent.checking.resources import in_words
from krylov_descent.checking.restore import as_found
from krylov_descent.flow.sketch import ROWS, sketch_bytes
from krylov_descent.samples.growing import Growing
from krylov_descent.samples.interface import Microbatch
from krylov_descent.samples.subsets import Subsets

_MEASUREMENTS, _APART = 7, math.sqrt(3)  # each at so many times the seconds of the one before
_SAMPLES = 2000  # most samples of a measurement
_BATCH = 128  # most samples of a step of Adam
_FIRST = 1 / 3  # part of the time for Adam before L-BFGS
_WAIT = 10.0  # most seconds of the wall for one of the processor
_NEAR = 2.0  # times the lowest loss: a method without settings is preferred


def tried(problem: Problem, seconds: float) -> Iterator[Finding]:
    """Race, and yield the time of steps and the method; ``problem`` gets the rows and the winner."""
    if not isinstance(problem.sets, Subsets | None):
        yield Finding("trial", "ok", f"not run: it draws mini-batches through Subsets or Growing, not {problem.sets!r}")
        return
    problem.trial = tuple(run(problem, *method, seconds) for method in methods(problem))
    problem.winner = winner(problem.trial)
    if problem.winner is None:
        return
    laps = [f"{row.name} {in_words(row.seconds / row.steps)}" for row in problem.trial if row.steps]
    yield Finding("time", "ok", f"measured, a step: {'; '.join(laps)}")
    yield Finding(
        "method",
        "ok",
        f"{problem.winner.name}: the lowest loss after {seconds:g} s of processor time, or one within {_NEAR:g} times "
        "that needs no settings",
    )


def methods(problem: Problem) -> list[tuple[str, str]]:
    """Return the names and lines of the methods, those with the fewest settings first."""
    names, sets, params = problem.names, problem.sets, problem.names.argument
    found = [("KSD", line(names, problem.krylov_dim, problem.curvature, problem))]
    taken = sketch_bytes(ROWS, problem.parameters.numel, problem.parameters.dtype)
    if unfit(problem) is None and problem.room is not None and taken <= problem.room:
        found.append(("GaussNewtonFlow", flow_line(names)))
    size = ""
    if sets is not None:
        grow = f"sets = Growing(sets, batch_size={sets._batch_size}, seed={sets._seed})\n"
        deep = f"{'' if isinstance(sets, Growing) else grow}optimizer = KSD({params}, **DEEP)"
        found.append(("KSD(**DEEP), Growing", f"from krylov_descent import DEEP, KSD, Growing\n\n{deep}"))
        size = f"  # mini-batches of {min(sets._batch_size, _BATCH)} samples"
    adam = f"import torch\n\noptimizer = torch.optim.Adam({params}, lr=%g){size}"
    found += [(f"Adam, lr {lr:g}", adam % lr) for lr in (1e-3, 1e-2, 1e-4)]
    if sets is None:
        first = f"import torch\n\nadam = torch.optim.Adam({params}, lr=0.001)  # for the first third of the time\n"
        settings = "history_size=100, tolerance_grad=0, tolerance_change=0, line_search_fn='strong_wolfe'"
        found.append(("Adam → L-BFGS", f"{first}optimizer = torch.optim.LBFGS({params}, {settings})"))
    return found


def run(problem: Problem, name: str, text: str, seconds: float, samples: int = _SAMPLES) -> TrialRow:
    """Run one method for that long; the loss on so many samples is measured a few times, outside of the clock."""
    clock = time.process_time if problem.parameters.device.type == "cpu" else time.perf_counter

    def loss() -> float:
        sets = problem.sets
        some = problem.draw.a if sets is None else _shuffled(sets, 0, samples, samples)
        if not math.isfinite(value := problem.natural.value(some).mean):
            raise ArithmeticError(f"the loss is {value}")
        return value

    due = [seconds * _APART**-k for k in reversed(range(_MEASUREMENTS))]
    spent, steps, note = 0.0, 0, ""
    curve = [(0.0, loss())]
    latest = time.perf_counter() + _WAIT * (1 + seconds)
    with as_found(problem.names.model, problem.names.parameters), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            start = clock()
            step, settle = _stepper(problem, text)
            while due:
                step(spent / seconds)
                steps, spent = steps + 1, clock() - start
                late = time.perf_counter() > latest
                if late or spent >= seconds:
                    settle()
                if spent >= due[0] or late:
                    curve.append((spent, loss()))
                    start = clock() - spent
                    due = [] if late else [x for x in due if x > spent]
        except Exception as error:
            note = first_line(error)
    return TrialRow(name, text, spent, steps, curve[0][1], math.nan if note else curve[-1][1], tuple(curve), note)


def _stepper(problem: Problem, text: str) -> tuple[Callable[[float], object], Callable[[], object]]:
    """Return a function that takes one step, given the part of the time that is gone, and one that judges the last."""
    closure, params = problem.closure, problem.parameters.params
    scope: dict[str, Any] = {"model": problem.names.model, "params": params, "sets": problem.sets}
    exec(text, scope)
    optimizer, adam, sets = scope["optimizer"], scope.get("adam"), scope["sets"]
    if isinstance(optimizer, CurvatureOptimizer):
        return lambda _: optimizer.step(closure, sets), lambda: optimizer.settle(closure, sets)
    batches = itertools.chain.from_iterable(_shuffled(sets, i, len(sets), _BATCH) for i in itertools.count())

    def evaluate() -> Tensor:
        for p in params:
            p.grad = None
        result = closure() if sets is None else closure(next(batches).data)
        loss: Tensor = result[0] if isinstance(result, tuple) else result
        if all(p.grad is None for p in params):  # otherwise the closure called backward
            for p, g in zip(params, torch.autograd.grad(loss, params, allow_unused=True), strict=True):
                p.grad = g
        return loss

    return lambda gone: (optimizer if adam is None or gone >= _FIRST else adam).step(evaluate), lambda: None


def _shuffled(sets: Subsets, epoch: int, most: int, batch_size: int) -> Iterator[Microbatch]:
    """Load so many random samples, in micro-batches of at most this size."""
    order = torch.randperm(len(sets), generator=torch.Generator("cpu").manual_seed(epoch), device="cpu")[:most]
    parts = torch.split(order, min(batch_size, sets._batch_size))
    batches = sets._source.load(lambda i: (parts[i],), range(len(parts)))
    return (Microbatch(batch, len(part)) for part, (batch,) in zip(parts, batches, strict=True))


def winner(rows: Sequence[TrialRow]) -> TrialRow | None:
    """Return the row of the lowest loss, or one of ours within twice that; None if all failed."""
    least = min((row.loss_after for row in rows if row.loss_after == row.loss_after), default=math.nan)
    near = [row for row in rows if row.loss_after <= max(least, _NEAR * least)]
    return min(near, key=lambda row: ("krylov_descent" not in row.line, row.loss_after), default=None)
