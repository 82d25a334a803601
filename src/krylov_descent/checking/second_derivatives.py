"""Checks of second derivatives: every operation is twice differentiable.

PyTorch's anomaly mode records, for every node of a graph, the line of code that made it and, for nodes of a backward
pass, the node that was being differentiated: that leads from a failure back to the forward pass. A trace of module
calls leads from there to the module.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.autograd import set_detect_anomaly
from torch.autograd.graph import Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from krylov_descent.checking.finding import Finding
from krylov_descent.checking.problem import Curvature, Problem, first_line, users_line
from krylov_descent.curvature import CURVATURES
from krylov_descent.objective.closure import Evaluation


class Trace:
    """The module calls inside ``traced``.

    Attributes:
        active: (module, arguments) of the active calls, the innermost last; after an error, those that raised it.
        maker: node → the innermost module whose call made it; nodes made outside of all modules are missing.
    """

    def __init__(self) -> None:
        self.active: list[tuple[nn.Module, tuple[Any, ...]]] = []
        self.maker: dict[Node, nn.Module | None] = {}

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._claim(args, self.active[-1][0] if self.active else None)
        self.active.append((module, args))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.active.pop()
        self._claim(output, module)

    def _claim(self, tensors: Any, module: nn.Module | None) -> None:
        """Assign unclaimed nodes to this module: inner calls end before outer ones."""
        roots = [x.grad_fn for x in _tensors(tensors) if x.grad_fn is not None]
        for node in walk(roots, self.maker):
            self.maker[node] = module


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, Mapping):
        for value in x.values():
            yield from _tensors(value)
    elif isinstance(x, Sequence) and not isinstance(x, str):
        for value in x:
            yield from _tensors(value)


def walk(roots: Iterable[Node | None], known: Mapping[Node, Any] | None = None) -> list[Node]:
    """Return the nodes of a graph, the nearest to the roots first, up to known ones."""
    known = {} if known is None else known
    found: dict[Node, None] = {}
    front = [node for node in roots if node is not None and node not in known]
    while front:
        following: list[Node] = []
        for node in front:
            if node not in found:
                found[node] = None
                following += [parent for parent, _ in node.next_functions if parent is not None]
        front = [node for node in following if node not in known and node not in found]
    return list(found)


@contextmanager
def traced() -> Iterator[Trace]:
    """Trace the modules that run inside, including those outside of the model (losses)."""
    trace = Trace()
    with register_module_forward_pre_hook(trace._enter), register_module_forward_hook(trace._leave):
        yield trace


_REENTRANT = "CheckpointFunctionBackward"  # parameters used inside get no gradient
_WEIGHT_NORM = "WeightNormInterfaceBackward0"  # its second derivative is wrong, without an error
_REFUSALS = ("torch::autograd::NotImplemented", "torch::autograd::Error", "torch::autograd::DelayedError")
_BLAMED = re.compile(r"Error detected in (\w+)\.")


@dataclass(frozen=True)
class Culprit:
    """An operation without a right second derivative.

    Attributes:
        node: the name of its autograd node, "EmbeddingBagBackward0".
        place: "EmbeddingBag at encoder.bag", or "train.py:12" for code outside of modules.
        custom: whether it is a custom torch.autograd.Function.
    """

    node: str
    place: str
    custom: bool

    @property
    def operation(self) -> str:
        """The name of the operation in user code.

        Example:
            >>> Culprit("CtcLossBackward0", "", custom=False).operation
            'ctc_loss'
        """
        bare = re.sub(r"Backward\d*$", "", self.node)
        return bare if self.custom else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower()

    def __str__(self) -> str:
        return f"{self.place}: {self.operation}" if self.place else self.operation


def locate(problem: Problem, curvature: Curvature) -> list[Culprit]:
    """Return the operations of the closure that this curvature cannot differentiate."""
    params = problem.parameters.params
    with set_detect_anomaly(True, check_nan=False), sdpa_kernel(SDPBackend.MATH):
        with traced() as trace:
            evaluation = problem.evaluate_few()
        forward = walk([evaluation.loss.grad_fn, *(z.grad_fn for z in evaluation.outputs)])
        second: list[Node] = []
        with _blaming() as blamed:
            for derivatives, inputs in _first_derivatives(evaluation, params, curvature):
                second += walk([x.grad_fn for x in derivatives])
                torch.autograd.grad(
                    derivatives, inputs, [torch.ones_like(x) for x in derivatives], retain_graph=True, allow_unused=True
                )
    wrong = {_REENTRANT, _WEIGHT_NORM} if curvature == "hessian" else {_REENTRANT}
    suspects = [node for node in forward if node.name() in wrong]
    refused = blamed.union(_REFUSALS)
    suspects += [_origin(node, trace) for node in (*forward, *second) if node.name() in refused]
    found = [_culprit(node, trace, problem) for node in suspects]
    return list(dict.fromkeys(found))


def _first_derivatives(
    evaluation: Evaluation, params: Sequence[Tensor], curvature: Curvature
) -> Iterator[tuple[list[Tensor], Sequence[Tensor]]]:
    """Yield the first derivatives that a curvature differentiates again, and the inputs of that."""
    if curvature == "hessian":
        yield _graphs(torch.autograd.grad(evaluation.loss, params, create_graph=True, allow_unused=True)), params
        return
    u = [torch.zeros_like(z, requires_grad=True) for z in evaluation.outputs]
    yield _graphs(torch.autograd.grad(evaluation.outputs, params, u, create_graph=True, allow_unused=True)), u
    if curvature == "ggn":
        dL_dz = torch.autograd.grad(evaluation.loss, evaluation.outputs, create_graph=True, allow_unused=True)
        yield _graphs(dL_dz), evaluation.outputs


def _graphs(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [x for x in tensors if x is not None and x.grad_fn is not None]


@contextmanager
def _blaming() -> Iterator[set[str]]:
    """Yield a set that gets the names of the nodes that raise an error inside; suppresses the error."""
    names: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield names
        except Exception:
            for warning in caught:
                names.update(_BLAMED.findall(str(warning.message)))


def _origin(node: Node, trace: Trace) -> Node:
    """Return the node of the forward pass from which a node of a backward pass came."""
    while node not in trace.maker:
        parent = _metadata(node).get("parent_")
        if not isinstance(parent, Node):
            break
        node = parent
    return node


def _culprit(node: Node, trace: Trace, problem: Problem) -> Culprit:
    maker = trace.maker.get(node)
    frames = _metadata(node).get("traceback_") or []
    line = users_line([str(frame) for frame in frames])
    place = line if maker is None else _named(maker, problem, line)
    return Culprit(node.name(), place, _is_custom(node) and node.name() != _REENTRANT)


def _named(maker: nn.Module, problem: Problem, line: str) -> str:
    """Return the path of a module, or for one outside of the model (a loss) the line that called it."""
    name = problem.names.module(maker)
    return name if " at " in name or not line else f"{name} ({line})"


def _metadata(node: Node) -> dict[str, Any]:
    remembered: Any = node.metadata  # a property; torch's stubs declare a method
    return dict(remembered)


def _is_custom(node: Node) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


# Remedies by the beginning of the autograd node's name.
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
    """Check the requested curvature; if it fails, name the first other one that works."""
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
    """Report the operations that prevent even a gradient."""
    culprits = locate(problem, problem.curvature)
    if culprits:
        yield _with_names(culprits, None)


def _examined(problem: Problem, kind: Curvature) -> Iterator[Finding]:
    culprits = locate(problem, kind)
    try:
        problem.product(kind, problem.direction())
    except Exception as raised:
        remedy = "The model must be differentiable twice, in the mode in which it is trained."
        detail = f"The product of curvature={kind!r} fails: {first_line(raised)}"
        yield _with_names(culprits, raised) if culprits else Finding("twice", "fail", detail, remedy)
        return
    if culprits:
        yield _with_names(culprits, None)
        return
    yield Finding("twice", "ok", f"every operation differentiates as curvature={kind!r} needs")


def _works(problem: Problem, kind: Curvature) -> bool:
    if CURVATURES[kind].first_order and not problem.evaluation.outputs:
        return False
    try:
        return all(finding.status == "ok" for finding in _examined(problem, kind))
    except Exception:
        return False


def _with_names(culprits: Sequence[Culprit], error: Exception | None) -> Finding:
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
