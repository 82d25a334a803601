"""Recorded calls of layers: their inputs, and their outputs' places in the graph.

Letters: a layer's matrix is [W b] of shape [out, in + 1]; a [in] its input at one position of one sample (time, pixel,
looked-up row), δ [out] the gradient at its output there.

Calls of F.linear, F.conv1d, 2d, 3d and F.embedding with a weight or bias among the parameters are recorded. An
embedding's input is the unit vector of the looked-up row, so that the sum of aaᵀ is a diagonal of counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from krylov_descent.distributed.sharded import is_sharded
from krylov_descent.layers.rules import ConvLayer, Convolution, DenseLayer, Layer, LinearLayer


@dataclass(frozen=True)
class Lookup:
    """The lookup of an embedding; ``padding`` is the row that is not trained."""

    padding: int | None


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer.

    Attributes:
        a: the input.
        shape: the shape of W.
        dtype: the dtype of the output.
        edge: the output in the graph, valid even if the tensor is overwritten later (nn.ReLU(inplace=True)).
        weight: the index of W among the parameters, or None.
        bias: the index of b among the parameters, or None.
        how: the kind of layer, None for a dense one.
    """

    a: Tensor
    shape: torch.Size
    dtype: torch.dtype
    edge: GradientEdge
    weight: int | None
    bias: int | None
    how: Convolution | Lookup | None

    @property
    def indices(self) -> dict[bool, int]:
        """The indices of the weight (key True) and the bias (key False) that are parameters."""
        return {is_weight: i for is_weight, i in ((False, self.bias), (True, self.weight)) if i is not None}

    @property
    def dense(self) -> bool:
        """Whether the layer is dense and its input has rows."""
        return self.how is None and self.a.ndim > 1

    @property
    def table(self) -> bool:
        """Whether the layer is an embedding, whose A is diagonal."""
        return isinstance(self.how, Lookup)

    @property
    def width(self) -> int:
        """The number of outputs at one position."""
        return self.shape[1 if self.table else 0]

    @property
    def batched(self) -> bool:
        """Whether the input of a dense or convolutional layer has a leading batch dimension."""
        return self.dense if self.how is None else not self.table and self.a.ndim == len(self.shape)

    def on_backward(self, see: Callable[[Tensor], None]) -> RemovableHandle:
        """Call ``see`` with δ in every backward pass through the layer's output."""
        at = self.edge.output_nr

        def hook(gradients: tuple[Tensor | None, ...]) -> None:
            if (delta := gradients[at]) is not None:
                see(delta)

        return self.edge.node.register_prehook(hook)

    def rule(self, delta: Tensor, dtype: torch.dtype, scale: float) -> Layer:
        """Return the rule for a batched call; ``scale`` multiplies δ, so that squares stay in the dtype's range."""
        a, delta = self.a.to(dtype), delta.to(dtype)
        if isinstance(self.how, Convolution):
            return ConvLayer(self.how, a, delta, scale)
        return DenseLayer(a, delta, scale) if a.ndim == 2 else LinearLayer(a, delta, scale)

    def positions(self, delta: Tensor) -> Tensor:
        """Return the number of positions with influence on the loss, 0-d; masked and padding positions have δ = 0."""
        if isinstance(self.how, Lookup):
            _, d = self._lookups(delta, delta.dtype)
            return d.ne(0).any(1).sum()
        return delta.ne(0).any(delta.ndim - 1 if self.how is None else 1).sum()

    def add_factors(self, A: Tensor, G: Tensor, delta: Tensor, share: float, weight: float, positions: float) -> None:
        """A += share Σ aaᵀ and G += weight Σ δδᵀ, over positions with influence, of which there are ``positions``."""
        if isinstance(self.how, Lookup):
            rows, d = self._lookups(delta, G.dtype)
            A.add_(torch.bincount(rows[d.ne(0).any(1)], minlength=len(A)), alpha=share)
            G.addmm_(d.T, d, alpha=weight)
            return
        for a, d in self._columns(delta, G.dtype):
            if positions < delta.numel() // self.width and not bool((some := d.ne(0).any(0)).all()):
                a, d = a[:, some], d[:, some]
            width = len(a)
            A[:width, :width].addmm_(a, a.T, alpha=share)
            G.addmm_(d, d.T, alpha=weight)
            if self.bias is not None:
                sums = a.sum(1).mul_(share)
                A[:width, width] += sums
                A[width, :width] += sums
                A[width, width] += share * a.shape[1]

    def gradients(self, delta: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (index, Σ δaᵀ, the scale of its rounding) of weight and bias, in one or more terms."""
        assert self.weight is not None
        if isinstance(self.how, Lookup):
            rows, d = self._lookups(delta, dtype)
            weight = d.new_zeros(self.shape).index_add_(0, rows, d)
            yield self.weight, weight, d.norm() * len(rows) ** 0.5
            return
        for a, d in self._columns(delta, dtype):
            yield self.weight, d @ a.T, d.norm() * a.norm()
            if self.bias is not None:
                yield self.bias, d.sum(1), d.norm() * d.shape[1] ** 0.5

    def _columns(self, delta: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (a [in, positions], δ [out, positions]) of a dense or convolutional layer, in one or more chunks."""
        a, delta = self.a.to(dtype), delta.to(dtype)
        if isinstance(self.how, Convolution):
            yield from ConvLayer(self.how, a, delta, 1.0).columns()
        else:
            yield a.reshape(-1, a.shape[-1]).T, delta.reshape(-1, delta.shape[-1]).T

    def _lookups(self, delta: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return (rows [positions], δ [positions, out]) of an embedding, with δ = 0 for the padding row."""
        rows, delta = self.a.reshape(-1), delta.to(dtype).reshape(-1, delta.shape[-1])
        assert isinstance(self.how, Lookup)
        return rows, delta if self.how.padding is None else delta * (rows != self.how.padding)[:, None]


def merged(found: Sequence[tuple[LayerCall, Tensor]]) -> list[tuple[LayerCall, Tensor]]:
    """Merge the calls, with their δ, of each dense layer that was called repeatedly (at every time step)."""
    dense: dict[int | None, list[tuple[LayerCall, Tensor]]] = {}
    others = []
    for call, delta in found:
        if call.dense:
            dense.setdefault(call.weight, []).append((call, delta))
        else:
            others.append((call, delta))
    for same in dense.values():
        first, delta = same[0]
        if len(same) > 1:
            first = dataclasses.replace(first, a=torch.cat([call.a.reshape(-1, call.a.shape[-1]) for call, _ in same]))
            delta = torch.cat([d.reshape(-1, d.shape[-1]) for _, d in same])
        others.append((first, delta))
    return others


class Recorder(TorchFunctionMode):
    """Records calls of layers with a weight or a bias among ``params``, while active in this thread.

    Calls inside compiled, scripted or functorch-transformed code and calls with sharded parameters are not recorded.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__()
        self._index = {id(p): i for i, p in enumerate(params)}
        self.calls: list[LayerCall] = []

    def __enter__(self) -> Recorder:
        self.calls = []  # a repeated call of the closure has another graph
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        y = func(*args, **(kwargs or {}))
        if func in _READ and not torch.compiler.is_compiling() and (read := _READ[func](*args, **(kwargs or {}))):
            self._note(y, *read)
        return y

    def _note(self, y: Tensor, a: Tensor, W: Tensor, b: Tensor | None, how: Convolution | Lookup | None) -> None:
        weight, bias = self._index.get(id(W)), self._index.get(id(b))
        if (weight is None and bias is None) or not y.requires_grad or is_sharded(W) or is_sharded(b):
            return
        if not torch._C._functorch.is_functorch_wrapped_tensor(y):  # wrapped by vmap or grad: not in this graph
            self.calls.append(LayerCall(a.detach(), W.shape, y.dtype, get_gradient_edge(y), weight, bias, how))


_Read = tuple[Tensor, Tensor, Tensor | None, Convolution | Lookup | None]
"""a, W, b and the kind of layer."""


def linear_call(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Read:
    """Return input, weight and bias from the arguments of F.linear."""
    return input, weight, bias, None


def convolution_call(input: Tensor, weight: Tensor, bias: Tensor | None = None, *how: Any, **named: Any) -> _Read:
    """Return input, weight, bias and geometry from the arguments of F.conv1d, 2d or 3d."""
    return input, weight, bias, Convolution.of(weight.shape, *how, **named)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> _Read | None:
    if max_norm is not None or scale_grad_by_freq or sparse:  # the gradient is not Σ δaᵀ
        return None
    return input, weight, None, Lookup(None if padding_idx is None else padding_idx % len(weight))


_READ: Mapping[Callable[..., Any], Callable[..., _Read | None]] = {
    F.linear: linear_call,
    F.conv1d: convolution_call,
    F.conv2d: convolution_call,
    F.conv3d: convolution_call,
    F.embedding: _embedding,
}
