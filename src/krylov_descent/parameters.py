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


class ParameterVector:
    """The trainable parameters of all groups, in order, seen as one vector."""

    def __init__(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        self.params: list[Tensor] = []
        self._decay: list[float] = []  # c of each parameter
        for group in param_groups:
            trained = [p for p in group["params"] if p.requires_grad]
            self.params += trained
            self._decay += [float(group["weight_decay"])] * len(trained)
        check_uniform(self.params)
        self.sizes = [p.numel() for p in self.params]
        self.numel = sum(self.sizes)
        first = self.params[0]
        self.device = first.device
        # Half-precision parameters are searched in float32: 8 bits cannot hold an orthonormal basis.
        self.dtype = first.dtype if first.dtype in (torch.float32, torch.float64) else torch.float32

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors in the shapes of the parameters → one new vector [P]."""
        return torch.cat([t.detach().reshape(-1) for t in tensors]).to(self.dtype)

    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """As ``flatten``, but the vector itself where they are what ``unflatten`` made of one: do not write."""
        base = tensors[0]._base
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
        return [part.view_as(p).to(p.dtype) for part, p in zip(torch.split(x, self.sizes), self.params, strict=True)]

    def views(self, x: Tensor) -> list[Tensor]:
        """One vector [P] → writable views in the shapes of the parameters, in the vector's dtype."""
        return [part.view_as(p) for part, p in zip(torch.split(x, self.sizes), self.params, strict=True)]

    def read(self) -> Tensor:
        """A copy of θ."""
        return self.flatten(self.params)

    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        """θ ← x, in place."""
        torch._foreach_copy_(self.params, self.views(x))

    def rounded(self, x: Tensor) -> Tensor:
        """x as the parameters could hold it: itself, unless they are of half precision."""
        return x.to(self.params[0].dtype).to(self.dtype)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No graph from the parameters, yet grad mode stays on: the closure may differentiate inside."""
        for p in self.params:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in self.params:
                p.requires_grad_(True)

    def are_at(self, x: Tensor, d: Tensor) -> bool:
        """Whether θ = x + d, bit for bit."""
        parts = zip(self.params, self.views(x), self.views(d), strict=True)
        return all(torch.equal(p.detach(), (a + b).to(p.dtype)) for p, a, b in parts)

    @torch.no_grad()
    def decay_value(self) -> float:
        """½ Σ c ‖θ‖² at the current parameters."""
        return sum(
            0.5 * c * float(p.to(self.dtype).square().sum(dtype=torch.float64))
            for c, p in zip(self._decay, self.params, strict=True)
            if c
        )

    @property
    def decay(self) -> Sequence[float]:
        """c of each parameter."""
        return self._decay


class WeightedSum:
    """Σ_b w_b x_b over micro-batches, x_b in the shapes of the parameters, as one vector [P].

    It is kept in units of the first weight, so that the first term is a copy, and equal weights cost no product.
    """

    def __init__(self, parameters: ParameterVector, out: Tensor | None = None) -> None:
        self._parameters = parameters
        self._total = parameters.empty() if out is None else out
        self._unit = 0.0  # nothing added yet

    def add(self, tensors: Sequence[Tensor | None], weight: float) -> None:
        """Add weight · tensors, with None for zeros."""
        views = self._parameters.views(self._total)
        pairs = [(out, t.detach()) for out, t in zip(views, tensors, strict=True) if t is not None]
        outs, given = [out for out, _ in pairs], [t for _, t in pairs]
        if self._unit:
            if outs:
                torch._foreach_add_(outs, given, alpha=weight / self._unit)
            return
        self._unit = weight
        if outs:
            torch._foreach_copy_(outs, given)
        for out, t in zip(views, tensors, strict=True):
            if t is None:
                out.zero_()

    def add_decay(self, weight: float, x: Sequence[Tensor] | None = None) -> None:
        """Add weight · c∘x: the decay's gradient (x = θ, the default) or its product (x = v)."""
        if weight == 0 or not any(self._parameters.decay):
            return
        if not self._unit:
            self._unit = weight
            self._total.zero_()
        views = self._parameters.views(self._total)
        for c, out, part in zip(
            self._parameters.decay, views, self._parameters.params if x is None else x, strict=True
        ):
            if c:
                out.add_(part.detach(), alpha=c * weight / self._unit)

    def times(self, scale: float) -> Tensor:
        """The sum times ``scale``; ends the use of this object."""
        if not self._unit:
            return self._total.zero_()
        return self._total if self._unit * scale == 1 else self._total.mul_(self._unit * scale)


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
    dtype = params[0].dtype
    if not dtype.is_floating_point:
        raise ValueError(
            f"KSD trains real floating-point parameters; found {dtype}. "
            "Hold a complex parameter as a real one of shape [..., 2] (torch.view_as_complex in the model)."
        )
