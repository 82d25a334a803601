"""A rational basis: steps (H + λ)⁻¹g in place of polynomials in H, from a sketch of the curvature.

Letters: J [m, P] sketch, ρ [m] with Jᵀρ its part of the gradient, g [P] gradient, K = JJᵀ = QEQᵀ [m, m], λ damping,
φ [P] the flow's direction, μ momentum, η length of a step along it, c weight decay. P stands for this rank's part of
the parameters; ``inner`` completes inner products.

Deviations from the paper:

1. Its subspace is span{(D⁻¹H)^k D⁻¹g}; this one is spanned by (H + λ)⁻¹g and needs no D. By Woodbury, a step costs
   one product by Jᵀ after one factorisation of K.
2. The search begins at the best of some candidates, and goes on only where none is better than staying.

Two families of candidates:

- The flow, ηφ with φ = argmin ‖Jφ + ρ‖² + λ‖φ − μφ_prev‖²: a Gauss–Newton direction of all rows that were drawn in the
  last 1/(1 − μ) steps or so, of which only a short piece is followed. All residuals then shrink alike, whatever their
  curvature, where steps that lower the loss as much as they can satisfy the stiff ones first and end in a valley.
- Damped steps −(JᵀJ + λ)⁻¹g for a grid of λ, for when the flow leads nowhere: the whole gradient, so that enough
  damping always descends.

λ of the flow follows η: larger where only very short pieces lower the loss, smaller where long ones do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from krylov_descent.basis import Carry, Family, Starts, Subspace, Turn, spanned_basis
from krylov_descent.data import Microbatch
from krylov_descent.distributed import Comm, inner
from krylov_descent.objective import Objective
from krylov_descent.rows import Rows
from krylov_descent.sketch import Sketcher

_FIRST, _LEAST, _MOST = 1e-6, 1e-14, 1e-5  # λ of the flow, relative to the trace of K: at first, and its bounds
_SLOW = 2  # λ changes by this factor where the length is not
_WANTED = 2.0**-7  # within a factor of two
_SHORTEST, _LONGEST = 2.0**-14, 2.0
_LENGTHS = 5  # halvings and doublings of the last length that are looked at, at most

_COPIES = 5  # of m·n numbers, while rows are drawn: J, the weights of their own, their gradients (measured: 4.3 to 4.7)

_DAMPED, _RATIO = 9, 3.0  # damped steps: dampings, and the factor between them
_FIRST_DAMPED, _LEAST_DAMPED, _MOST_DAMPED = 1e-3, 1e-12, 1e2


@dataclass(frozen=True)
class Rational:
    """Settings of the rational basis; the defaults are the same for every problem of `experiments pinn`.

    Args:
        rows: m, rows of the sketch: more cost O(m²n + m³) and about 5 m·n numbers of memory while they are drawn, fewer
            see less of the curvature.
        momentum: μ, how much of the last direction is kept where the rows drawn now say nothing.

    Example:
        >>> from krylov_descent import KSD, Rational
        >>> optimizer = KSD([torch.nn.Parameter(torch.ones(3))], basis=Rational(rows=200))
    """

    rows: int = 400
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not isinstance(self.rows, int) or self.rows < 1:
            raise ValueError(f"Rational(rows={self.rows!r}): must be a whole number ≥ 1.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Rational(momentum={self.momentum!r}): must be a number in [0, 1).")


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
        return v - self.solved(inner(self._comm, len(v), lambda piece: self._J[:, piece] @ v[piece]), lam)


def _gram(J: Tensor) -> Tensor:
    return J @ J.T


def flow_direction(sketch: Factored, rho: Tensor, carried: Tensor | None, lam: Tensor) -> Tensor:
    """φ [P] = argmin ‖Jφ + ρ‖² + λ‖φ − carried‖²; λ [1]."""
    phi = -sketch.solved(rho, lam)
    return (phi if carried is None else phi + sketch.unseen(carried, lam))[0]


def damped_steps(sketch: Factored, g: Tensor, lam: Tensor) -> Tensor:
    """−(JᵀJ + λ)⁻¹g [l, P]."""
    return -sketch.unseen(g, lam) / lam[:, None].to(g)


def reduced_curvature(J: Tensor, V: Rows, objective: Objective) -> Tensor:
    """H̄ = (JVᵀ)ᵀJVᵀ and the decay's part, float64 [r, r] for the r rows of V."""
    comm, rows = objective.comm, V.tensor()
    JV = inner(comm, J.shape[1], lambda piece: J[:, piece] @ rows[:, piece].T).double()
    H = JV.T @ JV
    if any(objective.parameters.decay):
        for i, v in enumerate(rows):
            w = torch.zeros_like(v)
            objective.add_decay(w, v)
            H[i] += inner(comm, len(w), lambda piece, w=w: V.dots(w, piece))  # type: ignore[misc]
    return H


def finite_rows(J: Tensor, rho: Tensor, comm: Comm) -> tuple[Tensor, Tensor]:
    """Those whose size is finite, on every rank."""
    sizes = inner(comm, J.shape[1], lambda piece: J[:, piece].square().sum(1))
    keep = sizes.isfinite() & rho.isfinite()
    return (J, rho) if bool(keep.all()) else (J[keep], rho[keep])


def new_damping(damping: float, length: float) -> float:
    """λ of the next step's flow, after a step of length η.

    Example:
        >>> new_damping(1.0, 2.0**-9), new_damping(1.0, 2.0**-7), new_damping(1.0, 0.5)
        (2.0, 1.0, 0.5)
    """
    return damping * _SLOW if length < _WANTED / 2 else damping / _SLOW if length > 2 * _WANTED else damping


