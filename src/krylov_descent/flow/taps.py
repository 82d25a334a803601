"""Taps: what a backward pass leaves at each use of a weight, of which Jacobian rows are made.

Letters: a use of a weight W [out, in] is y = aWᵀ + b, or y = δW in the derivative of one. At each use a backward pass
leaves δ [R, out] and a [R, in] with ∂/∂W = Σᵣ δᵣaᵣᵀ; R counts samples, points and positions. The a of a convolution are
its patches, and its W is flattened.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from krylov_descent.distributed.sharded import is_sharded
from krylov_descent.layers.calls import convolution_call, linear_call
from krylov_descent.layers.rules import Convolution

_T = torch.Tensor
_MATMUL = {torch.matmul, _T.matmul, _T.__matmul__, torch.mm, _T.mm}
_LAYERS: dict[Any, Any] = {F.linear: linear_call, **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), convolution_call)}
_INSIDE = tuple(os.path.join(os.path.dirname(file), "") for file in (torch.__file__, os.path.dirname(__file__)))


@dataclass(frozen=True)
class Use:
    """One use of a weight and a bias, by their numbers; ``turned`` if it is y = δW."""

    weight: int | None
    bias: int | None
    turned: bool


@dataclass(frozen=True, eq=False)
class Left:
    """What a backward pass left at a use: the gradient that came in, and δ and a."""

    incoming: Tensor
    delta: Tensor
    a: Tensor


class Taps:
    """A context in which products with weights are tapped: F.linear, F.conv1d, 2d, 3d, and x @ W with a parameter W.

    Not tapped are sharded weights, convolutions in groups, and calls inside compiled and scripted code.

    Attributes:
        uses: the uses, in the order of the calls; a deterministic closure has the same ones at each call.
        weights: the tapped weights and biases: the parameters, then weights computed from parameters.
        eps: ε of the coarsest dtype of a use, which an autocast makes coarser than that of the parameters.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.weights = list(params)
        self.uses: list[Use] = []
        self.eps = 0.0
        self._index = {id(p): i for i, p in enumerate(params)}
        self._beside: dict[int, set[str]] = {}  # by the id of a parameter, where it is used beside the taps
        self._probe = torch.zeros((), dtype=params[0].dtype, device=params[0].device, requires_grad=True)
        self._left: list[tuple[int, Tensor, Tensor]] | None = None
        self._of_weights = True  # whether backward passes compute gradients of weights
        self._mode = _Mode(self)

    def __enter__(self) -> Taps:
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call]

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function of torch, tapped if it is a product with a weight."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func in _LAYERS:
            x, W, b, how = _LAYERS[func](*args, **kwargs)
            if self._tapped(x, W, b, how):
                use = Use(self._number(W), self._number(b), False)
                if how is None:
                    return self.product(x, W, b, use)
                if (a := _patches(x, how)).numel():  # else torch says that the kernel is too large
                    return self.product(a, W, b, use).movedim(-1, 1 - W.ndim).contiguous()
        elif func in _MATMUL and not kwargs and id(args[1]) in self._index and self._tapped(*args):
            return self.product(args[0], args[1], None, Use(self._number(args[1]), None, True))
        elif func is torch.autograd.grad:  # derivatives by points need none by weights
            inputs = args[1] if len(args) > 1 else kwargs["inputs"]
            by = (inputs,) if isinstance(inputs, Tensor) else inputs
            with self._computing(any(id(x) in self._index for x in by)):
                return func(*args, **kwargs)
        y = func(*args, **kwargs)
        self._note(func, (*args, *kwargs.values()), y)
        return y

    def _note(self, func: Callable[..., Any], given: Sequence[Any], y: Any) -> None:
        """Note the line of an operation on parameters that is not tapped."""
        flat = [x for part in given for x in (part if isinstance(part, (list, tuple)) else (part,))]
        used = [id(x) for x in flat if id(x) in self._index]
        if used and getattr(y[0] if isinstance(y, (list, tuple)) and y else y, "grad_fn", None) is not None:
            name = getattr(func, "__name__", "a function")
            name = func.__self__.__name__ if name == "__get__" else name  # type: ignore[attr-defined]
            for i in used:
                self._beside.setdefault(i, set()).add(name.strip("_") + _line())

    def _tapped(self, x: Tensor, W: Tensor, b: Tensor | None = None, how: Convolution | None = None) -> bool:
        if is_sharded(W) or is_sharded(x) or is_sharded(b):
            return False
        if how is None and W.ndim != 2:
            return False
        if how is not None and (x.ndim not in (W.ndim - 1, W.ndim) or x.shape[1 - W.ndim] != W.shape[1]):
            return False  # groups, or a mistake
        trained = W.requires_grad or (b is not None and id(b) in self._index)
        return trained and not torch._C._functorch.is_functorch_wrapped_tensor(W)

    def product(self, x: Tensor, W: Tensor, b: Tensor | None, use: Use) -> Tensor:
        """Return xWᵀ + b, or xW in a turned use; tapped if it gets a graph."""
        if not torch.is_grad_enabled():
            return _product(x, W, b, use.turned, _dtype(x))
        self.uses.append(use)
        return _Product.apply(x, W, b, self._probe, self, len(self.uses) - 1, _dtype(x))  # type: ignore[no-any-return, no-untyped-call]

    def _number(self, W: Tensor | None) -> int | None:
        """Return the number of a weight or bias, given now if it is computed from parameters."""
        if W is not None and W.requires_grad and id(W) not in self._index:
            self._index[id(W)] = len(self.weights)
            self.weights.append(W)
        return self._index.get(id(W))

    @contextmanager
    def _computing(self, of_weights: bool) -> Any:
        before, self._of_weights = self._of_weights, of_weights
        try:
            yield
        finally:
            self._of_weights = before

    def record(self, z: Tensor, cotangent: Tensor) -> dict[int, Left]:
        """Return what a backward pass from z leaves, by the number of the use."""
        self._left = []
        try:
            if z.requires_grad:
                torch.autograd.grad(z, self._probe, cotangent, retain_graph=True, allow_unused=True)
            found = self._left
        finally:
            self._left = None
        left = {}
        for number, incoming, saved in found:
            d, x = (y.detach().reshape(-1, y.shape[-1]) for y in (incoming, saved))
            left[number] = Left(d, x, d) if self.uses[number].turned else Left(d, d, x)
        return left

    def elsewhere(self, z: Tensor) -> set[str]:
        """Return the operations behind z that use parameters beside the taps, such as "lstm (model.py:31)"."""
        found, seen, stack = set[str](), set(), [z.grad_fn]
        while stack:
            node = stack.pop()
            name = type(node).__name__.rstrip("0123456789").removesuffix("Backward").strip("_")
            edges = () if node is None else node.next_functions
            for after, _ in edges[:1] if name.startswith("Product") else edges:  # of a tapped use, its input
                leaf = getattr(after, "variable", None)
                if leaf is not None and id(leaf) in self._index:
                    found |= self._beside.get(id(leaf), {name})
                if after not in seen:
                    seen.add(after)
                    stack.append(after)
        return found


