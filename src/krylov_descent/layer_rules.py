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
from typing import Protocol

import torch
from torch import Tensor, nn

_CHUNK = 1 << 22  # elements of patches and per-sample gradients that are formed at a time

_CONVOLUTIONS = {1: nn.functional.conv1d, 2: nn.functional.conv2d, 3: nn.functional.conv3d}


class Layer(Protocol):
    """One call of a layer, seen as ``groups`` dense layers at t positions."""

    delta: Tensor
    """δ [n, groups, out, t]."""
    width: int
    """in, the inputs of each of the groups at one position."""

    def inputs(self, start: int, stop: int) -> Tensor:
        """a [stop − start, groups, in, t] of samples start to stop."""
        ...

    def along(self, v: Tensor) -> Tensor:
        """a·v [n, groups, t]."""
        ...


class LinearLayer:
    """nn.Linear on [n, in] or [n, ..., in]."""

    def __init__(self, a: Tensor, delta: Tensor) -> None:
        n, self.width = a.shape[0], a.shape[-1]
        self._a = a.reshape(n, -1, self.width).transpose(1, 2)[:, None]
        self.delta = delta.reshape(n, -1, delta.shape[-1]).transpose(1, 2)[:, None]

    def inputs(self, start: int, stop: int) -> Tensor:
        """A view."""
        return self._a[start:stop]

    def along(self, v: Tensor) -> Tensor:
        """One matrix-vector product."""
        return torch.einsum("ngit,i->ngt", self._a, v)


class ConvLayer:
    """nn.Conv1d, 2d, 3d with any stride, padding, dilation and groups: patches as the positions t."""

    def __init__(self, module: nn.Conv1d | nn.Conv2d | nn.Conv3d, a: Tensor, delta: Tensor) -> None:
        pad = module._reversed_padding_repeated_twice
        if any(pad):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            a = nn.functional.pad(a, list(pad), mode=mode)
        self._a, self._module, self._space = a, module, delta.shape[2:]
        self.width = math.prod(module.weight.shape[1:])
        self.delta = delta.reshape(len(delta), module.groups, -1, self._space.numel())

    def inputs(self, start: int, stop: int) -> Tensor:
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
        return patches.reshape(len(a), module.groups, self.width, self._space.numel())

    def along(self, v: Tensor) -> Tensor:
        """A convolution by v with one output per group: no patches needed."""
        module = self._module
        kernel = v.reshape(1, *module.weight.shape[1:]).expand(module.groups, *module.weight.shape[1:])
        convolve = _CONVOLUTIONS[len(module.kernel_size)]
        out = convolve(self._a, kernel, None, module.stride, 0, module.dilation, module.groups)
        return out.reshape(len(out), module.groups, -1)


def layer_of(module: nn.Module, a: Tensor, delta: Tensor, n: int) -> Layer | None:
    """One call of a module as a layer with a rule; None where the shapes are not those of such a layer on n samples.

    A subclass may do something else in its forward pass: shapes tell some of it, ``discrepancy`` the rest.
    """
    if isinstance(module, nn.Linear):
        fits = a.ndim >= 2 and a.shape[:-1] == delta.shape[:-1] and a.shape[0] == n
        fits = fits and (delta.shape[-1], a.shape[-1]) == tuple(module.weight.shape)
        return LinearLayer(a, delta) if fits else None
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        dims = len(module.kernel_size)
        if not a.ndim == delta.ndim == dims + 2 or not a.shape[0] == delta.shape[0] == n:
            return None
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
        fits = tuple(delta.shape[1:]) == expected and a.shape[1] == module.weight.shape[1] * module.groups
        return ConvLayer(module, a, delta) if fits else None
    return None


def has_rule(module: nn.Module) -> bool:
    """Whether there is an exact rule for this kind of module; every other parameter takes the random-sign probe."""
    return isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))


def weight_squares(layer: Layer) -> Tensor:
    """Σᵢ Gᵢ∘Gᵢ for the weight, [groups, out, in]."""
    n, groups, out, t = layer.delta.shape
    if t == 1:  # Gᵢ = δᵢ aᵢᵀ: the squares factor
        return torch.einsum("ngo,ngi->goi", layer.delta[..., 0].square(), layer.inputs(0, n)[..., 0].square())
    total = layer.delta.new_zeros(groups, out, layer.width)
    step = max(1, _CHUNK // (groups * layer.width * max(out, t)))
    for i in range(0, n, step):
        G = layer.delta[i : i + step] @ layer.inputs(i, i + step).transpose(2, 3)
        total += G.square_().sum(0)
    return total


def bias_squares(layer: Layer) -> Tensor:
    """Σᵢ (Σₜ δᵢₜ)² for the bias, [groups, out]."""
    return layer.delta.sum(3).square().sum(0)


def discrepancy(layer: Layer, G: Tensor, s: Tensor, u: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
    """(Σᵢₜ sᵢ (u·δᵢₜ)(aᵢₜ·v) − uᵀGv, Σ |u·δ||a·v|), the latter the scale of rounding; v = None for the bias."""
    terms = torch.einsum("ngot,o->ngt", layer.delta, u)
    if v is not None:
        terms = terms * layer.along(v)
    groups = layer.delta.shape[1]
    expected = u @ (G.reshape(groups, len(u), -1) @ v if v is not None else G.reshape(groups, -1)).sum(0)
    return s @ terms.sum((1, 2)) - expected, terms.abs().sum()
