"""Checks of the closure and its parameters: it runs, returns a mean over samples, and is deterministic."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from krylov_descent.checking.finding import Finding, counted, listed, split_remedy
from krylov_descent.checking.problem import Names, Problem, first_line, raised_at
from krylov_descent.checking.second_derivatives import Trace, traced
from krylov_descent.curvature.gauss_newton import require_influence
from krylov_descent.distributed.sharded import is_sharded
from krylov_descent.objective.closure import BackwardWatch, Evaluation, require_outputs, require_rows
from krylov_descent.objective.consistency import bypass, bypass_text, in_training, inconsistencies
from krylov_descent.objective.precision import REMEDY, reduced
from krylov_descent.safety.footprint import Footprint
from krylov_descent.vectors.devices import wide

_DTYPE = re.compile(
    r"dtype|scalar type|not implemented for '|should be the same|can't be cast|must be of floating", re.IGNORECASE
)
_TAKES_INTEGERS = (nn.Embedding, nn.EmbeddingBag)


def load(problem: Problem) -> Iterator[Finding]:
    """Load the first batch of the sets."""
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
    """Call the closure once and look for common mistakes."""
    with traced() as trace:
        watch = BackwardWatch(problem.parameters.params)
        try:
            problem.evaluation = problem.objective.evaluate(problem.batch)
        except Exception as error:
            yield _explained(problem, error, trace, watch)
            return
    loss, outputs = problem.evaluation.loss, problem.evaluation.outputs
    shapes = ", ".join(str(tuple(z.shape)) for z in outputs)
    found = " found from the loss" if problem.objective.form.found else ""
    what = f"outputs {shapes}{found}" if outputs else "no outputs"
    if not bool(loss.isfinite()):
        remedy = "Look for NaN or inf in the data, labels out of range, logarithms or divisions by zero."
        yield Finding("closure", "fail", f"runs, and gives the loss {loss.item()}.", remedy)
        return
    yield Finding("closure", "ok", f"runs: loss {loss.item():.6g} in {_name(loss.dtype)}, {what}")


def outputs(problem: Problem) -> Iterator[Finding]:
    """Check the model outputs and their rows."""
    evaluation = problem.evaluation
    if problem.curvature == "hessian" and not evaluation.outputs:
        detail = "The closure returned the loss alone: enough for the Hessian, but there is no preconditioner."
        yield Finding("outputs", "warn", detail, "Return the outputs that the loss is computed from as a second value.")
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
        return Finding("closure", "fail", *split_remedy(str(error)))  # raised by this package
    if any("_dynamo" in Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__)):
        detail = "The closure calls a compiled model (torch.compile), which cannot be differentiated twice."
        return Finding("closure", "fail", detail, "Call the uncompiled model in the closure.")
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
        device = str(problem.parameters.device)
        remedy = f"Move the data to {device}: Subsets(..., device={device!r})."
    where = f" in {inside}" if inside else ""
    return Finding("closure", "fail", f"The closure does not run: {_described(error)}{where}.", remedy)


def _wrong_dtype(problem: Problem, module: nn.Module, args: tuple[object, ...]) -> tuple[str, str] | None:
    """Return what is wrong with the dtype of a module's inputs, and the remedy; None if it is right."""
    wanted = problem.parameters.params[0].dtype
    convert = "x.float()" if wanted == torch.float32 else f"x.to({wanted})"
    for x in args:
        if not isinstance(x, Tensor):
            continue
        if isinstance(module, _TAKES_INTEGERS):
            if x.dtype.is_floating_point:
                return f"got {_name(x.dtype)} indices", "Convert them: x.long()."
        elif not x.dtype.is_floating_point and not x.dtype.is_complex:
            remedy = f"Convert the data: {convert}; category numbers need an nn.Embedding first."
            return f"got integers ({_name(x.dtype)})", remedy
        elif x.dtype != wanted and x.dtype.is_floating_point:
            remedy = f"Convert the data, {convert}, or the model, model.to({x.dtype})."
            return f"got {_name(x.dtype)} for parameters of {_name(wanted)}", remedy
    return None


def _described(error: BaseException) -> str:
    at = raised_at(error)
    return f"{first_line(error)}{f' ({at})' if at else ''}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_GOOD = {
    "random": ("deterministic", "the same batch gives the same loss"),
    "buffers": ("buffers", "none changes"),
    "mean": ("mean", "the loss of a batch is the weighted mean of its halves' losses"),
}


def consistency(problem: Problem) -> Iterator[Finding]:
    """Report everything that the first step would refuse."""
    natural, batch = problem.natural, problem.batch
    halves = None if problem.draw.probe is None else problem.draw.probe[1:]
    first = natural.evaluate(batch)
    with Footprint() as seen:
        again = natural.forward(batch).loss
    found = {x.what: x for x in inconsistencies(natural, first, again.item(), seen, halves, problem.names.module)}
    seen.restore_buffers()
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


