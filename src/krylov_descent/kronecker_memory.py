"""What the Kronecker-factored preconditioner takes of memory: bounds from above, from the parameters' shapes alone.

Shapes do not tell an embedding from a dense layer, nor whether there is a bias: every matrix is counted as a dense
layer with a bias, or beyond 4096 rows or columns as a diagonal and an embedding at once, every vector as a diagonal,
every rank as one that needs all inverses. That is little too much on one rank, and far too much for embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from krylov_descent.kronecker_factors import LARGE
from krylov_descent.objective import Objective

_GATHERED = 3  # copies of the statistics while ranks add theirs: their own, those in one piece, those of all ranks
_CHOLESKY = 3  # copies, in float64, of a matrix that is inverted


def kept_bytes(params: Sequence[Tensor], dtype: torch.dtype) -> int:
    """What is remembered from step to step: A, G and their inverses, and diagonals.

    Example:
        >>> kept_bytes([torch.ones(3, 4), torch.ones(3)], torch.float32)  # 2 (5² + 3²) + 3 numbers
        284
    """
    return sum(sum(_numbers(p)) for p in params) * dtype.itemsize


def step_bytes(objective: Objective) -> int:
    """What there is of that in a step: the old and the new, since a step that fails leaves the old; and workspace."""
    params, dtype, comm = objective.parameters.params, objective.parameters.dtype, objective.comm
    kept = kept_bytes(params, dtype)
    statistics = sum(_numbers(p)[0] for p in params) * dtype.itemsize
    copies = _GATHERED if comm.ranks > 1 else 1
    largest = max((max(_sides(p)) + 1 for p in params if _is_matrix(p)), default=0)
    return max(kept + copies * statistics, 2 * kept + _CHOLESKY * 8 * largest**2)


def _numbers(p: Tensor) -> tuple[int, int]:
    """Of a parameter's statistics, and of its inverses."""
    rows, columns = _sides(p)
    if _is_matrix(p):
        both = (columns + 1) ** 2 + rows**2
        return both, both
    if p.ndim == 2 and columns <= LARGE:  # a diagonal, or an embedding, of which A alone is one
        both = rows + columns**2
        return max(p.numel(), both), both
    return p.numel(), 0


def _is_matrix(p: Tensor) -> bool:
    return p.ndim > 1 and max(_sides(p)) <= LARGE


def _sides(p: Tensor) -> tuple[int, int]:
    rows = p.shape[0] if p.ndim > 1 else 1
    return rows, p.numel() // max(1, rows)
