"""Checks of the closure's values: the loss, the model outputs it was computed from, and its weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from krylov_descent.distributed.sharded import whole
from krylov_descent.samples.subsets import Microbatch

BatchClosure = Callable[[Any], Any]

_REMEDY = (
    "Return the mean loss and the model outputs it was computed from, without backward: `return r.square().mean(), r` "
    "for residuals r, or `return cross_entropy(logits, y), logits`."
)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One call of the closure on one micro-batch.

    Attributes:
        loss: the mean over the micro-batch, 0-d.
        outputs: the model outputs that the loss is computed from; empty if the closure returned the loss alone.
        weight: the weight of this mean in the mean over a set: the sample count, unless the closure gave its own.
        samples: the number of samples.
        aligned: whether row i of every output belongs to sample i (with sets); otherwise each row of each output
            is a sample of its own.
        position: the position of the first sample in the set.
        data: the argument of the closure.
    """

    loss: Tensor
    outputs: tuple[Tensor, ...]
    weight: float
    samples: int
    aligned: bool
    position: int = 0
    data: Any = None


def evaluate(call: Callable[[], Any], batch: Microbatch) -> Evaluation:
    """Call the closure on a micro-batch and read its values.

    Raises:
        ValueError: they are not ``loss``, ``(loss, outputs)`` or ``(loss, outputs, weight)``.
    """
    # An autocast inside the closure keeps casts of the weights while any outer autocast, even a disabled one, lasts.
    torch.clear_autocast_cache()
    result = call()
    returned = result if isinstance(result, tuple) else (result,)
    if not 1 <= len(returned) <= 3 or not isinstance(returned[0], Tensor):
        raise ValueError(f"The closure returned {_describe(result)}. {_REMEDY}")
    loss = whole(returned[0])
    if loss.numel() != 1 and len(returned) > 1 and isinstance(returned[1], Tensor) and returned[1].numel() == 1:
        raise ValueError(f"The closure seems to return outputs, loss; the loss comes first. {_REMEDY}")
    if loss.numel() != 1 or not loss.dtype.is_floating_point:
        raise ValueError(
            f"The closure's loss must be one real number; got shape {tuple(loss.shape)}, dtype {loss.dtype}. "
            "Use reduction='mean', or take .mean() of it."
        )
    outputs = _read_outputs(returned[1]) if len(returned) > 1 else ()
    samples = batch.samples
    if samples is None:
        samples = max(1, sum(_rows(z) for z in outputs))
    weight = _read_weight(returned[2]) if len(returned) == 3 else float(samples)
    return Evaluation(loss.reshape(()), outputs, weight, samples, batch.samples is not None, batch.position, batch.data)


def require_outputs(evaluation: Evaluation, why: str) -> None:
    """Refuse outputs that allow no Gauss–Newton product or per-sample gradient.

    Raises:
        ValueError: no outputs, outputs outside the loss's graph, or one computed from another.
    """
    if not evaluation.outputs:
        raise ValueError(
            f"{why} needs the model's outputs, and the closure returned only the loss. {_REMEDY} "
            "Or use KSD with curvature='hessian', which needs the loss alone."
        )
    require_attached(evaluation)
    _refuse_dependent(evaluation.outputs)


def require_attached(evaluation: Evaluation) -> None:
    """Require that every output depends on the parameters.

    Raises:
        ValueError: an output does not.
    """
    for i, z in enumerate(evaluation.outputs):
        if not z.requires_grad:
            raise ValueError(
                f"Output {i} of the closure (shape {tuple(z.shape)}) does not depend on the parameters: "
                "it was detached, or computed under no_grad. Return the tensor that the loss was computed from."
            )


def require_rows(evaluation: Evaluation) -> None:
    """Require, with sets, that dimension 0 of every output counts the samples of the micro-batch.

    Raises:
        ValueError: an output has another number of rows.
    """
    for i, z in enumerate(evaluation.outputs):
        if evaluation.aligned and (z.ndim == 0 or z.shape[0] != evaluation.samples):
            raise ValueError(
                f"Output {i} of the closure has shape {tuple(z.shape)} for a micro-batch of "
                f"{evaluation.samples} samples; dimension 0 must be the sample. Return it before flattening, "
                "batch first (z.reshape(batch, -1), z.transpose(0, 1)); or, if the model has no such "
                "dimension, use preconditioner=None with curvature='ggn' or 'hessian'."
            )


def gradients_of(loss: Tensor, inputs: Sequence[Any], *, retain_graph: bool) -> tuple[Tensor | None, ...]:
    """Return ∂loss by each input, a tensor or an edge of the graph; None where the loss does not depend on it.

    Raises:
        ValueError: torch cannot differentiate a loss of outputs and targets of different dtypes.
    """
    try:
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            loss, inputs, retain_graph=retain_graph, allow_unused=True
        )
    except RuntimeError as error:
        if not str(error).startswith("Found dtype"):
            raise
        raise ValueError(
            f"torch cannot differentiate the closure's loss, as its outputs and targets have different dtypes, perhaps "
            f"by an autocast around the model alone ({error}). Cast the outputs before the loss: "
            "torch.nn.functional.huber_loss(outputs.float(), targets)."
        ) from error
    return gradients


