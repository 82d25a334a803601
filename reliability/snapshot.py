"""Everything that a failed step must leave as it was, to compare bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def same(x: Any, y: Any) -> bool:
    """Whether two nested values have the same bits: NaN equals NaN, and −0 does not equal 0."""
    if isinstance(x, Tensor):
        return (
            isinstance(y, Tensor)
            and (x.shape, x.dtype) == (y.shape, y.dtype)
            and torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
        )
    if isinstance(x, Mapping):
        return isinstance(y, Mapping) and list(x) == list(y) and all(same(x[key], y[key]) for key in x)
    if isinstance(x, (list, tuple)):
        return type(x) is type(y) and len(x) == len(y) and all(map(same, x, y))
    return bool(x == y or (x != x and y != y))


def _copied(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, Mapping):
        return {key: _copied(value) for key, value in x.items()}
    return type(x)(map(_copied, x)) if isinstance(x, (list, tuple)) else x


class Snapshot:
    """A model, an optimizer and the global generator as they are now."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._then = _copied(self._now())

    def _now(self) -> dict[str, Any]:
        named = list(self._model.named_parameters())
        return {
            "parameters": [p for _, p in named],
            "buffers": list(self._model.buffers()),
            "requires_grad": [p.requires_grad for _, p in named],
            "grad": [p.grad for _, p in named],
            "training": [m.training for m in self._model.modules()],
            "optimizer state": self._optimizer.state_dict(),
            "random state": torch.get_rng_state(),
        }

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters as they were."""
        return self._then["parameters"]  # type: ignore[no-any-return]

    def changed(self) -> list[str]:
        """What has other bits now."""
        now = self._now()
        return [what for what, then in self._then.items() if not same(then, now[what])]
