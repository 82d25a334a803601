"""NysNewton-CG of Rathore et al. 2024 (arXiv 2402.01868): damped Newton steps by preconditioned conjugate gradients.

Letters: H Hessian [n, n], μ damping, d with (H + μ)d = g; UΛUᵀ, U [n, k], a Nyström approximation of H of rank k, and
P⁻¹ = (λ_k + μ)U(Λ + μ)⁻¹Uᵀ + (I − UUᵀ), the preconditioner, renewed every 20 steps.

It begins where Adam and L-BFGS end. Deviation: conjugate gradients end at negative curvature, with the iterate before
it; the authors' go on through it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.pinn.rivals.first_order import adam, lbfgs
from experiments.pinn.rivals.least_squares import LeastSquares, Trainable, in_turn

Product = Callable[[Tensor], Tensor]

_RENEWED = 20  # steps a preconditioner is kept: the authors'
_ARMIJO, _SHRINK, _TRIALS = 0.1, 0.5, 30  # the authors'; they do not bound the trials
_AT_ONCE = 50  # products between two yields


class Nystrom(NamedTuple):
    """U and Λ, the greatest first."""

    U: Tensor
    values: Tensor

    def precondition(self, x: Tensor, damping: float) -> Tensor:
        """P⁻¹x."""
        z = self.U.T @ x
        return self.U @ ((self.values[-1] + damping) / (self.values + damping) * z - z) + x


def nystrom(product: Product, n: int, rank: int, generator: torch.Generator, dtype: torch.dtype) -> Nystrom:
    """Of the positive part of a symmetric matrix, by ``rank`` products (Frangella, Tropp & Udell 2023)."""
    rank = min(rank, n)
    omega = torch.linalg.qr(torch.randn(n, rank, generator=generator, dtype=dtype)).Q
    Y = torch.stack([product(column) for column in omega.T], dim=1)
    shift = math.sqrt(n) * torch.finfo(dtype).eps * float(torch.linalg.matrix_norm(Y, 2))
    core = omega.T @ Y
    core = 0.5 * (core + core.T)
    # An indefinite matrix is lifted until its core is positive definite, as the authors do.
    lowest = float(torch.linalg.eigvalsh(core)[0]) + shift
    if lowest <= 0:
        shift += -lowest + torch.finfo(dtype).eps * float(core.diagonal().abs().sum())
    eye = torch.eye(rank, dtype=dtype)
    L, failed = torch.linalg.cholesky_ex(core + shift * eye)
    if int(failed):
        return Nystrom(omega, torch.zeros(rank, dtype=dtype))  # P = I
    B = torch.linalg.solve_triangular(L, (Y + shift * omega).T, upper=False).T
    U, S, _ = torch.linalg.svd(B, full_matrices=False)
    return Nystrom(U, (S.square() - shift).clamp(min=0))


def conjugate_gradients(
    product: Product, b: Tensor, precondition: Product, start: Tensor | None = None
) -> Iterator[tuple[Tensor, float]]:
    """Iterates x for Ax = b and ‖b − Ax‖/‖b‖, from x = start or 0, until the matrix shows negative curvature."""
    x = torch.zeros_like(b) if start is None else start
    r = b.clone() if start is None else b - product(start)
    z = precondition(r)
    p, rz, scale = z, float(r @ z), float(b.norm())
    while rz > 0 and scale > 0:
        Ap = product(p)
        curvature = float(p @ Ap)
        if not curvature > 0:
            return
        alpha = rz / curvature
        x = x + alpha * p
        r = r - alpha * Ap
        z = precondition(r)
        rz, before = float(r @ z), rz
        p = z + (rz / before) * p
        yield x, float(r.norm()) / scale


def nncg(
    problem: Trainable,
    *,
    seed: int,
    adam_steps: int = 200,
    lr: float = 1e-3,
    lbfgs_iterations: int = 500,
    damping: float = 1e-2,
    rank: int = 60,
    cg_iterations: int = 100,
    tolerance: float = 1e-6,
) -> Iterator[float]:
    """Adam, L-BFGS, then NysNewton-CG.

    Args:
        problem: what is solved.
        seed: of the Nyström sketches.
        adam_steps: of the first phase.
        lr: of it.
        lbfgs_iterations: of the second phase.
        damping: μ.
        rank: k.
        cg_iterations: at most, in a step.
        tolerance: of conjugate gradients, relative to ‖g‖.
    """
    newton = _newton(problem, seed, damping, rank, cg_iterations, tolerance)
    return in_turn(adam(problem, adam_steps, lr), lbfgs(problem, 100, lbfgs_iterations), newton)


def _newton(
    problem: Trainable, seed: int, damping: float, rank: int, cg_iterations: int, tolerance: float
) -> Iterator[float]:
    squares, generator = LeastSquares(problem), torch.Generator().manual_seed(seed)
    approximation, age = None, 0
    last: Tensor | None = None  # the direction before: conjugate gradients go on from there, as the authors' do
    while True:
        f, g, product = squares.hessian()
        if not (math.isfinite(f) and bool(g.isfinite().all())):
            yield math.nan
            return
        theta = squares.point()
        if approximation is None or age >= _RENEWED:
            approximation, age = nystrom(product, len(g), rank, generator, g.dtype), 0
            yield f
        d = preconditioned = approximation.precondition(g, damping)
        solve = conjugate_gradients(
            _damped(product, damping),
            g,
            lambda x, now=approximation: now.precondition(x, damping),  # type: ignore[misc]
            last,
        )
        for i, (x, residual) in enumerate(solve, start=1):
            d = x
            if residual <= tolerance or i >= cg_iterations:
                break
            if i % _AT_ONCE == 0:
                yield f
        if squares.renewed():  # inside conjugate gradients
            f = squares.value()
        if not float(g @ d) > 0:  # as it may be where negative curvature ended them soon
            d = preconditioned
        size = _armijo(squares, theta, d, f, float(g @ d))
        if size is None:
            squares.move(theta)
            if age == 0 and last is None:
                return
            approximation = last = None  # old ones may be to blame
            continue
        last, age = d, age + 1
        yield squares.value()


def _damped(product: Product, damping: float) -> Product:
    return lambda v: product(v) + damping * v


def _armijo(squares: LeastSquares, theta: Tensor, d: Tensor, f: float, slope: float) -> float | None:
    """The first of 1, ½, ¼ … with enough decrease of f(θ − size·d), where the model is left; None if there is none."""
    size = 1.0
    for _ in range(_TRIALS):
        squares.move(theta, d, -size)
        if (after := squares.value()) < f and after <= f - _ARMIJO * size * slope:
            return size
        size *= _SHRINK
    return None
