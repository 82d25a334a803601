"""Exact sums of squared per-sample gradients for layers, from their inputs and output gradients.

Letters: aᵢ input and δᵢ = ∂loss/∂(output) of sample i, W the weight, n samples, t further positions (time, pixels).
∂loss/∂W = Σᵢ Σₜ δᵢₜ aᵢₜᵀ, so that sample i contributes Gᵢ = Σₜ δᵢₜ aᵢₜᵀ and the rule returns Σᵢ Gᵢ∘Gᵢ.

A rule sees one call of one module. It is silently wrong when the weight acts anywhere else as well (tied or
functional use, a network differentiated inside the closure), when the recorded output was overwritten in place, and
when the first dimension is not the sample. ``discrepancy`` tells, for random u, v: Σᵢₜ sᵢ (u·δᵢₜ)(aᵢₜ·v) must equal
uᵀGv with G the gradient of the loss (s = 1), or G = Σᵢ sᵢ Gᵢ of a pull-back with signs s.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor, nn

_CHUNK = 1 << 22  # elements of patches and per-sample gradients that are formed at a time

_CONVOLUTIONS = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}


class Layer(Protocol):
    """One call of a layer."""

    def along(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """u·δ and (u·δ)(a·v) at every sample (first dimension), group and position: terms of bias and weight."""
        ...

    def widths(self) -> tuple[int, int]:
        """Of u and of v."""
        ...

    def add_squares(self, weight: Tensor | None, bias: Tensor | None, scratch: Scratch) -> None:
        """weight += scale² Σᵢ Gᵢ∘Gᵢ and bias += scale² Σᵢ (Σₜ δᵢₜ)², where they are wanted."""
        ...


class Scratch:
    """Room for squares, the same for every layer of a pass: touching fresh pages costs as much as a product saves."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def squares(self, of: str, x: Tensor) -> Tensor:
        """x∘x, until the next call for the same purpose."""
        buffer = self._buffers.get(of)
        if buffer is None or buffer.numel() < x.numel():
            self._buffers[of] = buffer = x.new_empty(x.numel())
        return torch.mul(x, x, out=buffer[: x.numel()].view(x.shape))


