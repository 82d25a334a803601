"""float64 for sums and small matrices, also of devices that have none, such as Apple's GPUs."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """Return x in float64; on the CPU if its device has no float64.

    Example:
        >>> wide(torch.ones(1))
        tensor([1.], dtype=torch.float64)
    """
    try:
        return x.double()
    except TypeError:
        return x.cpu().double()


def summed(x: Tensor) -> Tensor:
    """Return the sum of all entries, added in float64."""
    try:
        return x.sum(dtype=torch.float64)
    except TypeError:
        return x.cpu().sum(dtype=torch.float64)
