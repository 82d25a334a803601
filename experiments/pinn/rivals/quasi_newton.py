"""The self-scaled Broyden method with a dense inverse Hessian, after some steps of Adam or none.

Letters: H [n, n] inverse Hessian, g gradient, s = −αHg step, y change of the gradient, w = Hy, q = yᵀw, r = yᵀs.

    H⁺ = (H − wwᵀ/q + φq vvᵀ)/τ + ssᵀ/r,   v = s/r − w/q          (BFGS: τ = φ = 1)

Scaling τ and mixture φ of SSBroyden are those of Al-Baali 1998 as Urbán, Stefanou & Pons 2025 (arXiv 2405.04230) and
Kiyani et al. 2025 (arXiv 2501.16371) use them for PINNs, with H⁻¹s = −αg:
    b = sᵀH⁻¹s/r = −α gᵀs/r,  h = q/r,  a = bh − 1 ≥ 0,  c = √(a/(1+a)),  ρ⁻ = min(1, h(1−c)),
    θ = max((ρ⁻−1)/a, min(1/ρ⁻, (1−b)/b)),  σ = 1 + aθ,  φ = (1−θ)/σ,  ρ⁺ = min(1, 1/b),
    τ = h/σ at the first update, later ρ⁺·min(σ^(−1/(n−1)), 1/θ) if θ > 0, min(ρ⁺σ^(−1/(n−1)), σ) if not.

H is read and written once an iteration: Hg⁺ of the old H gives w = Hg⁺ − Hg, and with it H⁺g⁺.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.pinn.rivals.first_order import adam
from experiments.pinn.rivals.least_squares import LeastSquares, Trainable, in_turn
from krylov_descent.krylov.bfgs import Phi, Point, line_search
from krylov_descent.objective.objective import relative_noise

_TINY = 1e-300
_PATIENCE = 10  # iterations without a decrease above the rounding of f


class Family(NamedTuple):
    """A member of the self-scaled Broyden family."""

    tau: float
    phi: float


def self_scaled(b: float, h: float, n: int, *, first: bool) -> Family:
    """τ and φ of SSBroyden."""
    a = max(b * h - 1, 1e-16)  # 0 where s and Hy are parallel: the limit is what this gives
    c = math.sqrt(a / (1 + a))
    least = max(min(1.0, h * (1 - c)), _TINY)
    theta = max((least - 1) / a, min(1 / least, (1 - b) / b))
    sigma = max(1 + a * theta, _TINY)
    phi = (1 - theta) / sigma
    if first:
        return Family(h / sigma, phi)
    most, root = min(1.0, 1 / b), sigma ** (-1 / max(n - 1, 1))
    return Family(most * min(root, 1 / theta) if theta > 0 else min(most * root, sigma), phi)


class InverseHessian:
    """H, and the update of the family, in place."""

    def __init__(self, n: int, dtype: torch.dtype = torch.float64) -> None:
        self.H = torch.eye(n, dtype=dtype)
        self._fresh = True

    def update(self, s: Tensor, y: Tensor, g: Tensor, alpha: float, Hg: Tensor) -> Tensor:
        """H ← H⁺; returns H⁺g⁺.

        Args:
            s: the step, −αHg.
            y: g⁺ − g.
            g: the gradient before the step.
            alpha: α.
            Hg: by the H before the update.
        """
        r = float(s @ y)
        if not r > torch.finfo(s.dtype).eps * float(s.norm()) * float(y.norm()):
            return self.H @ (g + y)
        Hg_new = self.H @ (g + y)
        w = Hg_new - Hg
        q = float(y @ w)
        family = self_scaled(-alpha * float(g @ s) / r, q / r, len(s), first=self._fresh)
        if not (q > 0 and math.isfinite(1 / family.tau)):
            return Hg_new
        self._fresh = False
        tau, phi = family
        U = torch.stack([s, w], dim=1)
        C = torch.tensor(
            [[phi * q / (r * r * tau) + 1 / r, -phi / (r * tau)], [-phi / (r * tau), (phi - 1) / (q * tau)]],
            dtype=U.dtype,
        )
        UC = U @ C
        self.H.addmm_(UC, U.T, beta=1 / tau)
        return Hg_new / tau + UC @ (U.T @ (g + y))


class _Lines:
    """f along lines, with its gradient: slopes come from nowhere else."""

    def __init__(self, squares: LeastSquares) -> None:
        self._squares = squares

    def begin(self, x: Tensor, p: Tensor) -> None:
        self._x, self._p = x, p

    def at(self, alpha: float) -> tuple[float, float]:
        self._squares.move(self._x, self._p, alpha)
        f, self._g = self._squares.gradient()
        return f, float(self._g @ self._p)

    def gradient(self) -> Tensor:
        return self._g


def ssbroyden(problem: Trainable, *, seed: int, adam_steps: int = 0, lr: float = 1e-3) -> Iterator[float]:
    """The self-scaled Broyden method."""
    return in_turn(adam(problem, adam_steps, lr), _descend(problem))


def _descend(problem: Trainable) -> Iterator[float]:
    squares = LeastSquares(problem)
    lines, x = _Lines(squares), squares.point()
    f, g = squares.gradient()
    if not (math.isfinite(f) and bool(g.isfinite().all())):
        yield math.nan
        return
    n, noise = len(x), relative_noise(x.dtype)
    progress = True
    while progress:  # a history that leads nowhere is forgotten; one that never led anywhere ends the run
        inverse, Hg = InverseHessian(n, x.dtype), g.clone()
        steps, idle, progress = 0, 0, False
        while idle < _PATIENCE and (slope := -float(g @ Hg)) < 0:
            first = 1.0 if steps else min(1.0, 1 / float(g.abs().sum()))
            found = line_search(Phi(lines, x, f, 100), Point(0.0, f, slope, x), -Hg, first, noise * abs(f))
            if found is None:
                break
            point, g_new = found
            idle = 0 if point.f < f - noise * abs(f) else idle + 1
            progress = progress or idle == 0
            Hg = inverse.update(point.x - x, g_new - g, g, point.alpha, Hg)
            x, f, g = point.x, point.f, g_new
            steps += 1
            yield f
            if squares.renewed():  # H is kept, as Urbán, Stefanou & Pons do
                squares.move(x)
                f, g = squares.gradient()
                Hg, idle = inverse.H @ g, 0
        squares.move(x)
