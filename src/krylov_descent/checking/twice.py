"""Whether everything can be differentiated twice, and the product comes out right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import get_args

from krylov_descent.checking.difference import Comparison, compare
from krylov_descent.checking.finding import Finding
from krylov_descent.checking.locate import Culprit, custom_functions, locate
from krylov_descent.checking.naming import first_line
from krylov_descent.checking.problem import Curvature, Problem
from krylov_descent.curvature import CURVATURES

# By the beginning of the autograd node's name.
_REMEDIES = {
    "EmbeddingBag": "Use nn.Embedding(...) and .mean(1) (or .sum(1)) in its place.",
    "CheckpointFunction": "Use torch.utils.checkpoint.checkpoint(..., use_reentrant=False).",
    "CompiledFunction": "Call the uncompiled model in the closure.",
    "WeightNorm": (
        "weight_norm(..., dim=None), one scale for a whole layer, is right; so is the normalisation in plain "
        "operations, g * v / v.norm(dim=1, keepdim=True)."
    ),
    "ScaledDotProduct": "Take the sdpa_kernel(...) out of the closure, or make it sdpa_kernel(SDPBackend.MATH).",
    "CtcLoss": "The recursion of CTC in plain operations (logsumexp over paths) has a second derivative.",
    "CudnnCtcLoss": "The recursion of CTC in plain operations (logsumexp over paths) has a second derivative.",
    "CudnnRnn": "Step inside torch.backends.cudnn.flags(enabled=False).",
    "MiopenRnn": "Step inside torch.backends.cudnn.flags(enabled=False).",
    "Cdist": "Use (x[:, None] - y[None]).square().sum(-1).sqrt() in its place.",
    "EuclideanDist": "Use (x[:, None] - y[None]).square().sum(-1).sqrt() in its place.",
}
_CUSTOM = "Write its backward() with differentiable operations, without @once_differentiable."
_UNKNOWN = "Write it with other operations."


def twice(problem: Problem) -> Iterator[Finding]:
    """The curvature that was asked for; where it fails, the first other one that works is named."""
    findings = list(_examined(problem, problem.curvature))
    if all(finding.status != "fail" for finding in findings):
        yield from findings
        return
    others = [kind for kind in get_args(Curvature) if kind != problem.curvature]
    problem.working = next((kind for kind in others if _works(problem, kind)), None)
    for finding in findings:
        remedy = finding.remedy
        if finding.status == "fail" and problem.working is not None:
            remedy = f"KSD(curvature={problem.working!r}) was tried and works here. Otherwise: {remedy}"
        yield Finding(finding.name, finding.status, finding.detail, remedy)


def named(problem: Problem) -> Iterator[Finding]:
    """The operations that stand in the way of even a gradient."""
    culprits = locate(problem, problem.curvature)
    if culprits:
        yield _named(culprits, None)


def _examined(problem: Problem, kind: Curvature) -> Iterator[Finding]:
    culprits = locate(problem, kind)
    comparison, error = _compared(problem, kind)
    if culprits:
        yield _named(culprits, error)
    elif error is not None:
        remedy = "The model must be differentiable twice, in the mode in which it is trained."
        yield Finding("twice", "fail", f"The product of curvature={kind!r} fails: {first_line(error)}", remedy)
    else:
        yield Finding("twice", "ok", f"every operation differentiates as curvature={kind!r} needs")
    if comparison is not None and not culprits:
        yield _judged(problem, kind, comparison)


def _works(problem: Problem, kind: Curvature) -> bool:
    if CURVATURES[kind].first_order and not problem.evaluation.outputs:
        return False
    try:
        return all(finding.status == "ok" for finding in _examined(problem, kind))
    except Exception:
        return False


def _compared(problem: Problem, kind: Curvature) -> tuple[Comparison | None, Exception | None]:
    try:
        return compare(problem, kind), None
    except Exception as error:
        return None, error


def _named(culprits: Sequence[Culprit], error: Exception | None) -> Finding:
    told = error.__cause__ if error is not None and error.__cause__ is not None else error
    reason = f" ({first_line(told).rstrip('.')})" if isinstance(told, (RuntimeError, NotImplementedError)) else ""
    names, places = ("; ".join(map(show, culprits)) for show in (str, lambda culprit: culprit.place))
    if culprits[0].node.startswith("WeightNorm"):
        detail = f"{places}: PyTorch's second derivative of weight_norm is silently wrong."
    elif culprits[0].node.startswith("CheckpointFunction"):
        detail = f"{places}: a reentrant checkpoint, which hides its parameters from torch.autograd.grad."
    else:
        detail = f"{names} cannot be differentiated twice{reason}."
    return Finding("twice", "fail", detail, " ".join(dict.fromkeys(map(_remedy, culprits))))


def _remedy(culprit: Culprit) -> str:
    if culprit.custom and not culprit.node.startswith("CompiledFunction"):
        return _CUSTOM
    return next((text for start, text in _REMEDIES.items() if culprit.node.startswith(start)), _UNKNOWN)


def _judged(problem: Problem, kind: Curvature, comparison: Comparison) -> Finding:
    how = "differences in float64" if comparison.double else "differences in float32"
    if comparison.agrees:
        measured = f" to {comparison.error:.0e}" if comparison.error > 0 else ""
        return Finding("product", "ok", f"agrees with {how}{measured}")
    detail = f"The {kind!r} product is off by {comparison.error:.0%} against {how}."
    if not comparison.conclusive:
        detail = f"not told by {how}, which cross too many kinks (ReLU, max) or round too much"
        return Finding("product", "ok", detail)
    if not problem.deterministic:
        return Finding("product", "warn", f"{detail} The closure is random, which may explain it.")
    if kind == "ggn" and problem.bypass > 0:
        return Finding(
            "product", "warn", f"{detail} Part of the loss does not pass through the outputs, which may be why."
        )
    custom = custom_functions(problem)
    if custom:
        suspects = "; ".join(map(str, custom))
        return Finding("product", "fail", f"{detail} Most likely the derivative of {suspects}.", _CUSTOM)
    remedy = "Leave out parts of the model to find the operation whose derivative is wrong."
    return Finding("product", "fail", detail, remedy)