class DenseLayer:
    """nn.Linear on [n, in]: Gᵢ = δᵢ aᵢᵀ, so that the squares factor and their sum is one matrix product."""

    def __init__(self, a: Tensor, delta: Tensor, scale: float) -> None:
        # Within this range δ² needs no help, and the factor rides on the product: one copy of δ less.
        self._after = scale * scale if 1e-9 < scale < 1e9 else 1.0
        self._a, self._delta, self._before = a, delta, 1.0 if 1e-9 < scale < 1e9 else scale

    def along(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Two matrix-vector products."""
        along_u = self._delta @ u
        return along_u, along_u * (self._a @ v)

    def widths(self) -> tuple[int, int]:
        """Outputs, inputs."""
        return self._delta.shape[1], self._a.shape[1]

    def add_squares(self, weight: Tensor | None, bias: Tensor | None, scratch: Scratch) -> None:
        """(δ²)ᵀ(a²), and column sums of δ²."""
        delta2 = scratch.squares("delta", self._delta if self._before == 1.0 else self._delta * self._before)
        if weight is not None:
            weight.addmm_(delta2.T, scratch.squares("a", self._a), alpha=self._after)
        if bias is not None:
            bias.add_(delta2.sum(0), alpha=self._after)


class _PositionedLayer(ABC):
    """A layer that acts at t positions of each sample, as ``groups`` dense layers: Gᵢ = Σₜ δᵢₜ aᵢₜᵀ is formed."""

    _delta: Tensor
    """δ [n, groups, out, t]."""
    _width: int
    """in, the inputs of each of the groups at one position."""
    _scale: float

    @abstractmethod
    def _inputs(self, start: int, stop: int) -> Tensor:
        """a [stop − start, groups, in, t] of samples start to stop."""

    @abstractmethod
    def _inputs_along(self, v: Tensor) -> Tensor:
        """a·v [n, groups, t]."""

    def along(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """[n, groups, t] each."""
        along_u = torch.einsum("ngot,o->ngt", self._delta, u)
        return along_u, along_u * self._inputs_along(v)

    def widths(self) -> tuple[int, int]:
        """Outputs and inputs of one group."""
        return self._delta.shape[2], self._width

    def add_squares(self, weight: Tensor | None, bias: Tensor | None, scratch: Scratch) -> None:
        """In chunks of samples."""
        n, groups, out, t = self._delta.shape
        if bias is not None:
            bias += self._delta.sum(3).mul_(self._scale).square_().sum(0).view_as(bias)
        if weight is None:
            return
        into = weight.view(groups, out, self._width)
        step = max(1, _CHUNK // (groups * self._width * max(out, t)))
        for i in range(0, n, step):
            G = (self._delta[i : i + step] * self._scale) @ self._inputs(i, i + step).transpose(2, 3)
            into += G.square_().sum(0)


class LinearLayer(_PositionedLayer):
    """nn.Linear on [n, ..., in]."""

    def __init__(self, a: Tensor, delta: Tensor, scale: float) -> None:
        n, self._width, self._scale = a.shape[0], a.shape[-1], scale
        self._a = a.reshape(n, -1, self._width).transpose(1, 2)[:, None]
        self._delta = delta.reshape(n, -1, delta.shape[-1]).transpose(1, 2)[:, None]

    def _inputs(self, start: int, stop: int) -> Tensor:
        return self._a[start:stop]

    def _inputs_along(self, v: Tensor) -> Tensor:
        return torch.einsum("ngit,i->ngt", self._a, v)


class ConvLayer(_PositionedLayer):
    """nn.Conv1d, 2d, 3d with any stride, padding, dilation and groups: patches as the positions t."""

    def __init__(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d, a: Tensor, delta: Tensor, scale: float) -> None:
        pad = module._reversed_padding_repeated_twice
        if any(pad):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            a = nn.functional.pad(a, list(pad), mode=mode)
        self._a, self._module, self._space, self._scale = a, module, delta.shape[2:], scale
        self._width = math.prod(module.weight.shape[1:])
        self._delta = delta.reshape(len(delta), module.groups, -1, self._space.numel())

    def _inputs(self, start: int, stop: int) -> Tensor:
        """Patches, copied once."""
        a, module = self._a[start:stop], self._module
        strides = a.stride()
        patches = a.as_strided(  # [n, channels, *kernel, *space], no copy yet
            (*a.shape[:2], *module.kernel_size, *self._space),
            (
                *strides[:2],
                *(s * m for s, m in zip(strides[2:], module.dilation, strict=True)),
                *(s * m for s, m in zip(strides[2:], module.stride, strict=True)),
            ),
        )
        return patches.reshape(len(a), module.groups, self._width, self._space.numel())

    def _inputs_along(self, v: Tensor) -> Tensor:
        """A convolution by v with one output per group: no patches needed."""
        module = self._module
        kernel = v.reshape(1, *module.weight.shape[1:]).expand(module.groups, *module.weight.shape[1:])
        convolve = _CONVOLUTIONS[len(module.kernel_size)]
        out = convolve(self._a, kernel, None, module.stride, 0, module.dilation, module.groups)
        return out.reshape(len(out), module.groups, -1)


def fits(module: nn.Module, a: Tensor, output: Tensor, n: int) -> bool:
    """Whether the shapes are those of a layer with a rule, called on n samples.

    A subclass may do something else in its forward pass: shapes tell some of it, ``discrepancy`` the rest.
    """
    if isinstance(module, nn.Linear):
        right = a.ndim >= 2 and a.shape[:-1] == output.shape[:-1] and a.shape[0] == n
        return right and (output.shape[-1], a.shape[-1]) == tuple(module.weight.shape)
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        dims = len(module.kernel_size)
        if not a.ndim == output.ndim == dims + 2 or not a.shape[0] == output.shape[0] == n:
            return False
        pad = module._reversed_padding_repeated_twice
        space = tuple(
            (a.shape[2 + i] + pad[2 * (dims - 1 - i)] + pad[2 * (dims - 1 - i) + 1] - reach - 1) // stride + 1
            for i, (reach, stride) in enumerate(
                zip(
                    (d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)),
                    module.stride,
                    strict=True,
                )
            )
        )
        expected = (module.weight.shape[0], *space)
        return tuple(output.shape[1:]) == expected and a.shape[1] == module.weight.shape[1] * module.groups
    return False


def layer_of(module: nn.Module, a: Tensor, delta: Tensor, scale: float) -> Layer:
    """One call of a module that ``fits``; ``scale`` multiplies δ in the squares, which may leave the dtype's range."""
    if isinstance(module, nn.Linear):
        return DenseLayer(a, delta, scale) if a.ndim == 2 else LinearLayer(a, delta, scale)
    assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    return ConvLayer(module, a, delta, scale)


def has_rule(module: nn.Module) -> bool:
    """Whether there is an exact rule for this kind of module; every other parameter takes the random-sign probe."""
    return isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))


def discrepancy(terms: Tensor, G: Tensor, s: Tensor | None, u: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
    """(Σᵢₜ sᵢ (u·δᵢₜ)(aᵢₜ·v) − uᵀGv, Σ |u·δ||a·v|), the latter the scale of rounding; v = None for the bias."""
    groups = 1 if terms.ndim == 1 else terms.shape[1]
    expected = u @ (G.reshape(groups, len(u), -1) @ v if v is not None else G.reshape(groups, -1)).sum(0)
    total = terms.sum() if s is None else s @ terms.reshape(len(s), -1).sum(1)
    return total - expected, terms.abs().sum()
