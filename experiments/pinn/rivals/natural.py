"""SPRING, a natural gradient in sample space on draws of the residuals, with momentum.

It is of Goldshlager et al. 2024, as Guzmán-Cordero et al. 2025 (arXiv 2505.12149) use it for PINNs.

Letters: J [m, n] and ρ [m] of m residuals, λ damping, φ [n] direction, μ momentum, η step size.
φ ← μφ + Jᵀ(JJᵀ + λ)⁻¹(ρ − μJφ) on residuals drawn anew each time; θ ← θ − ηφ/√(1 − μ²ᵏ) at iteration k, η by a search
over halvings of 1. With a fixed η, as its authors run it, a step costs what its batch costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from experiments.pinn.rivals.damped import DampedSystem, best_halving
from experiments.pinn.rivals.least_squares import ALL, LeastSquares, Trainable

_PATIENCE = 20  # draws of rows in a row from which no step comes


def spring(
    problem: Trainable,
    *,
    seed: int,
    damping: float = 1e-2,
    momentum: float = 0.9,
    rows: int = 500,
    lr: float | None = None,
    norm: float = math.inf,
) -> Iterator[float]:
    """One step at a time.

    Args:
        problem: what is solved.
        seed: of the rows that are drawn.
        damping: λ.
        momentum: μ.
        rows: m, residuals of a step: those of points that are drawn evenly where η is given, and no others are looked
            at. Where it is searched, all are seen anyway, and those that hold much of the loss are drawn more often.
        lr: η; None to search over halvings of 1 on the loss of all residuals, the last length's double at most.
        norm: with ``lr``, the longest step.
    """
    squares, generator = LeastSquares(problem), torch.Generator().manual_seed(seed)
    f = squares.value()
    phi = torch.zeros_like(squares.point())
    k = idle = iteration = 0
    size = 1.0
    while math.isfinite(f) and idle < _PATIENCE:
        J, rho = squares.rows(rows, (seed, iteration)) if lr is None else squares.rows_of_batch(rows, generator)
        found = projected_increment(J, rho, phi, momentum, damping)
        iteration += 1
        if found is None:
            return  # JᵀJ + λ is singular in this arithmetic, and no later one will be less so
        phi, k = found, k + 1
        step = phi / math.sqrt(1 - momentum ** (2 * k))
        theta = squares.point()
        if lr is not None:
            squares.move(theta, step, -min(lr, norm / max(float(step.norm()), 1e-300)))
            f = float(rho @ rho) / 2  # of the batch, before the step: no other point is looked at
            if math.isfinite(f):
                yield f
            continue
        best = best_halving(_along(squares, theta, step), f, 1.0 if idle else min(1.0, 2 * size))
        if best is None:
            squares.move(theta)
            if k == 1 and rows >= ALL:
                return  # not even without momentum, on all residuals
            idle += 1
            if idle == _PATIENCE // 2 or not momentum:  # what is carried may be to blame
                phi, k = torch.zeros_like(phi), 0
            continue
        size, f = best
        squares.move(theta, step, -size)
        idle = 0
        yield f
        if squares.renewed():
            f = squares.value()
    if not math.isfinite(f):
        yield math.nan


def projected_increment(J: Tensor, rho: Tensor, phi: Tensor, momentum: float, damping: float) -> Tensor | None:
    """SPRING's next φ, or None where the damped matrix cannot be factorised."""
    if not momentum:
        return DampedSystem(J).solve(rho, damping)
    increment = DampedSystem(J).solve(rho - momentum * (J @ phi), damping)
    return None if increment is None else increment + momentum * phi


def _along(squares: LeastSquares, theta: Tensor, step: Tensor) -> Callable[[float], float]:
    def value(size: float) -> float:
        squares.move(theta, step, -size)
        return squares.value()

    return value
