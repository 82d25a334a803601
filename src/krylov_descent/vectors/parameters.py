"""Parameters as one flat vector θ [P]; only this file flattens and unflattens.

It also has the weight decay, the one part of the objective that is a function of θ alone: ½·c·‖θ‖² with a coefficient
c per parameter group, in value, gradient and product alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from krylov_descent.distributed.sharded import holds_first, is_sharded, local_part, placed_as, whole
from krylov_descent.vectors.devices import summed
from krylov_descent.vectors.products import numbers_of


class ParameterVector:
    """The trainable parameters of all groups, in order, seen as one vector."""

    def __init__(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        self.params: list[Tensor] = []
        self.places: list[int] = []  # their positions among all parameters, frozen ones included
        self._decay: list[float] = []  # c of each parameter
        passed = 0
        for group in param_groups:
            trained = [p for p in group["params"] if p.requires_grad]
            self.places += [passed + i for i, p in enumerate(group["params"]) if p.requires_grad]
            passed += len(group["params"])
            self.params += trained
            self._decay += [float(group["weight_decay"])] * len(trained)
        check_uniform(self.params)
        self.local = [local_part(p, p) for p in self.params]  # the parameters themselves, or aliases of their parts
        self.sizes = [p.numel() for p in self.local]
        self.numel = sum(self.sizes)
        self.count = sum(p.numel() for p in self.params)  # over all ranks
        first = self.params[0]
        self.device = first.device
        # Half-precision parameters are searched in float32: 8 bits cannot hold an orthonormal basis.
        self.dtype = first.dtype if first.dtype in (torch.float32, torch.float64) else torch.float32
        if (most := max(self._decay)) > torch.finfo(self.dtype).max:
            raise ValueError(
                f"weight_decay={most!r} is beyond the range of {self.dtype}, in which the parameters are searched. It "
                "is c of ½·c·‖θ‖²: pass a smaller one, 1e-4 for example."
            )

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a new vector [P] of tensors in the shapes of the parameters."""
        parts = [local_part(t.detach(), p) for t, p in zip(tensors, self.params, strict=True)]
        return torch.cat([t.reshape(-1) for t in parts]).to(self.dtype)

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return ``flatten(tensors)``, or without a copy the vector that they are views of: read-only."""
        base = tensors[0]._base  # None for DTensors
        if base is None or base.shape != (self.numel,) or base.dtype != self.dtype:
            return self.flatten(tensors)
        parts = zip(tensors, self.views(base), strict=True)
        if all(
            t._base is base and t.data_ptr() == part.data_ptr() and t.stride() == part.stride() for t, part in parts
        ):
            return base
        return self.flatten(tensors)

    def empty(self) -> Tensor:
        """Return an uninitialised vector [P]."""
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def zeros(self) -> Tensor:
        """Return a vector [P] of zeros."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)

    def unflatten(self, x: Tensor) -> list[Tensor]:
        """Return views of a vector [P] in the shapes of the parameters, in the parameters' dtype."""
        return [placed_as(part.to(p.dtype), p) for part, p in zip(self.views(x), self.params, strict=True)]

    def views(self, x: Tensor) -> list[Tensor]:
        """Return writable views of a vector [P] in the shapes of the parameters, in the vector's dtype."""
        return [part.view_as(p) for part, p in zip(torch.split(x, self.sizes), self.local, strict=True)]

    def first_unit(self) -> Tensor:
        """Return e₁ [P]."""
        e = self.zeros()
        if holds_first(self.params[0]):
            e[0] = 1.0
        return e

    def read(self) -> Tensor:
        """Return a copy of θ."""
        return self.flatten(self.params)

    @torch.no_grad()
    def write(self, x: Tensor, direction: Tensor | None = None, alpha: float = 1.0) -> None:
        """Set θ to x, or to x + alpha·direction, in place."""
        if direction is not None and self.params[0].dtype != self.dtype:  # rounded once
            x, direction = x.add(direction, alpha=alpha), None
        torch._foreach_copy_(self.local, self.views(x))
        if direction is not None:
            torch._foreach_add_(self.local, self.views(direction), alpha=alpha)

    def rounded(self, x: Tensor) -> Tensor:
        """Return x rounded to the parameters' dtype: x itself, unless they are of half precision."""
        return x.to(self.params[0].dtype).to(self.dtype)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Exclude the parameters from graphs; grad mode stays on, so that the closure may differentiate inside."""
        try:
            for p in self.params:
                p.requires_grad_(False)
            yield
        finally:
            for p in self.params:
                p.requires_grad_(True)

    @contextmanager
    def without_grads(self) -> Iterator[None]:
        """Set ``.grad`` to None inside, so that a closure that calls backward does not add to the user's gradients."""
        kept = [p.grad for p in self.params]
        try:
            for p in self.params:
                p.grad = None
            yield
        finally:
            for p, grad in zip(self.params, kept, strict=True):
                p.grad = grad

    @torch.no_grad()
    def decay_value(self) -> float:
        """Return ½ Σ c ‖θ‖²; the last dimension is summed in the vectors' dtype, for speed, the others in float64."""
        decayed = [(c, p) for c, p in zip(self._decay, self.params, strict=True) if c]
        squares = [whole(summed(p.to(self.dtype).square().sum(-1))) for _, p in decayed]
        return sum(0.5 * c * square for (c, _), square in zip(decayed, numbers_of(squares), strict=True))

    @torch.no_grad()
    def add_decay(self, out: Tensor, start: int, x: Tensor | None = None) -> None:
        """Add c∘x to ``out``, a part of the vector from ``start`` on: the decay's gradient (x = θ) or product."""
        position = -start
        for c, p in zip(self._decay, self.local, strict=True):
            i, j = max(0, position), min(len(out), position + p.numel())
            if c and i < j:
                part = p.reshape(-1)[i - position : j - position] if x is None else x[i:j]
                out[i:j].add_(part, alpha=c)
            position += p.numel()

    @torch.no_grad()
    def decay_slope(self, direction: Tensor) -> float:
        """Return the decay's derivative Σ c θ·d along a direction d [P]."""
        moved = [(c, p, d) for c, p, d in zip(self._decay, self.params, self.unflatten(direction), strict=True) if c]
        products = [whole(summed(p.to(self.dtype) * d)) for _, p, d in moved]
        return sum(c * product for (c, *_), product in zip(moved, numbers_of(products), strict=True))

    @property
    def decay(self) -> Sequence[float]:
        """c of each parameter."""
        return self._decay