class RationalBuilder:
    """Builds the span of the flow's direction, damped steps, the gradient and the previous step."""

    announced = True  # nothing is done in parts

    def __init__(self, options: Rational, memory_budget: int | None) -> None:
        self._options, self._budget = options, memory_budget
        self._sketcher = Sketcher(options.rows)
        self._V: Rows | None = None

    def __call__(
        self,
        objective: Objective,
        batches: Sequence[Microbatch],
        precondition: Callable[[Tensor], Tensor],
        g: Tensor,
        d_prev: Tensor | None,
        turn: Turn,
    ) -> Subspace:
        """The subspace and where to begin in it; ``precondition`` is not used."""
        comm = objective.comm
        drawn = self._sketcher.draw(objective, batches, (turn.seed, turn.iteration))
        J, rho = finite_rows(*drawn, comm)
        sketch = Factored(J, comm)
        carry = self._bounded(sketch.trace, turn.carry)
        phi = self._flow(objective, sketch, rho, d_prev, carry)
        dampings = carry.damped * _RATIO ** (torch.arange(_DAMPED, dtype=torch.float64, device="cpu") - _DAMPED // 2)
        damped = damped_steps(sketch, g, dampings)
        vectors = [v for v in (phi, *damped, g, d_prev) if v is not None]
        room = min(len(vectors), objective.parameters.count)
        if self._V is None or not self._V.holds(room, g):
            self._V = Rows(room, g)
        V = self._V
        subspace = spanned_basis(lambda V: reduced_curvature(J, V, objective), vectors, V, room, comm)

        def in_basis(d: Tensor) -> Tensor:
            c = inner(comm, len(d), lambda piece: V.dots(d, piece)).to("cpu", torch.float64)
            return c if bool(c.isfinite().all()) else torch.zeros_like(c)

        lengths = _lengths(carry.length)
        lost = Carry(min(carry.damping * _SLOW, _MOST * sketch.trace), min(lengths), 0.0, carry.damped)
        flow = Family(
            torch.stack([eta * in_basis(phi) for eta in lengths]),
            lengths.index(carry.length),
            # After a piece of length η, what is left of the direction is (1 − η)φ.
            tuple(Carry(new_damping(carry.damping, eta), eta, max(0.0, 1 / eta - 1), carry.damped) for eta in lengths),
        )
        rescue = Family(
            torch.stack([in_basis(d) for d in damped]),
            _DAMPED // 2,
            tuple(replace(lost, damped=lam) for lam in dampings.tolist()),
        )
        starts = Starts((flow, rescue), replace(lost, damped=float(dampings[-1])))
        return replace(subspace, starts=starts, finite=subspace.finite and len(J) == len(drawn[0]))

    def _flow(self, objective: Objective, sketch: Factored, rho: Tensor, d_prev: Tensor | None, carry: Carry) -> Tensor:
        """φ, with the decay as curvature c and residual cθ: (JᵀJ + λ + c)φ = −Jᵀρ − cθ + λμφ_prev."""
        lam, c = carry.damping, max(objective.parameters.decay, default=0.0)
        carried = None if d_prev is None or not carry.scale else d_prev * (carry.scale * self._options.momentum)
        if c:
            decay = torch.zeros_like(objective.point())
            objective.add_decay(decay)
            carried = -decay / (lam + c) if carried is None else (lam * carried - decay) / (lam + c)
        return flow_direction(sketch, rho, carried, torch.tensor([lam + c], dtype=torch.float64, device="cpu"))

    @staticmethod
    def _bounded(trace: float, carry: Carry | None) -> Carry:
        """What is remembered, within what this curvature can feel."""
        if not 0 < trace < math.inf:
            return Carry(1.0, _WANTED, 0.0, 1.0)
        if carry is None:
            return Carry(_FIRST * trace, 0.5, 0.0, _FIRST_DAMPED * trace)
        damping = min(max(carry.damping, _LEAST * trace), _MOST * trace)
        damped = min(max(carry.damped, _LEAST_DAMPED * trace), _MOST_DAMPED * trace)
        return replace(carry, damping=damping, damped=damped)

    @property
    def rows(self) -> Rows | None:
        """V of the last step."""
        return self._V

    def require_room(self, objective: Objective) -> None:
        """Before anything runs.

        Raises:
            ValueError: the budget is too small for the sketch.
        """
        parameters = objective.parameters
        taken = _COPIES * self._options.rows * parameters.numel * parameters.dtype.itemsize
        if self._budget is not None and taken > self._budget:
            raise ValueError(
                f"The sketch of basis='rational' takes {taken:,} bytes ({self._options.rows} rows of "
                f"{parameters.numel:,} parameters), more than memory_budget={self._budget:,}. Use basis='krylov', "
                "Rational(rows=...) with fewer rows, or a larger memory_budget."
            )

    def announce(self, objective: Objective, batches: Sequence[Microbatch]) -> None:
        """Nothing to say."""

    def __getstate__(self) -> dict[str, Any]:
        # A copy of an optimizer needs no copy of its workspace, and is of other parameters.
        return {**self.__dict__, "_V": None, "_sketcher": Sketcher(self._options.rows)}


def _lengths(length: float) -> list[float]:
    """Halvings and doublings of a length, longest first."""
    tried = (length * 2.0**-k for k in range(-_LENGTHS, _LENGTHS + 1))
    return [eta for eta in tried if _SHORTEST <= eta <= _LONGEST]
