"""Finds the operations that cannot be differentiated twice, and the modules or lines in which they ran.

PyTorch's anomaly mode remembers, for every node of a graph, the line of code that made it and, for nodes made by a
backward pass, the node that was being differentiated: that leads from a failure back to the forward pass.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from krylov_descent.checking.naming import users_line
from krylov_descent.checking.problem import Curvature, Problem
from krylov_descent.checking.trace import Trace, traced, walk
from krylov_descent.closure import Evaluation

_REENTRANT = "CheckpointFunctionBackward"  # parameters used inside get no gradient at all
_WEIGHT_NORM = "WeightNormInterfaceBackward0"  # differentiated twice without an error and with a wrong result
_REFUSALS = ("torch::autograd::NotImplemented", "torch::autograd::Error", "torch::autograd::DelayedError")
_BLAMED = re.compile(r"Error detected in (\w+)\.")


@dataclass(frozen=True)
class Culprit:
    """An operation that stands in the way.

    Attributes:
        node: the name of its autograd node, "EmbeddingBagBackward0".
        place: "EmbeddingBag at encoder.bag", or "train.py:12" for code outside of modules.
        custom: whether it is a torch.autograd.Function of someone's own.
    """

    node: str
    place: str
    custom: bool

    @property
    def operation(self) -> str:
        """The name that a user knows.

        Example:
            >>> Culprit("CtcLossBackward0", "", custom=False).operation
            'ctc_loss'
        """
        bare = re.sub(r"Backward\d*$", "", self.node)
        return bare if self.custom else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", bare).lower()

    def __str__(self) -> str:
        return f"{self.place}: {self.operation}" if self.place else self.operation


def locate(problem: Problem, curvature: Curvature) -> list[Culprit]:
    """The operations of the closure that this curvature cannot do with; none if all is well."""
    params = problem.parameters.params
    with _remembering(), sdpa_kernel(SDPBackend.MATH):
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


def custom_functions(problem: Problem) -> list[Culprit]:
    """The autograd functions of someone's own that the closure uses: the usual suspects when a product is wrong."""
    with _remembering(), traced() as trace:
        evaluation = problem.evaluate_few()
    nodes = [node for node in walk([evaluation.loss.grad_fn]) if _is_custom(node)]
    return list(dict.fromkeys(_culprit(node, trace, problem) for node in nodes))


def _first_derivatives(
    evaluation: Evaluation, params: Sequence[Tensor], curvature: Curvature
) -> Iterator[tuple[list[Tensor], Sequence[Tensor]]]:
    """What a curvature differentiates again, and with respect to what."""
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
def _remembering() -> Iterator[None]:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        yield


@contextmanager
def _blaming() -> Iterator[set[str]]:
    """Names of the nodes in which an error arises inside; the error itself ends here."""
    names: set[str] = set()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield names
        except Exception:
            for warning in caught:
                names.update(_BLAMED.findall(str(warning.message)))


def _origin(node: Node, trace: Trace) -> Node:
    """The node of the forward pass that a node of a backward pass came from."""
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
    """A module by path; one that is no part of the model (a loss), by the line that called it."""
    name = problem.names.module(maker)
    return name if " at " in name or not line else f"{name} ({line})"


def _metadata(node: Node) -> dict[str, Any]:
    remembered: Any = node.metadata  # a property, of which torch's stubs make a method
    return dict(remembered)


def _is_custom(node: Node) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)
