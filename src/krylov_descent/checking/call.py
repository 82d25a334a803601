"""Whether the closure runs, and returns what KSD needs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from krylov_descent.checking.finding import Finding, split_remedy
from krylov_descent.checking.naming import first_line, passed_through, raised_at
from krylov_descent.checking.problem import Problem
from krylov_descent.checking.trace import Trace, traced
from krylov_descent.closure import BackwardWatch, require_outputs, require_rows
from krylov_descent.curvature.gauss_newton import require_influence

_DTYPE = re.compile(
    r"dtype|scalar type|not implemented for '|should be the same|can't be cast|must be of floating", re.IGNORECASE
)
_TAKES_INTEGERS = (nn.Embedding, nn.EmbeddingBag)


def load(problem: Problem) -> Iterator[Finding]:
    """The first batch of the sets."""
    try:
        problem.load()
    except Exception as error:
        remedy = "Load samples by hand to find out: train_set[0], then a batch of them by collate_fn."
        yield Finding("data", "fail", f"The sets gave no batch: {_described(error)}", remedy)
        return
    if problem.sets is not None:
        sizes = ", ".join(f"{name} {size:,}" for name, size in problem.draw.sizes.items())
        yield Finding("data", "ok", f"sets of a step: {sizes} samples")


def call(problem: Problem) -> Iterator[Finding]:
    """One call, searched for the usual mistakes."""
    with traced() as trace:
        watch = BackwardWatch(problem.parameters.params)
        try:
            problem.evaluation = problem.objective.evaluate(problem.batch)
        except Exception as error:
            yield _explained(problem, error, trace, watch)
            return
    loss, outputs = problem.evaluation.loss, problem.evaluation.outputs
    shapes = ", ".join(str(tuple(z.shape)) for z in outputs)
    what = f"outputs {shapes}" if outputs else "no outputs"
    if not bool(loss.isfinite()):
        remedy = "Look for NaN or inf in the data, labels out of range, logarithms or divisions by zero."
        yield Finding("closure", "fail", f"runs, and gives the loss {loss.item()}.", remedy)
        return
    yield Finding("closure", "ok", f"runs: loss {loss.item():.6g} in {_name(loss.dtype)}, {what}")


def outputs(problem: Problem) -> Iterator[Finding]:
    """What the loss is convex in, and its rows."""
    evaluation = problem.evaluation
    if problem.curvature == "hessian" and not evaluation.outputs:
        detail = "The closure returned the loss alone: enough for the Hessian, but there is no preconditioner."
        yield Finding("outputs", "warn", detail, "Return what the loss is convex in as a second value.")
        return
    try:
        require_outputs(evaluation, f"curvature={problem.curvature!r}")
        require_rows(evaluation)
        require_influence(
            torch.autograd.grad(evaluation.loss, evaluation.outputs, retain_graph=True, allow_unused=True)
        )
    except ValueError as error:
        yield Finding("outputs", "fail", *split_remedy(str(error)))


def _explained(problem: Problem, error: Exception, trace: Trace, watch: BackwardWatch) -> Finding:
    try:  # a closure that calls backward() may fail after it, or because of it
        watch.check()
    except ValueError as called_backward:
        return Finding("closure", "fail", *split_remedy(str(called_backward)))
    if isinstance(error, ValueError) and not raised_at(error):
        return Finding("closure", "fail", *split_remedy(str(error)))  # one of the package's own
    if passed_through(error, "_dynamo"):
        return Finding(
            "closure",
            "fail",
            "The closure calls a compiled model (torch.compile), which cannot be differentiated twice.",
            "Call the uncompiled model in the closure.",
        )
    text = str(error)
    of_dtype = _DTYPE.search(text) is not None
    inside, in_loss = "", True
    if trace.active:
        module, args = trace.active[-1]
        inside, in_loss = problem.names.module(module), isinstance(module, nn.modules.loss._Loss)
        if of_dtype and not in_loss and (found := _wrong_dtype(problem, module, args)):
            return Finding("closure", "fail", f"{inside} {found[0]}: {first_line(error)}", found[1])
    remedy = "Call the closure by hand to find out; it must run by itself."
    if of_dtype and in_loss:
        remedy = "Convert the targets: y.long() for class numbers (cross_entropy), y.float() for all other losses."
    elif "same device" in text:
        remedy = (
            f"Move the data to {problem.parameters.device}: Subsets(..., device={str(problem.parameters.device)!r})."
        )
    where = f" in {inside}" if inside else ""
    return Finding("closure", "fail", f"The closure does not run: {_described(error)}{where}.", remedy)


def _wrong_dtype(problem: Problem, module: nn.Module, args: tuple[object, ...]) -> tuple[str, str] | None:
    """What is wrong with a module's inputs, and the remedy; None if their dtype is not it."""
    wanted = problem.parameters.params[0].dtype
    for x in args:
        if not isinstance(x, Tensor):
            continue
        if isinstance(module, _TAKES_INTEGERS):
            if x.dtype.is_floating_point:
                return f"got {_name(x.dtype)} indices", "Convert them: x.long()."
        elif not x.dtype.is_floating_point and not x.dtype.is_complex:
            convert = ".float()" if wanted == torch.float32 else f".to({wanted})"
            return (
                f"got integers ({_name(x.dtype)})",
                f"Convert the data: x{convert}; category numbers need an nn.Embedding first.",
            )
        elif x.dtype != wanted and x.dtype.is_floating_point:
            convert = "x.float()" if wanted == torch.float32 else f"x.to({wanted})"
            return (
                f"got {_name(x.dtype)} for parameters of {_name(wanted)}",
                f"Convert the data, {convert}, or the model, model.to({x.dtype}).",
            )
    return None


def _described(error: BaseException) -> str:
    at = raised_at(error)
    return f"{first_line(error)}{f' ({at})' if at else ''}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
