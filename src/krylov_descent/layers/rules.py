"""Exact sums of squared per-sample gradients for layers, from their inputs and output gradients.

Letters: aᵢ input and δᵢ = ∂loss/∂(output) of sample i, W the weight, n samples, t further positions (time, pixels).
∂loss/∂W = Σᵢ Σₜ δᵢₜ aᵢₜᵀ, so that sample i contributes Gᵢ = Σₜ δᵢₜ aᵢₜᵀ and the rule returns Σᵢ Gᵢ∘Gᵢ.

A rule sees one call. It is silently wrong when the weight is also used elsewhere (x @ W in place of F.linear, a network
differentiated inside the closure), or when the first dimension is not the sample. ``discrepancy`` detects this with
random u, v: Σᵢₜ sᵢ (u·δᵢₜ)(aᵢₜ·v) must equal uᵀGv, where G is the gradient of the loss (s = 1), or G = Σᵢ sᵢ Gᵢ of a
pull-back with signs s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

_CHUNK = 1 << 22  # elements of patches and per-sample gradients formed at a time


class Layer(Protocol):
    """One call of a layer."""

    def along(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return u·δ and (u·δ)(a·v) for each sample (first dimension), group and position: terms of bias and weight."""
        ...

    def widths(self) -> tuple[int, int]:
        """Return the lengths of u and v."""
        ...

    def add_squares(self, weight: Tensor | None, bias: Tensor | None, scratch: Scratch) -> None:
        """weight += scale² Σᵢ Gᵢ∘Gᵢ and bias += scale² Σᵢ (Σₜ δᵢₜ)², each unless None."""
        ...


class Scratch:
    """Buffers for squares, shared by the layers of a pass: touching fresh pages costs as much as a product saves."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def squares(self, of: str, x: Tensor) -> Tensor:
        """Return x∘x in the buffer ``of``, valid until the next call with the same name."""
        buffer = self._buffers.get(of)
        if buffer is None or buffer.numel() < x.numel():
            self._buffers[of] = buffer = x.new_empty(x.numel())
        return torch.mul(x, x, out=buffer[: x.numel()].view(x.shape))


class DenseLayer:
    """F.linear on [n, in]: Gᵢ = δᵢ aᵢᵀ, so that Σᵢ Gᵢ∘Gᵢ is one matrix product."""

    def __init__(self, a: Tensor, delta: Tensor, scale: float) -> None:
        # In this range δ² neither overflows nor underflows: scaling the product instead of δ saves a copy.
        self._after = scale * scale if 1e-9 < scale < 1e9 else 1.0
        self._a, self._delta, self._before = a, delta, 1.0 if 1e-9 < scale < 1e9 else scale

    def along(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return both [n], by two matrix-vector products."""
        along_u = self._delta @ u
        return along_u, along_u * (self._a @ v)

    def widths(self) -> tuple[int, int]:
        """Return the numbers of outputs and inputs."""
        return self._delta.shape[1], self._a.shape[1]

    def add_squares(self, weight: Tensor | None, bias: Tensor | None, scratch: Scratch) -> None:
        """Add (δ²)ᵀ(a²) to the weight and column sums of δ² to the bias."""
        delta2 = scratch.squares("delta", self._delta if self._before == 1.0 else self._delta * self._before)
        if weight is not None:
            weight.addmm_(delta2.T, scratch.squares("a", self._a), alpha=self._after)
        if bias is not None:
            bias.add_(delta2.sum(0), alpha=self._after)


