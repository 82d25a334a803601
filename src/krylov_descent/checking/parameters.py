"""The parameters: which are trained, which are not, and in what precision."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.parameter import is_lazy

from krylov_descent.checking.finding import Finding, counted, listed
from krylov_descent.checking.naming import Names
from krylov_descent.checking.problem import Problem
from krylov_descent.distributed.sharded import is_sharded
from krylov_descent.precision import REMEDY, reduced

_SMALL = 200_000  # parameters up to which float64 costs little beside what it brings


def unready(names: Names) -> Iterator[Finding]:
    """Parameters that cannot even be looked at."""
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
    """Counts, frozen and unused parameters."""
    names, params = problem.names, problem.parameters.params
    loss = problem.objective.evaluate(problem.batch).loss
    gradients = torch.autograd.grad(loss, params, allow_unused=True)
    problem.unused = {i for i, g in enumerate(gradients) if g is None}
    unused = [names.parameter(params[i]) for i in sorted(problem.unused)]
    frozen = [names.parameter(p) for p in names.parameters if not p.requires_grad]
    detail = f"{counted(sum(p.numel() for p in params), 'trained number')} in {counted(len(params), 'tensor')}"
    if len(unused) == len(params):
        yield Finding(
            "parameters",
            "fail",
            "The loss depends on none of these parameters, though on others: the closure uses another model or a copy.",
            "Give check and KSD the model that the closure calls.",
        )
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
    """What the dtype allows."""
    dtype = problem.parameters.params[0].dtype
    name = str(dtype).removeprefix("torch.")
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
