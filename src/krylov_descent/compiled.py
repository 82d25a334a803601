"""Value-and-gradient passes that are traced once and compiled: for networks so small that Python is what costs.

The closure and the differentiation of its loss are traced together, through autograd, to one graph without derivatives
to take: so a closure that differentiates inside (a PINN's) compiles too, which torch.compile on the closure refuses.
Tensors that the closure holds are read where they are at every call; numbers, branches and which tensors it holds are
fixed by the trace. Hence the first pass of every step is taken both ways and compared.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """Mean loss of a micro-batch, its weight and number of samples, and a gradient per parameter."""

    loss: Tensor
    weight: float
    samples: int
    gradient: Sequence[Tensor | None]


class CompiledPasses:
    """Compiled passes of one closure, a graph for every shape of micro-batch."""

    def __init__(self) -> None:
        self._graphs: dict[Any, Callable[[Sequence[Tensor], Pass | None], Pass]] = {}
        self._of: object = None
        self._compared = False
        self._refused = False

    def start(self, identity: object) -> None:
        """Begin a step; another closure or other parameters start anew."""
        if identity != self._of:
            self.__init__()  # type: ignore[misc]
            self._of = identity
        self._compared = False

    def take(
        self, closure: Callable[[Any], Any], params: Sequence[Tensor], data: Any, eager: Callable[[], Pass]
    ) -> Pass:
        """One pass, compiled where that gives what ``eager`` gives."""
        if self._refused:
            return eager()
        leaves, structure = pytree.tree_flatten(data)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        key = (structure, *(_sort(x) for x in leaves))
        try:
            graph = self._graphs.get(key) if self._compared else None
        except TypeError:
            graph = None  # a leaf without a hash, such as an array: refused below
        if graph is not None:
            return graph(tensors, None)
        reference = eager()
        try:
            for _ in range(2):
                fresh = key not in self._graphs
                if fresh:
                    self._graphs[key] = _traced(closure, params, leaves, structure, tensors)
                if _agree(self._graphs[key](tensors, reference), reference):
                    self._compared = True
                    return reference
                self._graphs.clear()  # the closure has changed since it was traced
                if fresh:
                    break
            why = "it computes something else than the closure: one that is random, or depends on the values of tensors"
        except Exception as error:  # whatever the compiler meets; the closure itself has just been run
            why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self._refused = True
        warnings.warn(
            f"compile=True has no effect here, passes are taken without: {why}. Tensor.item() and branches on tensors "
            "cannot be traced, nor can nn.LSTM, GRU and RNN on a CPU.",
            stacklevel=2,
        )
        return reference

    def __getstate__(self) -> dict[str, Any]:
        # A copy is of other parameters.
        return CompiledPasses().__dict__


def _sort(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device)
    return (type(leaf), leaf)


def _traced(
    closure: Callable[[Any], Any],
    params: Sequence[Tensor],
    leaves: Sequence[Any],
    structure: pytree.TreeSpec,
    tensors: Sequence[Tensor],
) -> Callable[[Sequence[Tensor], Pass | None], Pass]:
    # Here, as it imports a second's worth of the compiler, which few runs need.
    from torch.fx.experimental.proxy_tensor import make_fx

    fixed_weight: float | None = None
    like: Pass

    def passes(*given: Tensor) -> list[Tensor | None]:
        nonlocal fixed_weight
        rest = iter(given)
        data = pytree.tree_unflatten([next(rest) if isinstance(x, Tensor) else x for x in leaves], structure)
        returned = closure(data)
        loss, *more = returned if isinstance(returned, tuple) else (returned,)
        weight = more[1] if len(more) > 1 else None
        if weight is not None and not isinstance(weight, Tensor):
            fixed_weight, weight = float(weight), None
        loss = loss.reshape(())
        gradient = torch.autograd.grad(loss, params, allow_unused=True)
        return [loss.detach(), None if weight is None else weight.detach(), *gradient]

    graph = torch.compile(make_fx(passes)(*tensors), dynamic=False)

    def run(given: Sequence[Tensor], reference: Pass | None) -> Pass:
        nonlocal like
        like = like if reference is None else reference
        with torch.no_grad():
            loss, weight, *gradient = graph(*given)
        if weight is None:
            weight = like.weight if fixed_weight is None else fixed_weight
        return Pass(loss, float(weight), like.samples, gradient)

    return run


def _agree(a: Pass, b: Pass) -> bool:
    """To rounding: what is looked for is another function."""
    close = torch.finfo(b.loss.dtype).eps ** 0.5
    if a.weight != b.weight:
        return False
    if b.weight == 0:
        return True
    if abs(float(a.loss) - float(b.loss)) > close * abs(float(b.loss)):
        return False
    error, size = 0.0, 0.0
    for x, y in zip(a.gradient, b.gradient, strict=True):
        if (x is None) != (y is None):
            return False
        if x is not None and y is not None:
            error, size = math.hypot(error, float((x - y).norm())), math.hypot(size, float(y.norm()))
    return not error > close * size
