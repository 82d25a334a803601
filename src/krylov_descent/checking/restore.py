"""Leaves everything as it was: parameters, their .grad, buffers, and random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent.objective.consistency import same_bits


class Buffers:
    """The buffers of a model as they were."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = [] if model is None else list(model.modules())
        self._kept = [
            (module, key, buffer, buffer.detach().clone())
            for module in modules
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> None:
        """Put back what moved; graphs that hold a buffer are not told, as they would refuse to be used."""
        for module, key, buffer, before in self._kept:
            module._buffers[key] = buffer
            if not same_bits(buffer, before):
                buffer.data.copy_(before)


@contextmanager
def as_found(model: nn.Module | None, params: Sequence[Tensor]) -> Iterator[Buffers]:
    """Whatever happens inside, afterwards all is as before; gives the buffers as they were."""
    buffers = Buffers(model)
    values = [(p, p.data, p.detach().clone(), p.requires_grad) for p in params]
    gradients = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in params]
    restore_generators = _generators()
    try:
        yield buffers
    finally:
        buffers.restore()
        for p, data, before, requires_grad in values:
            p.data = data
            if not torch.equal(data, before):
                data.copy_(before)
            p.requires_grad_(requires_grad)
        for p, gradient, copy in gradients:
            p.grad = gradient
            if gradient is not None and copy is not None and not torch.equal(gradient, copy):
                gradient.detach().copy_(copy)
        restore_generators()


def _generators() -> Callable[[], None]:
    """What puts back the generators of torch, Python and, if it is there, numpy."""
    cpu, python = torch.get_rng_state(), random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    numpy: Any = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()

    def restore() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if numpy is not None:
            numpy.random.set_state(of_numpy)

    return restore
