"""Steps of a sketched Gauss–Newton matrix, for any damping: the direction of the flow, its bend, damped steps.

Letters: J [m, P] sketch, ρ [m] with Jᵀρ its part of the gradient, g [P] gradient, K = JJᵀ = RᵀR [m, m], λ damping,
φ [P] direction, η length of a step along it, α [P] its acceleration. P stands for this rank's part of the parameters;
``comm.sum`` completes inner products. Takes callables, knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from krylov_descent.distributed import Comm, stacked
from krylov_descent.krylov.basis import length

_SLOW = 2  # λ changes by this factor where the length is not
_WANTED = 2.0**-7  # within a factor of two
_BEND = 2.0  # an acceleration that would change the direction by more than this is not believed


class Factored:
    """JᵀJ, ready for any damping.

    By orthogonal transformations, Jᵀ = QR, since K has the squares of J's singular values: those below 1e-8 of the
    largest would be lost in its rounding, and those little above it, on which late losses hang, spoiled.

    Attributes:
        trace: of JᵀJ.
    """

    def __init__(self, J: Tensor, comm: Comm) -> None:
        self._J, self._comm = J, comm
        parts = stacked(comm, _triangle(J.T.double()))
        self._R = parts[0] if len(parts) == 1 else _triangle(parts.flatten(0, 1))  # [m, m]
        self.trace = float(self._R.square().sum())
        self._damped: dict[float, Tensor] = {}

    def solved(self, x: Tensor, lam: Tensor) -> Tensor:
        """Jᵀ(K + λ)⁻¹x [l, P] for every λ."""
        c = torch.stack([self._inverse(float(damping), x.double()) for damping in lam])
        return c.to(self._J.dtype) @ self._J

    def _inverse(self, lam: float, x: Tensor) -> Tensor:
        """(K + λ)⁻¹x [m], where K + λ = SᵀS with the triangle S of R over √λ."""
        if lam not in self._damped:
            identity = torch.eye(self._R.shape[1], dtype=self._R.dtype, device=self._R.device)
            self._damped[lam] = _triangle(torch.cat([self._R, lam**0.5 * identity]))
        S = self._damped[lam]
        y: Tensor = torch.linalg.solve_triangular(S.T, x[:, None], upper=False)
        c: Tensor = torch.linalg.solve_triangular(S, y, upper=True)
        return c[:, 0]

    def unseen(self, v: Tensor, lam: Tensor) -> Tensor:
        """λ(JᵀJ + λ)⁻¹v = v − Jᵀ(K + λ)⁻¹Jv [l, P]: what the curvature leaves of v."""
        return v - self.solved(self.along(v), lam)

    def along(self, v: Tensor) -> Tensor:
        """Jv [m]."""
        return self._comm.sum(self._J @ v)

    def norm(self, v: Tensor) -> float:
        """‖v‖."""
        return length(v, self._comm)


def _triangle(X: Tensor) -> Tensor:
    """R [m, m] of X = QR with m columns; rows that X has not are zero, so that all ranks have as many."""
    R = torch.linalg.qr(X, mode="r").R
    missing = R.shape[1] - R.shape[0]
    return R if not missing else torch.cat([R, R.new_zeros(missing, R.shape[1])])


def flow_direction(sketch: Factored, rho: Tensor, carried: Tensor | None, lam: Tensor) -> Tensor:
    """φ [P] = argmin ‖Jφ + ρ‖² + λ‖φ − carried‖²; λ [1]."""
    phi = -sketch.solved(rho, lam)
    return (phi if carried is None else phi + sketch.unseen(carried, lam))[0]


def damped_steps(sketch: Factored, g: Tensor, lam: Tensor) -> Tensor:
    """−(JᵀJ + λ)⁻¹g [l, P]."""
    return -sketch.unseen(g, lam) / lam[:, None].to(g)


def acceleration(sketch: Factored, phi: Tensor, h: float, change: Callable[[], Tensor], lam: Tensor) -> Tensor:
    """α [P], so that outputs move along a straight line where the parameters follow ηφ + ½η²α (geodesic acceleration).

    The outputs at θ + hφ are hJφ + ½h²q further, q being their second derivative along φ; α undoes that, Jα = −q.

    Args:
        sketch: J.
        phi: φ.
        h: how far along φ the outputs are looked at.
        change: → what they changed by from θ to θ + hφ [m].
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
    """λ of the next step's flow, after a step of length η.

    Example:
        >>> new_damping(1.0, 2.0**-9), new_damping(1.0, 2.0**-7), new_damping(1.0, 0.5)
        (2.0, 1.0, 0.5)
    """
    return damping * _SLOW if length < _WANTED / 2 else damping / _SLOW if length > 2 * _WANTED else damping
