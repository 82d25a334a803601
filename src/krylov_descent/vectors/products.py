"""Inner products and norms of vectors distributed over the ranks [P_local]."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from krylov_descent.distributed import Comm


def numbers_of(xs: Sequence[Tensor]) -> list[float]:
    """Return 0-d tensors as numbers, read from their device at once: each read waits for all that was computed there.

    Example:
        >>> numbers_of([torch.tensor(1.5), torch.tensor(True), torch.tensor(2.0, dtype=torch.float64)])
        [1.5, 1.0, 2.0]
    """
    if len({x.device for x in xs}) > 1:  # a closure may compute its loss elsewhere
        return [float(x) for x in xs]
    return torch.stack([*xs]).tolist() if xs else []  # in the widest of their dtypes


def dot(x: Tensor, y: Tensor, comm: Comm) -> float:
    """Return x·y."""
    return float(comm.sum(x @ y))


def length(x: Tensor, comm: Comm) -> float:
    """Return ‖x‖ without overflow or underflow; not finite if x is not.

    Example:
        >>> from krylov_descent.distributed import SingleProcess
        >>> length(torch.tensor([3e300, 4e300], dtype=torch.float64), SingleProcess())
        5e+300
    """
    return lengths([x], comm)[0]


def lengths(xs: Sequence[Tensor], comm: Comm) -> list[float]:
    """Return the length of each vector, read at once."""
    squares: list[float] = comm.sum(torch.stack([x @ x for x in xs])).tolist()
    info = torch.finfo(xs[0].dtype)
    least = info.tiny / info.eps**2
    return [
        math.sqrt(square) if least < square < math.inf else _scaled_length(x, comm)
        for x, square in zip(xs, squares, strict=True)
    ]


def _scaled_length(x: Tensor, comm: Comm) -> float:
    """Return ‖x‖ where the squares overflow or vanish, scaled by the largest element: slow, and rare."""
    size = float(comm.max(torch.linalg.vector_norm(x, torch.inf) if len(x) else x.new_zeros(())))
    if not 0 < size < math.inf:
        return size
    return size * math.sqrt(float(comm.sum((x / size).square().sum())))
