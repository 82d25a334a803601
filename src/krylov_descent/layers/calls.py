"""Calls of layers with Kronecker factors: what went in, and where in the graph the result is.

Letters: a layer's matrix is [W b] of shape [out, in + 1]; a [in] its input at one position of one sample (time, pixel,
looked-up row), δ [out] what is pulled back to its output there.

Layers: nn.Linear on [n, …, in]; nn.Conv1d, 2d, 3d with groups=1 (inputs are patches); nn.Embedding (its input is the
unit vector of the row that is looked up, so that sums of aaᵀ are diagonal: counts).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook

from krylov_descent.layers.rules import ConvLayer, fits

_CHUNK = 1 << 22  # elements of patches that are formed at a time


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer.

    Attributes:
        module: the layer.
        a: its input.
        dtype: of its output.
        edge: its output in the graph, whatever overwrites that tensor later (nn.ReLU(inplace=True)).
        weight: the index of its weight.
        bias: the index of its bias, if it has one that is trained.
    """

    module: nn.Module
    a: Tensor
    dtype: torch.dtype
    edge: GradientEdge
    weight: int
    bias: int | None

    @property
    def table(self) -> bool:
        """Whether A is diagonal."""
        return isinstance(self.module, nn.Embedding)

    @property
    def width(self) -> int:
        """Outputs at one position."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight.shape[1 if self.table else 0]

    def positions(self, delta: Tensor) -> int:
        """How many have influence on the loss: those that are masked or padding have δ = 0."""
        if isinstance(self.module, nn.Embedding):
            _, d = self._lookups(delta, delta.dtype)
            return int(d.ne(0).any(1).sum())
        dim = delta.ndim - 1 if isinstance(self.module, nn.Linear) else 1
        return int(delta.ne(0).any(dim).sum())

    def add_factors(self, A: Tensor, G: Tensor, delta: Tensor, share: float, weight: float) -> None:
        """A += share Σ aaᵀ and G += weight Σ δδᵀ, over positions that have influence."""
        if isinstance(self.module, nn.Embedding):
            rows, d = self._lookups(delta, G.dtype)
            A.add_(torch.bincount(rows[d.ne(0).any(1)], minlength=len(A)), alpha=share)
            G.addmm_(d.T, d, alpha=weight)
            return
        for a, d in self._columns(delta, G.dtype):
            some = d.ne(0).any(0)
            if not bool(some.all()):
                a, d = a[:, some], d[:, some]
            width = len(a)
            A[:width, :width].addmm_(a, a.T, alpha=share)
            G.addmm_(d, d.T, alpha=weight)
            if self.bias is not None:
                sums = a.sum(1).mul_(share)
                A[:width, width] += sums
                A[width, :width] += sums
                A[width, width] += share * a.shape[1]

    def gradients(self, delta: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, float]]:
        """(index, Σ δaᵀ, the scale of its rounding) of weight and bias, in one or more terms."""
        if isinstance(self.module, nn.Embedding):
            rows, d = self._lookups(delta, dtype)
            weight = d.new_zeros(self.module.num_embeddings, d.shape[1]).index_add_(0, rows, d)
            yield self.weight, weight, float(d.norm()) * len(rows) ** 0.5
            return
        for a, d in self._columns(delta, dtype):
            yield self.weight, d @ a.T, float(d.norm() * a.norm())
            if self.bias is not None:
                yield self.bias, d.sum(1), float(d.norm()) * d.shape[1] ** 0.5

    def _columns(self, delta: Tensor, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """(a [in, positions], δ [out, positions]) of a dense or convolutional layer, all or some at a time."""
        a, delta = self.a.to(dtype), delta.to(dtype)
        if isinstance(self.module, nn.Linear):
            yield a.reshape(-1, a.shape[-1]).T, delta.reshape(-1, delta.shape[-1]).T
        else:
            assert isinstance(self.module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
            yield from _Patches(self.module, a, delta, 1.0).columns()

    def _lookups(self, delta: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(rows [positions], δ [positions, out]) of an embedding; what looks up its padding has no influence."""
        rows, delta = self.a.reshape(-1), delta.to(dtype).reshape(-1, delta.shape[-1])
        assert isinstance(self.module, nn.Embedding)
        padding = self.module.padding_idx
        return rows, delta if padding is None else delta * (rows != padding)[:, None]


def merged(found: Sequence[tuple[LayerCall, Tensor]]) -> list[tuple[LayerCall, Tensor]]:
    """Calls with their δ; those of a dense layer that was called often (at each time step) as one call."""
    dense: dict[int, list[tuple[LayerCall, Tensor]]] = {}
    others = []
    for call, delta in found:
        if isinstance(call.module, nn.Linear):
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


class _Patches(ConvLayer):
    """A convolution as a dense layer on patches."""

    def columns(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(a [in, positions], δ [out, positions]) of some samples at a time."""
        n, _, out, t = self._delta.shape
        step = max(1, _CHUNK // (t * max(self._width, out)))
        for i in range(0, n, step):
            patches, delta = self._inputs(i, i + step)[:, 0], self._delta[i : i + step, 0]
            yield patches.transpose(0, 1).reshape(self._width, -1), delta.transpose(0, 1).reshape(out, -1)


@contextmanager
def recorded_layers(index: Mapping[int, int]) -> Iterator[list[LayerCall]]:
    """The calls inside of layers whose weight is in ``index`` (id → position).

    The optimizer is given parameters, not a model, so a global hook finds the modules.
    """
    calls: list[LayerCall] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # nothing inside of it is seen
            return
        weight = index.get(id(module._parameters.get("weight")))
        if weight is None or len(args) != 1 or not all(isinstance(x, Tensor) for x in (*args, output)):
            return
        if output.requires_grad and _has_factors(module, args[0], output):
            bias = index.get(id(module._parameters.get("bias")))
            calls.append(LayerCall(module, args[0].detach(), output.dtype, get_gradient_edge(output), weight, bias))

    handle = register_module_forward_hook(hook)
    try:
        yield calls
    finally:
        handle.remove()


def _has_factors(module: nn.Module, a: Tensor, output: Tensor) -> bool:
    if torch._C._functorch.is_functorch_wrapped_tensor(output):  # inside of vmap or grad: not a tensor of this graph
        return False
    if isinstance(module, nn.Embedding):
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return plain and output.shape == (*a.shape, module.embedding_dim)
    return getattr(module, "groups", 1) == 1 and a.ndim > 0 and fits(module, a, output, a.shape[0])
