"""Steps of a sketched Gauss–Newton matrix, for any damping: the direction of the flow, its bend, damped steps.

Letters: J [m, P] sketch, ρ [m] with Jᵀρ its part of the gradient, g [P] gradient, K = JJᵀ = QEQᵀ [m, m], λ damping,
φ [P] direction, η length of a step along it, α [P] its acceleration. P stands for this rank's part of the parameters;
``inner`` completes inner products. Takes callables, knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from krylov_descent.basis import length
from krylov_descent.distributed import Comm, inner

_SLOW = 2  # λ changes by this factor where the length is not
_WANTED = 2.0**-7  # within a factor of two
_BEND = 2.0  # an acceleration that would change the direction by more than this is not believed


class Factored:
    """JᵀJ, ready for any damping.

    Attributes:
        trace: of JᵀJ.
    """

    def __init__(self, J: Tensor, comm: Comm) -> None:
        self._J, self._comm = J, comm
        # In float64, or the small eigenvalues of K, which matter, would be rounding of the large ones.
        K = inner(comm, J.shape[1], lambda piece: _gram(J[:, piece].double()))
        E, self._Q = torch.linalg.eigh(K)
        self._E = E.clamp(min=0)
        self.trace = float(self._E.sum())

    def solved(self, x: Tensor, lam: Tensor) -> Tensor:
        """Jᵀ(K + λ)⁻¹x [l, P] for every λ."""
        c = (self._Q @ ((self._Q.T @ x.double())[:, None] / (self._E[:, None] + lam.to(self._E)))).T
        # Share by share: how a product rounds depends on its shape, which must not depend on the number of ranks.
        pieces = self._J.tensor_split(self._comm.shares, dim=1)
        return torch.cat([c.to(piece.dtype) @ piece for piece in pieces], dim=1)

    def unseen(self, v: Tensor, lam: Tensor) -> Tensor:
        """λ(JᵀJ + λ)⁻¹v = v − Jᵀ(K + λ)⁻¹Jv [l, P]: what the curvature leaves of v."""
        return v - self.solved(self.along(v), lam)

    def along(self, v: Tensor) -> Tensor:
        """Jv [m]."""
        return inner(self._comm, len(v), lambda piece: self._J[:, piece] @ v[piece])

    def norm(self, v: Tensor) -> float:
        """‖v‖."""
        return length(v, self._comm)


def _gram(J: Tensor) -> Tensor:
    return J @ J.T


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
