"""Damped Gauss–Newton steps by one Cholesky factorisation of the smaller side, and a search along a direction.

Letters: J [N, n], ρ [N], λ > 0; d = −(JᵀJ + λ)⁻¹Jᵀρ = −Jᵀ(JJᵀ + λ)⁻¹ρ, the first with an n × n matrix, the second
(Woodbury) with an N × N one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_BLOCKS = 8  # of columns of a Gram matrix: one half of the work is spared as this grows, 7/16 of it at 8
_HALVINGS = 30  # Müller & Zeinhofer 2023


class DampedSystem:
    """JᵀJ + λ for any λ: the matrix is formed once, a λ costs a factorisation."""

    def __init__(self, J: Tensor) -> None:
        self._J = J
        self._wide = J.shape[0] < J.shape[1]
        self._gram = gram(J.T if self._wide else J)

    def solve(self, rho: Tensor, damping: float) -> Tensor | None:
        """(JᵀJ + λ)⁻¹Jᵀρ, or None where the matrix is not positive definite in this arithmetic."""
        J, wide = self._J, self._wide
        A = self._gram.clone()
        A.diagonal().add_(damping)
        L, failed = torch.linalg.cholesky_ex(A)
        if int(failed):
            return None
        b = rho if wide else J.T @ rho
        x = torch.cholesky_solve(b[:, None], L)[:, 0]
        x = J.T @ x if wide else x
        return x if bool(x.isfinite().all()) else None


def gram(X: Tensor) -> Tensor:
    """The lower triangle of XᵀX by blocks of columns, all that a factorisation reads; above it, not all is set."""
    n = X.shape[1]
    out = X.new_zeros(n, n)
    width = max(64, math.ceil(n / _BLOCKS))
    for i in range(0, n, width):
        torch.mm(X[:, i:].T, X[:, i : i + width], out=out[i:, i : i + width])
    return out


def best_halving(value: Callable[[float], float], before: float, largest: float = 1.0) -> tuple[float, float] | None:
    """Of the step sizes 1, ½, ¼ …, the first that is below ``before`` and no worse than the next; its size and value.

    Authors evaluate the whole grid and take its minimum; where the loss along the line has one valley, this is the
    same with a few evaluations, and fewer if sizes above ``largest`` are left out: twice the last one, say.
    """
    best: tuple[float, float] | None = None
    size = 2.0
    for _ in range(_HALVINGS + 1):
        size /= 2
        if size > largest:
            continue
        loss = value(size)
        if best is not None and not loss < best[1]:
            break
        if loss < before:
            best = size, loss
    return best
