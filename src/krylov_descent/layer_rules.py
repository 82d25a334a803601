"""Exact sums of squared per-sample gradients for layers, from their inputs and output gradients.

Letters: aᵢ input and δᵢ = ∂loss/∂(output) of sample i, W the weight, n samples, t further positions (time, pixels).
∂loss/∂W = Σᵢ Σₜ δᵢₜ aᵢₜᵀ, so that sample i contributes Gᵢ = Σₜ δᵢₜ aᵢₜᵀ and the rule returns Σᵢ Gᵢ∘Gᵢ.

A rule sees one call of one module. It is silently wrong when the weight acts anywhere else as well (tied or
functional use, a network differentiated inside the closure) or when the recorded output was overwritten in place.
``discrepancy`` tells: for random u, v the sum Σᵢₜ (u·δᵢₜ)(aᵢₜ·v) must equal uᵀ(∂loss/∂W)v.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_CHUNK = 1 << 22  # elements of the per-sample gradients that are formed at a time


@dataclass(frozen=True, eq=False)
class Unfolded:
    """A layer seen as groups of dense layers: a [n, groups, t, in], δ [n, groups, t, out]."""

    a: Tensor
    delta: Tensor

    def weight_squares(self) -> Tensor:
        """Σᵢ Gᵢ∘Gᵢ for the weight, [groups, out, in]."""
        n, groups, t, width = self.a.shape
        if t == 1:
            return torch.einsum("ngo,ngi->goi", self.delta[:, :, 0].square(), self.a[:, :, 0].square())
        out = self.delta.shape[-1]
        total = self.a.new_zeros(groups, out, width)
        step = max(1, _CHUNK // (groups * out * width))
        for i in range(0, n, step):
            G = self.delta[i : i + step].transpose(2, 3) @ self.a[i : i + step]
            total += G.square_().sum(0)
        return total

    def bias_squares(self) -> Tensor:
        """Σᵢ (Σₜ δᵢₜ)² for the bias, [groups, out]."""
        return self.delta.sum(2).square().sum(0)

    def discrepancy(self, gradient: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(Σ (u·δ)(a·v) − uᵀ(∂loss/∂W)v, Σ |u·δ||a·v|), the latter the scale of rounding."""
        terms = (self.delta @ u) * (self.a @ v)
        groups, width = self.a.shape[1], self.a.shape[-1]
        expected = (gradient.reshape(groups, -1, width) @ v @ u).sum()
        return terms.sum() - expected, terms.abs().sum()

    def bias_discrepancy(self, gradient: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The same for the bias: Σ u·δ against u·(∂loss/∂b)."""
        terms = self.delta @ u
        return terms.sum() - (gradient.reshape(self.delta.shape[1], -1) @ u).sum(), terms.abs().sum()


def unfold_linear(module: nn.Module, a: Tensor, delta: Tensor, n: int) -> Unfolded | None:
    """nn.Linear on [n, in] or [n, ..., in]."""
    if a.ndim < 2 or a.shape[0] != n:
        return None
    if a.ndim > 2 and a.shape[1] == n:
        return None  # the sample may be the second dimension (time first): not to be told apart
    return Unfolded(a.reshape(n, 1, -1, a.shape[-1]), delta.reshape(n, 1, -1, delta.shape[-1]))


def unfold_conv(module: nn.Module, a: Tensor, delta: Tensor, n: int) -> Unfolded | None:
    """nn.Conv1d, 2d, 3d with any stride, padding, dilation and groups: patches as the positions t."""
    assert isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    dims = len(module.kernel_size)
    if a.ndim != dims + 2 or a.shape[0] != n:
        return None
    pad = module._reversed_padding_repeated_twice
    if any(pad):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        a = nn.functional.pad(a, list(pad), mode=mode)
    channels, groups = a.shape[1], module.groups
    strides, space = a.stride(), delta.shape[2:]
    patches = a.as_strided(  # [n, channels, *space, *kernel], no copy
        (n, channels, *space, *module.kernel_size),
        (
            *strides[:2],
            *(s * m for s, m in zip(strides[2:], module.stride, strict=True)),
            *(s * m for s, m in zip(strides[2:], module.dilation, strict=True)),
        ),
    )
    t, kernel = space.numel(), torch.Size(module.kernel_size).numel()
    patches = patches.reshape(n, groups, channels // groups, t, kernel).transpose(2, 3)
    return Unfolded(
        patches.reshape(n, groups, t, -1), delta.reshape(n, groups, delta.shape[1] // groups, t).transpose(2, 3)
    )


#: One entry per kind of layer with an exact rule; every other parameter takes the random-sign probe.
RULES: dict[type[nn.Module], Callable[[nn.Module, Tensor, Tensor, int], Unfolded | None]] = {
    nn.Linear: unfold_linear,
    nn.Conv1d: unfold_conv,
    nn.Conv2d: unfold_conv,
    nn.Conv3d: unfold_conv,
}


def rule_for(module: nn.Module) -> Callable[[nn.Module, Tensor, Tensor, int], Unfolded | None] | None:
    """The rule that serves a module, subclasses included, or None."""
    for kind, rule in RULES.items():
        if isinstance(module, kind):
            return rule
    return None
