"""Steps of a sketched Gauss–Newton matrix for any damping: flow direction, damped steps.

Letters: J [m, P] sketch, ρ [m] with Jᵀρ its part of the gradient, g [P] gradient, K = JJᵀ = RᵀR [m, m], λ damping,
φ [P] direction, η length of a step along it. P counts this rank's part of the parameters; ``comm.sum`` adds inner
products over the ranks. The functions are independent of any model.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from krylov_descent.distributed import Comm, stacked
from krylov_descent.vectors.devices import wide
from krylov_descent.vectors.products import numbers_of

_RESOLVED = 1e-11  # λ relative to the trace, from which the rounding of a Gram matrix is small beside λ
_ENOUGH = 0.9  # share of the residuals that φ is to remove
_WANTED, _SHORTEST = 2.0**-5, 2.0**-8  # target of η, within a factor of two; the shortest while φ removes too little
_LONG = 0.5  # η of a direction that need not be shorter
LEAST_CONFIRMED = 0.25  # of the fall that the drawn rows promise; of less, φ fits these alone
_FAR, _RAISED = 1.0, 4.0  # length of φ relative to θ beyond which λ is raised, and the factor


class Factored:
    """Solves with JᵀJ + λ for any λ, by the narrow side of J.

    A Gram matrix, K or JᵀJ, has the squares of the singular values of J: its rounding swallows those below 1e-8 of the
    largest, which matter late in training. So the factors are a Cholesky factor of the Gram matrix if its rounding is
    small beside λ, and otherwise a QR, which takes several times as long.

    Attributes:
        trace: the trace of JᵀJ.
    """

    def __init__(self, J: Tensor, comm: Comm) -> None:
        self._J, self._comm = J, comm
        self._tall = comm.ranks == 1 and J.shape[0] > J.shape[1]
        self.trace = float(comm.sum(wide(J).square().sum()))
        self._damped: dict[float, tuple[Tensor, Tensor | None]] = {}

    def solved(self, x: Tensor, lam: float) -> Tensor:
        """Return Jᵀ(K + λ)⁻¹x = argmin ‖Jφ − x‖² + λ‖φ‖² [P]."""
        return self._solved(wide(x), lam).to(self._J)

    def _solved(self, x: Tensor, lam: float) -> Tensor:
        solve = self._by_columns if self._tall else self._by_rows
        return solve(lam, x[:, None])[:, 0]

    def _by_rows(self, lam: float, x: Tensor) -> Tensor:
        """Use K + λ = SᵀS."""
        S, _ = self._factors(lam)
        return wide(self._J).T @ _both(S, x)

    def _by_columns(self, lam: float, x: Tensor) -> Tensor:
        """Use JᵀJ + λ = SᵀS, and by QR φ = S⁻¹Qᵀ[x; 0]."""
        S, Q = self._factors(lam)
        if Q is None:
            return _both(S, wide(self._J).T @ x)
        phi: Tensor = torch.linalg.solve_triangular(S, Q[: len(x)].T @ x, upper=True)
        return phi

    def _factors(self, lam: float) -> tuple[Tensor, Tensor | None]:
        """Return S with SᵀS = K + λ or JᵀJ + λ, and for the latter by QR Q of [J; √λI] = QS."""
        if lam not in self._damped:
            self._damped.clear()  # of the λ tried, one is used again: the step's
            if lam >= _RESOLVED * self.trace:
                damped = self._gram + lam * _identity(self._gram)
                self._damped[lam] = torch.linalg.cholesky_ex(damped, upper=True).L, None
            elif self._tall:
                Q, S = torch.linalg.qr(_with(wide(self._J), lam))
                self._damped[lam] = S, Q
            else:
                self._damped[lam] = _triangle(_with(self._R, lam)), None
        return self._damped[lam]

    @cached_property
    def _gram(self) -> Tensor:
        """JᵀJ, or K of all ranks."""
        J = wide(self._J)
        return J.T @ J if self._tall else self._comm.sum(J @ J.T)

    @cached_property
    def _R(self) -> Tensor:
        """R [m, m] with K = RᵀR."""
        return _joined(stacked(self._comm, _triangle(wide(self._J.T))))

    def unseen(self, v: Tensor, lam: float) -> Tensor:
        """Return λ(JᵀJ + λ)⁻¹v = v − Jᵀ(K + λ)⁻¹Jv [P], the part of v without curvature.

        The difference loses digits in which JᵀJ + λ is accurate: it serves where only K + λ is at hand, or Q.
        """
        S, Q = self._factors(lam)
        if self._tall and Q is None:
            return (lam * _both(S, wide(v)[:, None])[:, 0]).to(v)
        along = self._comm.sum(wide(self._J) @ wide(v))
        return (wide(v) - self._solved(along, lam)).to(v)

    def along(self, v: Tensor) -> Tensor:
        """Return Jv [m]."""
        return self._comm.sum(wide(self._J) @ wide(v)).to(v)


def _both(S: Tensor, x: Tensor) -> Tensor:
    """Return (SᵀS)⁻¹x."""
    y = torch.linalg.solve_triangular(S.T, x, upper=False)
    both: Tensor = torch.linalg.solve_triangular(S, y, upper=True)
    return both


def _identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[1], dtype=like.dtype, device=like.device)


def _with(X: Tensor, lam: float) -> Tensor:
    """Return [X; √λI]."""
    return torch.cat([X, lam**0.5 * _identity(X)])


def _joined(parts: Tensor) -> Tensor:
    """Return the triangle of all ranks' columns from that of each [ranks, m, m]."""
    return parts[0] if len(parts) == 1 else _triangle(parts.flatten(0, 1))


