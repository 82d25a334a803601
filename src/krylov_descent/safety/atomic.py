"""Atomic steps: a step is either taken completely or undone completely, even after an error.

Every rank holds θ whole, so that it can be restored without the other ranks, which may be gone.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from krylov_descent.distributed import Comm
from krylov_descent.safety.footprint import Footprint
from krylov_descent.vectors.parameters import ParameterVector


def current_point(parameters: ParameterVector, x: Tensor | None, d: Tensor | None, comm: Comm) -> Callable[[], Tensor]:
    """Return a function that gives the current θ [P]; recomputed as x + d where that is exact, to save a copy."""
    theta = parameters.read()
    if comm.ranks > 1 or x is None or d is None:
        return lambda: theta

    def remembered() -> Tensor:
        return comm.all_gather(parameters.rounded(x + d), parameters.numel)

    return remembered if torch.equal(theta, remembered()) else lambda: theta


class RestoreOnError:
    """Context of a step: on an error, parameters, state, ``.grad``, flags and all of the footprint are restored.

    It is no generator: one that KeyboardInterrupt cuts off would restore when it is collected, at any time.

    Args:
        parameters: the parameters that the step moves.
        theta: a function that returns their current values.
        state: the optimizer's state; steps replace its tensors and never write to them.
        footprint: what the closure touches beside them, noted by the objective.
    """

    def __init__(
        self,
        parameters: ParameterVector,
        theta: Callable[[], Tensor],
        state: MutableMapping[Tensor, Any],
        footprint: Footprint,
    ) -> None:
        self._parameters, self._theta, self._state, self._footprint = parameters, theta, state, footprint
        self._entries = {p: dict(entry) for p, entry in state.items()}
        self._grads = [p.grad for p in parameters.params]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            return
        again: KeyboardInterrupt | None = None
        while True:
            try:
                self._restore()
                break
            except KeyboardInterrupt as second:  # a second Ctrl-C
                again = second
        if again is not None:
            raise again
        if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
            raise error.__cause__ from None  # from the closure, converted by a generator on its way (PEP 479)

    def _restore(self) -> None:
        self._parameters.write(self._theta())
        for p, grad in zip(self._parameters.params, self._grads, strict=True):
            p.requires_grad_(True)
            if p.grad is not grad:
                p.grad = grad
        for p in [p for p in self._state if p not in self._entries]:
            del self._state[p]
        for p, entry in self._entries.items():
            self._state[p].clear()
            self._state[p].update(entry)
        self._footprint.restore()
