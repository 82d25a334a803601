"""Steps of a sketched Gauss–Newton matrix for any damping: flow direction, damped steps.

Letters: J [m, P] sketch, ρ [m] with Jᵀρ its part of the gradient, g [P] gradient, K = JJᵀ = RᵀR [m, m], λ damping,
φ [P] direction, η length of a step along it. P counts this rank's part of the parameters; ``comm.sum`` adds inner
products over the ranks. The functions are independent of any model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from krylov_descent.distributed import Comm, stacked
from krylov_descent.vectors.float64 import wide
from krylov_descent.vectors.products import numbers_of

_ENOUGH = 0.9  # share of the residuals that φ is to remove
_WANTED, _SHORTEST = 2.0**-5, 2.0**-8  # target of η, within a factor of two; the shortest while φ removes too little
_LONG = 0.5  # η of a direction that need not be shorter
_FAR, _RAISED = 1.0, 4.0  # length of φ relative to θ beyond which λ is raised, and the factor


class Factored:
    """A factorisation of JᵀJ for any damping, by QR of the narrow side of J.

    Forming K or JᵀJ would square the singular values of J: those below 1e-8 of the largest would be lost in rounding,
    and those little above it, which matter late in training, would be inaccurate.

    Attributes:
        trace: the trace of JᵀJ.
    """

    def __init__(self, J: Tensor, comm: Comm) -> None:
        self._J, self._comm = J, comm
        self._tall = comm.ranks == 1 and J.shape[0] > J.shape[1]
        self._R = wide(J) if self._tall else _joined(stacked(comm, _triangle(wide(J.T))))  # J, or [m, m]
        self.trace = float(self._R.square().sum())
        self._damped: dict[float, tuple[Tensor, Tensor]] = {}

    def solved(self, x: Tensor, lam: Tensor) -> Tensor:
        """Return Jᵀ(K + λ)⁻¹x = argmin ‖Jφ − x‖² + λ‖φ‖² [l, P] for every λ."""
        solve = self._by_columns if self._tall else self._by_rows
        return torch.stack([solve(float(damping), wide(x)[:, None])[:, 0] for damping in lam]).to(self._J)

    def _by_rows(self, lam: float, x: Tensor) -> Tensor:
        """Use K + λ = SᵀS with [R; √λI] = QS."""
        if lam not in self._damped:
            self._damped[lam] = self._R[:0], _triangle(self._with(lam))
        _, S = self._damped[lam]
        y = torch.linalg.solve_triangular(S.T, x, upper=False)
        phi: Tensor = wide(self._J).T @ torch.linalg.solve_triangular(S, y, upper=True)
        return phi

    def _by_columns(self, lam: float, x: Tensor) -> Tensor:
        """Use φ = S⁻¹Qᵀ[x; 0] with [J; √λI] = QS."""
        if lam not in self._damped:
            self._damped[lam] = torch.linalg.qr(self._with(lam))
        Q, S = self._damped[lam]
        phi: Tensor = torch.linalg.solve_triangular(S, Q[: len(x)].T @ x, upper=True)
        return phi

    def _with(self, lam: float) -> Tensor:
        """Return [R; √λI]."""
        return torch.cat([self._R, lam**0.5 * torch.eye(self._R.shape[1], dtype=self._R.dtype, device=self._R.device)])

    def unseen(self, v: Tensor, lam: Tensor) -> Tensor:
        """Return λ(JᵀJ + λ)⁻¹v = v − Jᵀ(K + λ)⁻¹Jv [l, P], the part of v without curvature."""
        return v - self.solved(self.along(v), lam)

    def along(self, v: Tensor) -> Tensor:
        """Return Jv [m]."""
        return self._comm.sum(wide(self._J) @ wide(v)).to(v)


def _joined(parts: Tensor) -> Tensor:
    """Return the triangle of all ranks' columns from that of each [ranks, m, m]."""
    return parts[0] if len(parts) == 1 else _triangle(parts.flatten(0, 1))


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


def removed(sketch: Factored, rho: Tensor, phi: Tensor) -> float:
    """Return −ρᵀJφ/ρᵀρ, the share of the residuals that φ removes, to first order."""
    square, change = numbers_of([rho @ rho, rho @ sketch.along(phi)])
    return -change / square if square > 0 else 1.0


def within_reach(v: Tensor, size: float, of_theta: float) -> Tensor:
    """Return v of length ``size``, shortened if it is longer than φ may be."""
    return v * min(1.0, _FAR * of_theta / max(size, 1e-300))


def new_damping(damping: float, fraction: float, share: float, reach: float) -> float:
    """Return λ of the next step, after a step of fraction η along a φ that removes this share of the residuals.

    A larger λ makes φ shorter, so that a larger fraction of it lowers the loss; it leaves residuals of little curvature
    behind, which a later φ has to remove, and that one is long. So λ grows while steps are short and φ removes enough,
    and shrinks while it does not. Short steps along a φ far longer than θ, ``reach`` times, lead to large weights,
    from where training is slow for good: λ grows fast.

    Example:
        >>> new_damping(1.0, 2.0**-7, 0.99, 0.1), new_damping(1.0, 2.0**-5, 0.99, 0.1)
        (2.0, 1.0)
        >>> new_damping(1.0, 2.0**-9, 0.5, 0.1), new_damping(1.0, 2.0**-7, 0.5, 0.1)
        (2.0, 0.5)
        >>> new_damping(1.0, 2.0**-7, 0.5, 3.0)
        4.0
    """
    if reach > _FAR and fraction < _LONG:
        return _RAISED * damping
    if share < _ENOUGH:
        return 2 * damping if fraction < _SHORTEST else damping / 2
    return 2 * damping if fraction < _WANTED / 2 else damping / 2 if fraction > 2 * _WANTED else damping