def _line() -> str:
    """Return the innermost line outside of torch and this package, as " (model.py:31)"; "" if there is none."""
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


def _dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _Mode(TorchFunctionMode):
    """Calls functions through the taps, which must not be a mode themselves to be passed to a Function."""

    def __init__(self, taps: Taps) -> None:
        super().__init__()
        self._taps = taps

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return self._taps.call(func, args, kwargs or {})


def _patches(x: Tensor, how: Convolution) -> Tensor:
    """Return the patches [n, *space, in] of a convolution's input, of slices, which all transforms know."""
    x = F.pad(x, list(how.pad)) if any(how.pad) else x
    dims = len(how.stride)
    sizes = zip(x.shape[-dims:], how.kernel[1:], how.stride, how.dilation, strict=True)
    slices: list[Any] = [[slice(i * d, max(0, n - (k - 1 - i) * d), s) for i in range(k)] for n, k, s, d in sizes]
    return torch.stack([x[(..., *at)] for at in itertools.product(*slices)], -1).movedim(-dims - 2, -2).flatten(-2)


def _product(x: Tensor, W: Tensor, b: Tensor | None, turned: bool, dtype: torch.dtype) -> Tensor:
    W = W.flatten(1).to(dtype)
    return F.linear(x.to(dtype), W.T if turned else W, None if b is None else b.to(dtype))


class _Product(torch.autograd.Function):
    """y = xWᵀ + b, or y = xW in a turned use."""

    @staticmethod
    def forward(
        x: Tensor, W: Tensor, b: Tensor | None, probe: Tensor, taps: Taps, use: int, dtype: torch.dtype
    ) -> Tensor:
        return _product(x, W, b, taps.uses[use].turned, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, W, b, probe, ctx.taps, ctx.use, ctx.dtype = inputs
        ctx.save_for_backward(x, W, probe)
        ctx.save_for_forward(x, W)
        ctx.set_materialize_grads(False)
        ctx.bias = None if b is None else b.dtype
        ctx.taps.eps = max(ctx.taps.eps, torch.finfo(ctx.dtype).eps)

    @staticmethod
    def backward(ctx: Any, d: Tensor | None) -> Any:
        if d is None:
            return (None,) * 7
        (x, W, _), taps = ctx.saved_tensors, ctx.taps
        use, dx, dW, db = taps.uses[ctx.use], None, None, None
        if ctx.needs_input_grad[0]:
            dx = taps.product(d, W, None, Use(use.weight, None, not use.turned)).to(x.dtype)
        if taps._left is not None:
            taps._left.append((ctx.use, d, x))
        elif taps._of_weights:
            delta, a = d.reshape(-1, d.shape[-1]), x.reshape(-1, x.shape[-1]).to(d.dtype)
            if ctx.needs_input_grad[1]:
                dW = (a.T @ delta if use.turned else delta.T @ a).to(W.dtype).view_as(W)
            if ctx.needs_input_grad[2]:
                db = delta.sum(0).to(ctx.bias)
        return dx, dW, db, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *given: Any) -> tuple[Tensor, int]:
        return _Product.apply(_front(x, in_dims), *given), 0  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dW: Tensor | None, db: Tensor | None, *of_others: Any) -> Tensor:
        (x, W), use = ctx.saved_tensors, ctx.taps.uses[ctx.use]
        terms: list[Tensor] = [] if dx is None else [ctx.taps.product(dx, W, None, Use(use.weight, None, use.turned))]
        if dW is not None:
            terms.append(_product(x, dW, None, use.turned, ctx.dtype))
        if db is not None:
            terms.append(db.to(ctx.dtype))
        return sum(terms[1:], terms[0])


def _front(x: Tensor, in_dims: Sequence[Any]) -> Tensor:
    """Return x with the dimension of a vmap first; only x may have one."""
    if any(dim is not None for dim in in_dims[1:]):
        raise NotImplementedError("a tapped weight inside of a vmap over weights")
    return x.movedim(in_dims[0], 0)