class _PositionedLayer(ABC):
    """A layer that acts as ``groups`` dense layers at t positions of each sample; Gᵢ = Σₜ δᵢₜ aᵢₜᵀ is formed."""

    _delta: Tensor
    """δ [n, groups, out, t]."""
    _width: int
    """in, the number of inputs of each group at one position."""
    _scale: float

    @abstractmethod
    def _inputs(self, start: int, stop: int) -> Tensor:
        """Return a [stop − start, groups, in, t] of samples start to stop."""

    @abstractmethod
    def _inputs_along(self, v: Tensor) -> Tensor:
        """Return a·v [n, groups, t]."""

    def along(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return both [n, groups, t]."""
        along_u = torch.einsum("ngot,o->ngt", self._delta, u)
        return along_u, along_u * self._inputs_along(v)

    def widths(self) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of one group."""
        return self._delta.shape[2], self._width

    def add_squares(self, weight: Tensor | None, bias: Tensor | None, scratch: Scratch) -> None:
        """Add the squares, in chunks of samples."""
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
    """F.linear on [n, ..., in]."""

    def __init__(self, a: Tensor, delta: Tensor, scale: float) -> None:
        n, self._width, self._scale = a.shape[0], a.shape[-1], scale
        self._a = a.reshape(n, -1, self._width).transpose(1, 2)[:, None]
        self._delta = delta.reshape(n, -1, delta.shape[-1]).transpose(1, 2)[:, None]

    def _inputs(self, start: int, stop: int) -> Tensor:
        return self._a[start:stop]

    def _inputs_along(self, v: Tensor) -> Tensor:
        return torch.einsum("ngit,i->ngt", self._a, v)


@dataclass(frozen=True)
class Convolution:
    """The geometry of a convolution, one number for each of the kernel's dimensions.

    Attributes:
        kernel: the shape of W without its outputs: inputs of one group, then the kernel's dimensions.
        pad: zeros before and after each dimension, the last dimension first, as F.pad takes them.
    """

    kernel: torch.Size
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(
        cls, shape: torch.Size, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
    ) -> Convolution:
        """Return the geometry from the shape of W and the options of F.conv1d, 2d or 3d."""
        kernel = shape[1:]
        dims = len(kernel) - 1
        dilation = _each(dilation, dims)
        if isinstance(padding, str):
            total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel[1:], strict=True)]
            pairs = [(t // 2, t - t // 2) for t in total]
        else:
            pairs = [(p, p) for p in _each(padding, dims)]
        return cls(kernel, _each(stride, dims), tuple(p for pair in reversed(pairs) for p in pair), dilation, groups)


def _each(x: Any, dims: int) -> tuple[int, ...]:
    numbers = tuple(x) if isinstance(x, Sequence) else (x,)
    return numbers * dims if len(numbers) == 1 else numbers


class ConvLayer(_PositionedLayer):
    """A convolution in one, two or three dimensions; its patches are the positions t."""

    def __init__(self, how: Convolution, a: Tensor, delta: Tensor, scale: float) -> None:
        self._a = F.pad(a, list(how.pad)) if any(how.pad) else a
        self._how, self._space, self._scale = how, delta.shape[2:], scale
        self._width = how.kernel.numel()
        self._delta = delta.reshape(len(delta), how.groups, -1, self._space.numel())

    def columns(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (a [in, positions], δ [out, positions]) of the first group, in chunks of samples."""
        n, _, out, t = self._delta.shape
        step = max(1, _CHUNK // (t * max(self._width, out)))
        for i in range(0, n, step):
            patches, delta = self._inputs(i, i + step)[:, 0], self._delta[i : i + step, 0]
            yield patches.transpose(0, 1).reshape(self._width, -1), delta.transpose(0, 1).reshape(out, -1)

    def _inputs(self, start: int, stop: int) -> Tensor:
        """Return the patches, copied once."""
        a, how = self._a[start:stop], self._how
        strides = a.stride()
        patches = a.as_strided(  # [n, channels, *kernel, *space], no copy yet
            (*a.shape[:2], *how.kernel[1:], *self._space),
            (
                *strides[:2],
                *(s * m for s, m in zip(strides[2:], how.dilation, strict=True)),
                *(s * m for s, m in zip(strides[2:], how.stride, strict=True)),
            ),
        )
        return patches.reshape(len(a), how.groups, self._width, self._space.numel())

    def _inputs_along(self, v: Tensor) -> Tensor:
        """Return a·v by a convolution with one output per group, without patches."""
        how = self._how
        kernel = v.reshape(1, *how.kernel).expand(how.groups, *how.kernel)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self._space) - 1]
        out = convolve(self._a, kernel, None, how.stride, 0, how.dilation, how.groups)
        return out.reshape(len(out), how.groups, -1)


def discrepancy(terms: Tensor, G: Tensor, s: Tensor | None, u: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return Σᵢₜ sᵢ (u·δᵢₜ)(aᵢₜ·v) − uᵀGv and the scale of its rounding, Σ |u·δ||a·v|; v = None for the bias."""
    groups = 1 if terms.ndim == 1 else terms.shape[1]
    expected = u @ (G.reshape(groups, len(u), -1) @ v if v is not None else G.reshape(groups, -1)).sum(0)
    total = terms.sum() if s is None else s @ terms.reshape(len(s), -1).sum(1)
    return total - expected, terms.abs().sum()
