"""``check`` finds mistakes, slow parts and lack of memory before a training run, and tries optimizers if asked to."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from krylov_descent.base import whole
from krylov_descent.checking.advice import choice, line
from krylov_descent.checking.closure import call, carried, consistency, load, outputs, precision, trained, unready
from krylov_descent.checking.finding import CheckReport, Finding, TrialRow, split_remedy
from krylov_descent.checking.memory import MemoryReport, memory_of
from krylov_descent.checking.problem import Curvature, Names, Problem, first_line
from krylov_descent.checking.resources import fisher, memory
from krylov_descent.checking.restore import as_found
from krylov_descent.checking.second_derivatives import named, twice
from krylov_descent.checking.trial import tried
from krylov_descent.curvature import CURVATURES
from krylov_descent.objective.closure import no_inference_mode


def check(
    closure: Callable[..., Any],
    model: nn.Module | Iterable[Any] | Callable[..., Any],
    sets: Any = None,
    *,
    krylov_dim: int = 20,
    curvature: Curvature = "ggn",
    available_memory: int | None = None,
    try_seconds: float | None = None,
) -> CheckReport:
    """Look for everything that would make training with KSD or GaussNewtonFlow fail, go wrong silently, or take long.

    A mistake in the closure, the model or the data becomes a finding, never an error. Parameters, ``.grad``, buffers
    and random number generators are restored. A check takes about as long as a step; with sets, less. No step is taken,
    unless ``try_seconds`` asks for a trial: if nothing failed, KSD, GaussNewtonFlow where it fits, Adam with three
    learning rates, and L-BFGS after Adam (without sets) or ``DEEP`` with growing sets each run for that long from the
    same weights, and the line to paste is that of the best.

    Args:
        closure: as for ``KSD.step``; closure and model may be given in either order.
        model: the model that the closure calls; or its parameters, which are then named by position.
        sets: as for ``KSD.step``.
        krylov_dim: as for ``KSD``.
        curvature: as for ``KSD``.
        available_memory: the bytes that a step may take; by default the system's free memory.
        try_seconds: the processor seconds that each method is tried for; None for advice without a trial.

    Returns:
        The findings and the line to paste; ``str(report)`` is a table.

    Raises:
        ValueError: ``krylov_dim``, ``curvature`` or ``try_seconds`` is invalid.

    Example:
        >>> import torch
        >>> from krylov_descent import check
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
        >>> x = torch.linspace(-1, 1, 32)[:, None]
        >>> def closure():
        ...     r = model(x) - torch.sin(3 * x)
        ...     return r.square().mean(), r
        >>> report = check(closure, model)
        >>> [finding.name for finding in report.findings if finding.status == "fail"]
        ['deterministic']
        >>> check(closure, model.eval()).ok
        True
    """
    no_inference_mode()
    krylov_dim = whole("krylov_dim", krylov_dim)
    if krylov_dim < 1:
        raise ValueError(f"krylov_dim={krylov_dim}: must be a whole number ≥ 1; the paper's is 20.")
    if curvature not in CURVATURES:
        raise ValueError(f"curvature={curvature!r}: must be one of {sorted(CURVATURES)}.")
    if try_seconds is not None and not 0 < try_seconds < math.inf:
        raise ValueError(f"try_seconds={try_seconds!r}: must be a number of seconds > 0, such as 20, or None.")
    if isinstance(closure, nn.Module) and not isinstance(model, nn.Module):
        closure, model = cast(Callable[..., Any], model), closure
    names = Names(model if isinstance(model, nn.Module) else list(cast(Iterable[Any], model)))
    findings = list(unready(names))
    if findings:
        return CheckReport(tuple(findings), line(names, krylov_dim, curvature, None))
    problem: Problem | None = None
    with as_found(names.model, names.parameters) as buffers, torch.enable_grad():
        try:
            problem = Problem(closure, names, sets, krylov_dim, curvature, buffers)
        except (ValueError, TypeError) as error:
            of_data = str(error).startswith(("sets ", "data ", "The DataLoader"))
            about = "data" if of_data else "closure" if str(error).startswith("step(") else "parameters"
            findings.append(Finding(about, "fail", *split_remedy(str(error))))
        else:
            with problem.full_precision():
                findings += _findings(problem, available_memory)
                if problem.room is not None:
                    sound = all(finding.status != "fail" for finding in findings)
                    findings += _advice(problem, try_seconds if sound else None)
    trial = () if problem is None else problem.trial
    return CheckReport(tuple(findings), line(names, krylov_dim, curvature, problem), trial)


def _findings(problem: Problem, available_memory: int | None) -> Iterator[Finding]:
    """Run all checks in order, except those that a failure makes meaningless."""
    if (yield from _without_raising("data", load(problem))):
        return
    if (yield from _without_raising("closure", call(problem))):
        return
    unusable = yield from _without_raising("outputs", outputs(problem))
    if (yield from _without_raising("parameters", trained(problem))):
        yield from _without_raising("twice", named(problem))
        return
    yield from _without_raising("precision", precision(problem))
    yield from _without_raising("consistency", consistency(problem))
    if unusable or problem.wrapped:
        problem.working = None
        return
    yield from _without_raising("outputs", carried(problem))
    yield from _without_raising("twice", twice(problem))
    yield from _without_raising("fisher", fisher(problem))
    yield from _without_raising("memory", memory(problem, available_memory))


def _advice(problem: Problem, try_seconds: float | None) -> Iterator[Finding]:
    """Yield the method to begin with and the time of its steps, by a trial, or the method alone by rules."""
    if try_seconds is not None:
        yield from _without_raising("trial", tried(problem, try_seconds))
    if problem.winner is None:
        yield from _without_raising("method", choice(problem))


def _without_raising(name: str, findings: Iterator[Finding]) -> Generator[Finding, None, bool]:
    """Yield findings, with an unexpected error as one more; return whether any failed."""
    failed = False
    try:
        for finding in findings:
            failed |= finding.status == "fail"
            yield finding
    except Exception as error:
        failed = True
        yield Finding(name, "fail", f"This check met {first_line(error)}", "A step would most likely meet it too.")
    return failed


__all__ = ["CheckReport", "Finding", "MemoryReport", "TrialRow", "check", "memory_of"]
