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
        self._segments: list[tuple[int, int, float]] = []  # [start, stop) and its c, neighbours merged
        offset = 0
        for group in param_groups:
            start = offset
            for p in group["params"]:
                if p.requires_grad:
                    self.params.append(p)
                    offset += p.numel()
            if offset > start and group["weight_decay"] != 0:
                self._segments.append((start, offset, float(group["weight_decay"])))
        check_uniform(self.params)
        self.sizes = [p.numel() for p in self.params]
        self.numel = offset
        first = self.params[0]
        self.device = first.device
        # Half-precision parameters are searched in float32: 8 bits cannot hold an orthonormal basis.
        self.dtype = first.dtype if first.dtype in (torch.float32, torch.float64) else torch.float32

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors in the shapes of the parameters → one new vector [P]."""
        return torch.cat([t.detach().reshape(-1) for t in tensors]).to(self.dtype)

    def accumulate(self, total: Tensor, tensors: Sequence[Tensor | None], alpha: float) -> None:
        """total [P] += alpha · tensors in the shapes of the parameters; None counts as zeros."""
        pairs = [(out, t) for out, t in zip(self.views(total), tensors, strict=True) if t is not None]
        if pairs:
            torch._foreach_add_([out for out, _ in pairs], [t.detach() for _, t in pairs], alpha=alpha)

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

    @torch.no_grad()
    def decay_value(self) -> float:
        """½ Σ c ‖θ‖² at the current parameters."""
        if not self._segments:
            return 0.0
        theta = self.read()
        return sum(0.5 * c * float(theta[i:j].square().sum(dtype=torch.float64)) for i, j, c in self._segments)

    def add_decay(self, out: Tensor, x: Tensor) -> None:
        """out += c∘x: the decay's gradient (x = θ) and its product (x = v), both [P]."""
        for i, j, c in self._segments:
            out[i:j].add_(x[i:j], alpha=c)

    @property
    def decays(self) -> bool:
        """Whether any group has a weight decay."""
        return bool(self._segments)


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