def _triangle(X: Tensor) -> Tensor:
    """Return R [m, m] of X = QR with m columns, padded with zero rows to the same shape on all ranks."""
    R = torch.linalg.qr(X, mode="r").R
    missing = R.shape[1] - R.shape[0]
    return R if not missing else torch.cat([R, R.new_zeros(missing, R.shape[1])])


def flow_direction(sketch: Factored, rho: Tensor, carried: Tensor | None, lam: float) -> Tensor:
    """Return φ [P] = argmin ‖Jφ + ρ‖² + λ‖φ − carried‖²."""
    phi = -sketch.solved(rho, lam)
    return phi if carried is None else phi + sketch.unseen(carried, lam)


def damped_step(sketch: Factored, g: Tensor, lam: float) -> Tensor:
    """Return −(JᵀJ + λ)⁻¹g [P]."""
    return -sketch.unseen(g, lam) / lam


def removed(sketch: Factored, rho: Tensor, phi: Tensor) -> float:
    """Return −ρᵀJφ/ρᵀρ, the share of the residuals that φ removes, to first order."""
    square, change = numbers_of([rho @ rho, rho @ sketch.along(phi)])
    return -change / square if square > 0 else 1.0


def within_reach(v: Tensor, size: float, of_theta: float) -> Tensor:
    """Return v of length ``size``, shortened if it is longer than φ may be."""
    return v * min(1.0, _FAR * of_theta / max(size, 1e-300))


def new_damping(damping: float, fraction: float, share: float, reach: float, confirmed: float) -> float:
    """Return λ of the next step, after a step of fraction η along a φ that removes this share of the residuals.

    A larger λ makes φ shorter, so that a larger fraction of it lowers the loss; it leaves residuals of little curvature
    behind, which a later φ has to remove, and that one is long. So λ grows while steps are short and φ removes enough,
    and shrinks while it does not. Short steps along a φ far longer than θ, ``reach`` times, lead to large weights,
    from where training is slow for good: λ grows fast. It also grows where all rows confirm little of the fall that the
    drawn ones promise.

    Example:
        >>> new_damping(1.0, 2.0**-7, 0.99, 0.1, 1.0), new_damping(1.0, 2.0**-5, 0.99, 0.1, 1.0)
        (2.0, 1.0)
        >>> new_damping(1.0, 2.0**-9, 0.5, 0.1, 1.0), new_damping(1.0, 2.0**-7, 0.5, 0.1, 1.0)
        (2.0, 0.5)
        >>> new_damping(1.0, 2.0**-7, 0.5, 3.0, 1.0), new_damping(1.0, 2.0**-3, 1.0, 0.1, 0.1)
        (4.0, 2.0)
    """
    if reach > _FAR and fraction < _LONG:
        return _RAISED * damping
    if confirmed < LEAST_CONFIRMED:
        return 2 * damping
    if share < _ENOUGH:
        return 2 * damping if fraction < _SHORTEST else damping / 2
    return 2 * damping if fraction < _WANTED / 2 else damping / 2 if fraction > 2 * _WANTED else damping
