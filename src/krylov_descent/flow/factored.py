"""Steps of a sketched Gauss–Newton matrix for any damping: flow direction, geodesic acceleration, damped steps.

Letters: J [m, P] sketch, ρ [m] with Jᵀρ its part of the gradient, g [P] gradient, K = JJᵀ = RᵀR [m, m], λ damping,
φ [P] direction, η length of a step along it, α [P] its acceleration. P counts this rank's part of the parameters;
``comm.sum`` adds inner products over the ranks. The functions are independent of any model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from krylov_descent.distributed import Comm, stacked
from krylov_descent.vectors.products import length

_SLOW = 2  # factor by which λ changes
_WANTED = 2.0**-7  # target of η, within a factor of two
_BEND = 2.0  # largest accepted ratio h‖α‖/‖φ‖


class Factored:
    """A factorisation of JᵀJ for any damping.

    It uses Jᵀ = QR, since forming K squares the singular values of J: those below 1e-8 of the largest would be lost in
    rounding, and those little above it, which matter late in training, would be inaccurate.

    Attributes:
        trace: the trace of JᵀJ.
    """

    def __init__(self, J: Tensor, comm: Comm) -> None:
        self._J, self._comm = J, comm
        parts = stacked(comm, _triangle(J.T.double()))
        self._R = parts[0] if len(parts) == 1 else _triangle(parts.flatten(0, 1))  # [m, m]
        self.trace = float(self._R.square().sum())
        self._damped: dict[float, Tensor] = {}

    def solved(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return Jᵀ(K + λ)⁻¹x [l, P] for every λ."""
        c = torch.stack([self._inverse(float(damping), x.double()) for damping in lam])
        return c.to(self._J.dtype) @ self._J

    def _inverse(self, lam: float, x: Tensor) -> Tensor:
        """Return (K + λ)⁻¹x [m]; K + λ = SᵀS with the triangular factor S of [R; √λI]."""
        if lam not in self._damped:
            identity = torch.eye(self._R.shape[1], dtype=self._R.dtype, device=self._R.device)
            self._damped[lam] = _triangle(torch.cat([self._R, lam**0.5 * identity]))
        S = self._damped[lam]
        y: Tensor = torch.linalg.solve_triangular(S.T, x[:, None], upper=False)
        c: Tensor = torch.linalg.solve_triangular(S, y, upper=True)
        return c[:, 0]

    def unseen(self, v: Tensor, lam: Tensor) -> Tensor:
        """Return λ(JᵀJ + λ)⁻¹v = v − Jᵀ(K + λ)⁻¹Jv [l, P], the part of v without curvature."""
        return v - self.solved(self.along(v), lam)

    def along(self, v: Tensor) -> Tensor:
        """Return Jv [m]."""
        return self._comm.sum(self._J @ v)

    def norm(self, v: Tensor) -> float:
        """Return ‖v‖."""
        return length(v, self._comm)


def _triangle(X: Tensor) -> Tensor:
    """Return R [m, m] of X = QR with m columns, padded with zero rows to the same shape on all ranks."""
    R = torch.linalg.qr(X, mode="r").R
    missing = R.shape[1] - R.shape[0]
    return R if not missing else torch.cat([R, R.new_zeros(missing, R.shape[1])])


def flow_direction(sketch: Factored, rho: Tensor, carried: Tensor | None, lam: Tensor) -> Tensor:
    """Return φ [P] = argmin ‖Jφ + ρ‖² + λ‖φ − carried‖²; λ [1]."""
    phi = -sketch.solved(rho, lam)
    return (phi if carried is None else phi + sketch.unseen(carried, lam))[0]


def damped_steps(sketch: Factored, g: Tensor, lam: Tensor) -> Tensor:
    """Return −(JᵀJ + λ)⁻¹g [l, P]."""
    return -sketch.unseen(g, lam) / lam[:, None].to(g)


def acceleration(sketch: Factored, phi: Tensor, h: float, change: Callable[[], Tensor], lam: Tensor) -> Tensor:
    """Return the geodesic acceleration α [P], with which outputs move straight as the parameters follow ηφ + ½η²α.

    From θ to θ + hφ the outputs change by hJφ + ½h²q, with q their second derivative along φ; α cancels q: Jα = −q.

    Args:
        sketch: J.
        phi: φ.
        h: the step of the finite difference along φ.
        change: returns the change of the outputs from θ to θ + hφ [m].
        lam: λ [1].
    """
    straight = sketch.along(phi)
    q = (change() - h * straight) * (2 / h**2)
    if not bool(q.isfinite().all()):
        return torch.zeros_like(phi)
    alpha = -sketch.solved(q, lam)[0]
    bend, straight_length = h * sketch.norm(alpha), sketch.norm(phi)
    return alpha if bend <= _BEND * straight_length else torch.zeros_like(phi)


def new_damping(damping: float, length: float) -> float:
    """Return λ of the next step, after a step of length η.

    Example:
        >>> new_damping(1.0, 2.0**-9), new_damping(1.0, 2.0**-7), new_damping(1.0, 0.5)
        (2.0, 1.0, 0.5)
    """
    return damping * _SLOW if length < _WANTED / 2 else damping / _SLOW if length > 2 * _WANTED else damping