def _refuse_shared(params: Sequence[Tensor]) -> None:
    """Refuse entries that share memory, in one parameter or in two, as far as strides tell."""
    places = []
    for p in params:
        if p.layout != torch.strided or not p.numel():
            continue
        if p.numel() > 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True)):
            raise ValueError(
                f"A parameter of shape {tuple(p.shape)} has entries that share memory (strides {p.stride()}), as after "
                "expand(): they cannot be set one by one. Make it nn.Parameter(x.clone()), or expand it in forward."
            )
        if p.is_contiguous() and not is_sharded(p) and not p.is_meta:
            places.append((p.data_ptr(), p.data_ptr() + p.nbytes, tuple(p.shape)))
    places.sort()
    for (_, end, one), (begin, _, other) in itertools.pairwise(places):
        if 0 < begin < end:
            raise ValueError(
                f"Two parameters of shapes {one} and {other} share memory: they cannot be set one by one. To tie "
                "weights, use one parameter in both layers (b.weight = a.weight); otherwise clone() one of them."
            )


def check_uniform(params: Sequence[Tensor]) -> None:
    """Raise ValueError unless the parameters share one real floating-point dtype and one device."""
    if not params:
        raise ValueError(
            "KSD has no parameter to train: every parameter given has requires_grad=False. "
            "Set requires_grad=True on those to be trained."
        )
    for what, found in (
        ("dtypes", {str(p.dtype) for p in params}),
        ("devices", {str(p.device) for p in params}),
    ):
        if len(found) > 1:
            raise ValueError(
                f"KSD needs all trainable parameters to share one of the {what}; found {sorted(found)}. "
                "Convert the model (model.to(...)) or freeze the odd ones (requires_grad_(False))."
            )
    _refuse_shared(params)
    if any(p.is_inference() for p in params):
        raise ValueError(
            "KSD was given parameters that were made inside torch.inference_mode(): nothing can differentiate by them. "
            "Build the model outside of it, or load its state_dict() into one that was."
        )
    dtype = params[0].dtype
    if not dtype.is_floating_point:
        raise ValueError(
            f"KSD trains real floating-point parameters; found {dtype}. "
            "Hold a complex parameter as a real one of shape [..., 2] (torch.view_as_complex in the model)."
        )
