"""Parameters as one flat vector θ [P]: the only file that flattens and unflattens.

Weight decay lives here too, since it is the one part of the objective that is a function of θ alone:
½·c·‖θ‖² with a coefficient c per parameter group, in value, gradient and product alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from krylov_descent.distributed.sharded import holds_first, local_part, placed_as, whole


class ParameterVector:
    """The trainable parameters of all groups, in order, seen as one vector."""

    def __init__(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        self.params: list[Tensor] = []
        self.places: list[int] = []  # of these among all parameters, frozen ones included
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
        """Tensors in the shapes of the parameters → one new vector [P]."""
        parts = [local_part(t.detach(), p) for t, p in zip(tensors, self.params, strict=True)]
        return torch.cat([t.reshape(-1) for t in parts]).to(self.dtype)

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """As ``flatten``, but the vector itself where they are what ``unflatten`` made of one: do not write."""
        base = tensors[0]._base  # of DTensors, none
        if base is None or base.shape != (self.numel,) or base.dtype != self.dtype:
            return self.flatten(tensors)
        parts = zip(tensors, self.views(base), strict=True)
        if all(
            t._base is base and t.data_ptr() == part.data_ptr() and t.stride() == part.stride() for t, part in parts
        ):
            return base
        return self.flatten(tensors)

    def empty(self) -> Tensor:
        """A vector [P] of anything."""
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def zeros(self) -> Tensor:
        """A vector [P] of zeros."""
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)

    def unflatten(self, x: Tensor) -> list[Tensor]:
        """One vector [P] → views in the shapes of the parameters, in the parameters' dtype."""
        return [placed_as(part.to(p.dtype), p) for part, p in zip(self.views(x), self.params, strict=True)]

    def views(self, x: Tensor) -> list[Tensor]:
        """One vector [P] → writable views in the shapes of the parameters, in the vector's dtype."""
        return [part.view_as(p) for part, p in zip(torch.split(x, self.sizes), self.local, strict=True)]

    def first_unit(self) -> Tensor:
        """e₁ [P]."""
        e = self.zeros()
        if holds_first(self.params[0]):
            e[0] = 1.0
        return e

    def read(self) -> Tensor:
        """A copy of θ."""
        return self.flatten(self.params)

    @torch.no_grad()
    def write(self, x: Tensor, direction: Tensor | None = None, alpha: float = 1.0) -> None:
        """θ ← x, or x + alpha·direction, in place."""
        if direction is None:
            torch._foreach_copy_(self.local, self.views(x))
            return
        for p, part, along in zip(self.local, self.views(x), self.views(direction), strict=True):
            if p.dtype == part.dtype:
                torch.add(part, along, alpha=alpha, out=p)
            else:
                p.copy_(part.add(along, alpha=alpha))

    def rounded(self, x: Tensor) -> Tensor:
        """x as the parameters could hold it: itself, unless they are of half precision."""
        return x.to(self.params[0].dtype).to(self.dtype)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No graph from the parameters, yet grad mode stays on: the closure may differentiate inside."""
        try:
            for p in self.params:
                p.requires_grad_(False)
            yield
        finally:
            for p in self.params:
                p.requires_grad_(True)

    @contextmanager
    def without_grads(self) -> Iterator[None]:
        """Inside, ``.grad`` is None, so that a closure that calls backward adds to nothing that was there."""
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
        """½ Σ c ‖θ‖² at the current parameters: in their dtype along rows, which is faster, then in float64."""
        return sum(
            0.5 * c * float(whole(p.to(self.dtype).square().sum(-1).sum(dtype=torch.float64)))
            for c, p in zip(self._decay, self.params, strict=True)
            if c
        )

    @torch.no_grad()
    def add_decay(self, out: Tensor, start: int, x: Tensor | None = None) -> None:
        """out += c∘x for the part of the vector that begins at ``start``: the decay's gradient (x = θ) or product."""
        position = -start
        for c, p in zip(self._decay, self.local, strict=True):
            i, j = max(0, position), min(len(out), position + p.numel())
            if c and i < j:
                part = p.reshape(-1)[i - position : j - position] if x is None else x[i:j]
                out[i:j].add_(part, alpha=c)
            position += p.numel()

    @torch.no_grad()
    def decay_slope(self, direction: Tensor) -> float:
        """The decay's derivative Σ c θ·d along a direction [P]."""
        return sum(
            c * float(whole((p.to(self.dtype) * d).sum(dtype=torch.float64)))
            for c, p, d in zip(self._decay, self.params, self.unflatten(direction), strict=True)
            if c
        )

    @property
    def decay(self) -> Sequence[float]:
        """c of each parameter."""
        return self._decay


def check_uniform(params: Sequence[Tensor]) -> None:
    """One real floating dtype and one device, or a ValueError."""
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
