"""Convolutions whose backward pass is differentiated, with respect to its input alone, by two convolutions.

PyTorch's own derivative of a convolution's backward pass also computes the derivatives in the layer's input and weight.
v → Jv does not need them; they take half of the time of a Gauss–Newton product of a convolutional network.

Letters: a input, W weight, b bias, y = W ∗ a + b; u = ∂/∂y. The backward pass u → (Wᵀ∗u, a⋆u, Σu) is linear in u, and
its transpose is (r_a, r_W, r_b) → W ∗ r_a + r_W ∗ a + r_b.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_DIMENSIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}


class _Geometry(NamedTuple):
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def convolve(self, a: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        stride, padding, dilation, groups = self
        return torch.ops.aten.convolution(a, W, b, stride, padding, dilation, False, [0] * len(stride), groups)  # type: ignore[no-any-return]

    def transpose(self, u: Tensor, a: Tensor, W: Tensor, mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
        stride, padding, dilation, groups = self
        sizes = [W.shape[0]] if mask[2] else None
        return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
            u, a, W, sizes, stride, padding, dilation, False, [0] * len(stride), groups, list(mask)
        )


class _Backward(torch.autograd.Function):
    """u → (Wᵀ∗u, a⋆u, Σu), differentiable with respect to u alone."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, a: Tensor, W: Tensor, geometry: _Geometry, mask: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(a, W)
        ctx.geometry, ctx.shape = geometry, u.shape
        ctx.set_materialize_grads(False)
        return geometry.transpose(u, a, W, mask)

    @staticmethod
    def backward(ctx: Any, r_a: Tensor | None, r_W: Tensor | None, r_b: Tensor | None) -> Any:
        a, W = ctx.saved_tensors
        r: Tensor | None = None
        if r_W is not None:
            r, r_b = ctx.geometry.convolve(a, r_W, r_b), None
        if r_a is not None:
            through, r_b = ctx.geometry.convolve(r_a, W, r_b), None
            r = through if r is None else r.add_(through)
        if r_b is not None:  # neither the weight nor the input has a gradient
            r = r_b.reshape(1, -1, *[1] * (len(ctx.shape) - 2)).expand(ctx.shape)
        return r, None, None, None, None


class _Convolution(torch.autograd.Function):
    """a, W, b → y."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, W: Tensor, b: Tensor | None, geometry: _Geometry, watch: LeanConvolutions
    ) -> Tensor:
        ctx.save_for_backward(a, W)
        ctx.geometry, ctx.watch = geometry, watch
        return geometry.convolve(a, W, b)

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> Any:
        ctx.watch.differentiated |= ctx.watch.inside
        a, W = ctx.saved_tensors
        return *_Backward.apply(u, a.detach(), W.detach(), ctx.geometry, ctx.needs_input_grad[:3]), None, None  # type: ignore[no-untyped-call]


class LeanConvolutions(TorchFunctionMode):
    """A mode in which a convolution's backward pass is differentiable only with respect to its input.

    Attributes:
        differentiated: whether such a backward pass was taken inside the mode: full derivatives are then needed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside = self.differentiated = False

    def __enter__(self) -> LeanConvolutions:
        self.inside = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self.inside = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace plain convolutions."""
        kwargs = kwargs or {}
        if func in _DIMENSIONS:
            plain = _plain(_DIMENSIONS[func], *args, **kwargs)
            if plain is not None:
                return _Convolution.apply(*plain, self)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


def _plain(
    dims: int,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, _Geometry] | None:
    """Return the arguments of a batched convolution with gradients, or None for any other."""
    if isinstance(padding, str) or input.ndim != dims + 2 or not weight.requires_grad:
        return None
    if (bias is not None and not bias.requires_grad) or torch.is_autocast_enabled(input.device.type):
        return None
    each = [list(x) if isinstance(x, Sequence) else [x] * dims for x in (stride, padding, dilation)]
    full = [x * dims if len(x) == 1 else x for x in each]
    return input, weight, bias, _Geometry(full[0], full[1], full[2], groups)
