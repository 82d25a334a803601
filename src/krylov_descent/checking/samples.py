"""Whether the loss is a mean over samples, the same at every call, and rows of outputs are samples."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from krylov_descent.checking.finding import Finding, split_remedy
from krylov_descent.checking.problem import Problem
from krylov_descent.closure import Evaluation
from krylov_descent.consistency import Seen, bypass, bypass_text, inconsistencies, watching

_GOOD = {
    "random": ("deterministic", "the same batch gives the same loss"),
    "buffers": ("buffers", "none changes"),
    "mean": ("mean", "the loss of a batch is the weighted mean of its halves' losses"),
}


def consistency(problem: Problem) -> Iterator[Finding]:
    """What the first step would refuse, all of it at once."""
    natural, batch = problem.natural, problem.batch
    halves = None if problem.draw.probe is None else problem.draw.probe[1:]
    with watching() as seen:
        first = natural.evaluate(batch)
        again = natural.forward(batch).loss
        found = {x.what: x for x in inconsistencies(natural, first, again.item(), seen, halves, problem.names.module)}
    problem.deterministic = "random" not in found
    if wrapper := found.get("wrapper"):
        problem.wrapped = True
        yield Finding("wrapper", "fail", wrapper.detail, wrapper.remedy)
    for what, (name, good) in _GOOD.items():
        bad = found.get(what)  # type: ignore[call-overload]
        if bad is not None:
            yield Finding(name, "fail", bad.detail, bad.remedy.removeprefix("Remedy: "))
        elif what == "mean" and not problem.deterministic:
            yield Finding(name, "warn", "not checked, as the closure is random")
        elif what != "mean" or halves is not None:
            yield Finding(name, "ok", good)
    if problem.draw.probe is not None and first.outputs and problem.deterministic:
        yield from _rows(problem, first, seen)


def _rows(problem: Problem, whole: Evaluation, seen: Seen) -> Iterator[Finding]:
    """Row i of each output must be that of sample i, whatever else is in the batch."""
    assert problem.draw.probe is not None
    start = 0
    for half in problem.draw.probe[1:]:
        part = problem.natural.evaluate(half)
        for k, (z, of_half) in enumerate(zip(whole.outputs, part.outputs, strict=False)):
            if z.ndim == 0 or len(z) != whole.samples or len(of_half) != part.samples:
                return  # told of by the check of the outputs
            if _differ(z[start : start + part.samples], of_half):
                norms = seen.training((torch.nn.modules.batchnorm._NormBase,), problem.names.module)
                cause = f" ({', '.join(norms)} is in train mode)" if norms else ""
                remedy = "Return outputs batch first, of models that treat samples one by one"
                yield Finding(
                    "rows",
                    "fail" if problem.curvature == "fisher" else "warn",
                    f"Rows of output {k} change with the other samples of the batch{cause}, or are not in the order of "
                    "the samples: per-sample gradients, and the preconditioner made of them, are wrong.",
                    f"{'Call model.eval()' if norms else remedy}; or use KSD(preconditioner=None).",
                )
                return
        start += part.samples
    yield Finding("rows", "ok", "row i of every output belongs to sample i alone")


def _differ(x: Tensor, y: Tensor) -> bool:
    """Beyond rounding, where both are defined: batches may be padded to other lengths."""
    if x.ndim != y.ndim:
        return True
    common = tuple(slice(min(i, j)) for i, j in zip(x.shape, y.shape, strict=True))
    x, y = x.detach()[common].double(), y.detach()[common].double()
    if x.numel() == 0 or not bool(x.isfinite().all() & y.isfinite().all()):
        return False
    return float((x - y).abs().max()) > math.sqrt(torch.finfo(torch.float32).eps) * float(x.abs().max())


def carried(problem: Problem) -> Iterator[Finding]:
    """How much of the gradient passes through the outputs."""
    if problem.curvature == "hessian" or not problem.evaluation.outputs:
        return
    problem.bypass = bypass(problem.objective, problem.objective.evaluate(problem.batch))
    if problem.bypass > 0:
        yield Finding("outputs", "warn", *split_remedy(bypass_text(problem.bypass)))
    else:
        yield Finding("outputs", "ok", "the whole gradient passes through them")