def _rows(problem: Problem, whole: Evaluation, seen: Footprint) -> Iterator[Finding]:
    """Row i of each output must be that of sample i, whatever else is in the batch."""
    assert problem.draw.probe is not None
    start = 0
    for half in problem.draw.probe[1:]:
        part = problem.natural.evaluate(half)
        for k, (z, of_half) in enumerate(zip(whole.outputs, part.outputs, strict=False)):
            if z.ndim == 0 or len(z) != whole.samples or len(of_half) != part.samples:
                return  # reported by the check of the outputs
            if _differ(z[start : start + part.samples], of_half):
                norms = in_training(seen, (torch.nn.modules.batchnorm._NormBase,), problem.names.module)
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
    """Whether the common parts differ beyond rounding; batches may be padded to different lengths."""
    if x.ndim != y.ndim:
        return True
    common = tuple(slice(min(i, j)) for i, j in zip(x.shape, y.shape, strict=True))
    x, y = wide(x.detach()[common]), wide(y.detach()[common])
    if x.numel() == 0 or not bool(x.isfinite().all() & y.isfinite().all()):
        return False
    return float((x - y).abs().max()) > math.sqrt(torch.finfo(torch.float32).eps) * float(x.abs().max())


def carried(problem: Problem) -> Iterator[Finding]:
    """Report the part of the gradient that does not pass through the outputs."""
    if problem.curvature == "hessian" or not problem.evaluation.outputs:
        return
    problem.bypass = bypass(problem.objective, problem.objective.evaluate(problem.batch))
    if problem.bypass > 0:
        yield Finding("outputs", "warn", *split_remedy(bypass_text(problem.bypass)))
    else:
        yield Finding("outputs", "ok", "the whole gradient passes through them")


_SMALL = 200_000  # the largest number of parameters for which float64 is recommended


def unready(names: Names) -> Iterator[Finding]:
    """Report parameters that cannot be checked."""
    if not names.parameters:
        yield Finding("parameters", "fail", "There are no parameters.", "Give check the model that the closure calls.")
    lazy = [names.parameter(p) for p in names.parameters if is_lazy(p)]
    if lazy:
        detail = f"{listed(lazy)} has no shape yet: the model has lazy layers that never ran."
        yield Finding("parameters", "fail", detail, "Call the model once on a batch, before check and before KSD.")
    if any(map(is_sharded, names.parameters)):
        detail = "The parameters are DTensors, which check does not look into."
        yield Finding("parameters", "fail", detail, "Check the plain model in one process: its steps are the same.")


def trained(problem: Problem) -> Iterator[Finding]:
    """Report the number of parameters, and frozen and unused ones."""
    names, params = problem.names, problem.parameters.params
    loss = problem.objective.evaluate(problem.batch).loss
    gradients = torch.autograd.grad(loss, params, allow_unused=True)
    problem.unused = {i for i, g in enumerate(gradients) if g is None}
    unused = [names.parameter(params[i]) for i in sorted(problem.unused)]
    frozen = [names.parameter(p) for p in names.parameters if not p.requires_grad]
    detail = f"{counted(sum(p.numel() for p in params), 'trained number')} in {counted(len(params), 'tensor')}"
    if len(unused) == len(params):
        detail = "The loss depends on none of these parameters: the closure uses another model, or a copy."
        yield Finding("parameters", "fail", detail, "Give check and KSD the model that the closure calls.")
        return
    sparse = [names.parameter(p) for p, g in zip(params, gradients, strict=True) if g is not None and g.is_sparse]
    if sparse:
        detail = f"The gradient of {listed(sparse)} is sparse; KSD needs dense ones."
        yield Finding("parameters", "fail", detail, "Build the layer with sparse=False.")
        return
    yield Finding("parameters", "ok", detail)
    if frozen:
        yield Finding("frozen", "ok", f"left alone (requires_grad=False): {listed(frozen)}")
    if unused:
        yield Finding(
            "unused",
            "warn",
            f"The loss of this batch does not depend on {listed(unused)}.",
            "Nothing breaks, and they stay as they are. If that is not meant: look for a layer that forward() leaves "
            "out, or a detach().",
        )


def precision(problem: Problem) -> Iterator[Finding]:
    """Report the precision of the dtype."""
    dtype = problem.parameters.params[0].dtype
    name = _name(dtype)
    if dtype not in (torch.float32, torch.float64):
        yield Finding(
            "precision",
            "warn",
            f"The parameters are {name}, whose rounding hides all but large decreases of the loss.",
            "Keep parameters in float32, and use torch.autocast inside the closure for speed.",
        )
    elif dtype == torch.float32 and problem.sets is None and problem.parameters.count <= _SMALL:
        yield Finding(
            "precision",
            "ok",
            "float32: losses are compared to about 1e-6 of their size",
            "For least squares, PINNs and other small problems float64 goes further: model.double() and data.double().",
        )
    else:
        yield Finding("precision", "ok", name)
    if dtype == torch.float32 and (where := " and ".join(reduced(problem.parameters.device))):
        yield Finding(
            "tf32",
            "warn",
            f"{where} may round float32 to TF32 or bfloat16 inside (10 or 8 bits instead of 23).",
            REMEDY,
        )
