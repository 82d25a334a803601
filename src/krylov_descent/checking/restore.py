"""Restoring parameters, their .grad, buffers, and random number generators after a check."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent.safety.footprint import Footprint, generators


@contextmanager
def as_found(model: nn.Module | None, params: Sequence[Tensor]) -> Iterator[Footprint]:
    """A context that restores everything at its end; yields the copies of the model's buffers."""
    buffers = Footprint()
    if model is not None:
        buffers.note(model)
    tensors = [x for p in params for x in (p, p.grad) if x is not None]
    values = [(x, x.data, x.detach().clone()) for x in tensors]
    flags = [(p, p.requires_grad, p.grad) for p in params]
    restore_generators = _generators({p.device for p in params})
    try:
        yield buffers
    finally:
        buffers.restore_buffers()
        for x, data, before in values:
            x.data = data
            if not (data.is_meta or torch.equal(data, before)):
                data.copy_(before)
        for p, requires_grad, gradient in flags:
            p.requires_grad_(requires_grad)
            p.grad = gradient
        restore_generators()


def _generators(devices: Iterable[torch.device]) -> Callable[[], None]:
    """Return a function that restores the generators of torch, Python and, if imported, numpy."""
    of_torch, python = generators(devices), random.getstate()
    numpy: Any = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()

    def restore() -> None:
        of_torch()
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)

    return restore