def misses_graph(error: RuntimeError) -> bool:
    """Whether torch, and not the closure itself, raised an error about a missing graph."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and at.tb_frame.f_globals.get("__name__", "").startswith("torch.") and "grad" in str(error)


def require_graph(evaluation: Evaluation) -> None:
    """Require that the loss depends on the parameters.

    Raises:
        ValueError: it does not.
    """
    if not evaluation.loss.requires_grad:
        raise ValueError(
            "The closure's loss does not depend on the parameters given to KSD: it was detached, computed "
            f"under no_grad, or from other parameters. {_REMEDY}"
        )


def require_dense(gradients: Sequence[Tensor | None]) -> None:
    """Refuse sparse gradients.

    Raises:
        ValueError: one is sparse.
    """
    for g in gradients:
        if g is not None and g.layout != torch.strided:
            raise ValueError(
                f"A parameter's gradient is sparse ({g.layout}); KSD needs dense ones. "
                "Build the layer with sparse=False."
            )


def require_weight(W: float) -> None:
    """Require a positive total weight of a sample set.

    Raises:
        ValueError: all weights are zero.
    """
    if W <= 0:
        raise ValueError(
            "The weights that the closure returned for a whole sample set sum to 0: every term is masked. "
            "Drop samples without a target from the data set, or enlarge fraction (of Growing sets: start)."
        )


class BackwardWatch:
    """Detects a closure that writes gradients other than by ``loss.backward()``, which is left out."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._before = [_grad_stamp(p) for p in params]

    def check(self) -> None:
        """Check that no ``.grad`` was written since this object was created.

        Raises:
            ValueError: a ``.grad`` was written.
        """
        for p, before in zip(self._params, self._before, strict=True):
            if p.grad is not None and _grad_stamp(p) != before:
                raise ValueError(
                    "The closure wrote .grad of a parameter (by torch.autograd.backward, or a backward() inside of a "
                    f"compiled function). {_REMEDY}"
                )


def _grad_stamp(p: Tensor) -> tuple[int, int]:
    return (0, 0) if p.grad is None else (id(p.grad), p.grad._version)


def _rows(z: Tensor) -> int:
    return 1 if z.ndim == 0 else z.shape[0]


def _read_outputs(outputs: Any) -> tuple[Tensor, ...]:
    if isinstance(outputs, Tensor):
        leaves: Sequence[Any] = (outputs,)
    elif isinstance(outputs, Mapping):
        leaves = tuple(outputs.values())
    elif isinstance(outputs, (tuple, list)):
        leaves = tuple(outputs)
    else:
        leaves = (outputs,)
    for z in leaves:
        if not isinstance(z, Tensor) or not z.dtype.is_floating_point:
            raise ValueError(
                "The closure's second value must be a real floating-point tensor, or a tuple, list or dict of "
                f"such; got {_describe(outputs)}. {_REMEDY}"
            )
    return tuple(leaves)


def _read_weight(weight: Any) -> float:
    try:
        value = float(whole(weight.detach()) if isinstance(weight, Tensor) else weight)
    except (TypeError, ValueError, RuntimeError):
        value = math.nan
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(
            f"The closure's third value, the weight of its mean, must be a number ≥ 0; got {weight!r}. "
            "For a masked loss return the number of terms that count: mask.sum()."
        )
    return value


def _refuse_dependent(outputs: tuple[Tensor, ...]) -> None:
    """Refuse an output that is computed from another: JᵀH_L J would count it twice."""
    if len(outputs) < 2:
        return
    edges = {edge_of(z): i for i, z in enumerate(outputs)}
    if len(edges) < len(outputs):
        raise ValueError("The closure returned the same tensor twice among its outputs. Return it once.")
    for i, z in enumerate(outputs):
        for edge in edges.keys() & edges_behind(z):
            raise ValueError(
                f"Output {i} of the closure is computed from its output {edges[edge]}, so the Gauss–Newton "
                "product would count that path twice. Return only the tensors that the loss is "
                "computed from directly (for example the logits, not the features before them)."
            )


Edge: TypeAlias = tuple[Node, int]


def edge_of(z: Tensor) -> Edge:
    """Return the place of a tensor in the graph: a node, and the number of its result."""
    edge = get_gradient_edge(z)
    return edge.node, edge.output_nr


def edges_behind(*tensors: Tensor) -> set[Edge]:
    """Return all places in the graph from which the tensors are computed."""
    found: set[Edge] = set()
    stack = [edge_of(z)[0] for z in tensors]
    while stack:
        for node, number in stack.pop().next_functions:
            if node is not None and (node, number) not in found:
                found.add((node, number))
                stack.append(node)
    return found


def _describe(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)} and dtype {x.dtype}"
    if isinstance(x, tuple):
        return "(" + ", ".join(_describe(item) for item in x) + ")"
    return f"{type(x).__name__} ({x!r})" if isinstance(x, (int, float, str, type(None))) else type(x).__name__


def row_scaled(z: Tensor, s: Tensor) -> Tensor:
    """Return row i of z times s[i]; a 0-d z is one row."""
    return z * s.reshape(z.shape[:1] + (1,) * (z.ndim - 1)) if z.ndim else z * s[0]


def row_dots(x: Tensor, y: Tensor) -> Tensor:
    """Return the inner products [rows] of row i of x with row i of y."""
    product = x * y
    if product.ndim < 2:
        return product.reshape(-1)
    return product.flatten(1).sum(1)


def no_inference_mode() -> None:
    """Refuse to run in inference mode, where autograd records nothing.

    Raises:
        ValueError: called inside ``torch.inference_mode``.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError("KSD.step needs gradients and was called inside torch.inference_mode(). Leave it first.")
