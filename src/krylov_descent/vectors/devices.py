"""What devices differ in: copies to them that need no wait, and float64, which Apple's GPUs lack."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return x of the CPU on a device, without a wait where x may be freed before the copy is made.

    Apple's GPUs read x at the time of the copy (pytorch#189690): there it waits.

    Example:
        >>> sent(torch.arange(2), torch.device("cpu"), torch.float64)
        tensor([0., 1.], dtype=torch.float64)
    """
    return x.to(device, dtype or x.dtype, non_blocking=device.type != "mps")


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
