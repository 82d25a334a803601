"""A rational basis: damped Gauss–Newton steps of all dampings at once, from a sketch of the curvature.

Letters: J [m, P] sketch, ρ [m], g [P] gradient, K = JJᵀ = QEQᵀ [m, m], λ dampings [l], d steps [l, P]. P stands for
this rank's part of the parameters; ``inner`` completes inner products.

Deviation from the paper: its subspace is span{(D⁻¹H)^k D⁻¹g}, polynomials in the curvature; this one is spanned by
(H + λ)⁻¹g for many λ, which is what the paper's argument wants to search over.

(JᵀJ + λ)⁻¹ by Woodbury: a step for every λ costs one product by Jᵀ after one factorisation of K.
- "full" steps −(g − JᵀQ(E+λ)⁻¹QᵀJg)/λ: the whole gradient, the curvature of the sketch;
- "sketched" steps −JᵀQ(E+λ)⁻¹Qᵀρ: both of the sketch, the Levenberg–Marquardt step of its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from krylov_descent.basis import Starts, Subspace, Turn, spanned_basis
from krylov_descent.data import Microbatch
from krylov_descent.distributed import Comm, inner
from krylov_descent.objective import Objective
from krylov_descent.rows import Rows
from krylov_descent.sketch import Sketcher

_FIRST = 1e-3  # damping of the first step, relative to the largest eigenvalue


@dataclass(frozen=True, eq=False)
class Steps:
    """Candidates.

    Attributes:
        full, sketched: [l, P].
        dampings: [l].
    """

    full: Tensor
    sketched: Tensor
    dampings: Tensor


def damped_steps(J: Tensor, rho: Tensor, g: Tensor, dampings: Callable[[float], Tensor], comm: Comm) -> Steps:
    """Steps for a grid of dampings, which is chosen knowing the largest eigenvalue of K."""
    P = J.shape[1]
    K = inner(comm, P, lambda piece: J[:, piece] @ J[:, piece].T).double()
    E, Q = torch.linalg.eigh(K)
    E = E.clamp(min=0)
    lam = dampings(float(E[-1]) if len(E) else 0.0).to(E)
    Jg = inner(comm, P, lambda piece: J[:, piece] @ g[piece]).double()
    through = Q @ ((Q.T @ Jg)[:, None] / (E[:, None] + lam))  # [m, l]
    full = -(g - _combine(through.T, J, comm)) / lam[:, None].to(J.dtype)
    sketched = -_combine((Q @ ((Q.T @ rho.double())[:, None] / (E[:, None] + lam))).T, J, comm)
    return Steps(full, sketched, lam)


def _combine(c: Tensor, J: Tensor, comm: Comm) -> Tensor:
    """cJ [l, P], share by share: how a product rounds depends on its shape, which must not on the number of ranks."""
    return torch.cat([c.to(J.dtype) @ piece for piece in J.tensor_split(comm.shares, dim=1)], dim=1)


@dataclass(frozen=True)
class Rational:
    """Settings of the rational basis; the defaults need no tuning.

    Args:
        rows: m, rows of the sketch: more cost O(m²n + m³) and memory m·n, fewer see less of the curvature.
        dampings: of the grid, around the one that was best at the last step.
        ratio: between neighbours of the grid.
        polish: BFGS iterations in the span of all candidates, from the best of them; the whole search is made in any
            case where no candidate is better than staying.

    Example:
        >>> from krylov_descent import KSD, Rational
        >>> optimizer = KSD([torch.nn.Parameter(torch.ones(3))], basis=Rational(rows=200))
    """

    rows: int = 400
    dampings: int = 9
    ratio: float = 3.0
    polish: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("dampings", 1), ("polish", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"Rational({name}={value!r}): must be a whole number ≥ {least}.")
        if not 1 < self.ratio < math.inf:
            raise ValueError(f"Rational(ratio={self.ratio!r}): must be a number above 1.")


class RationalBuilder:
    """Builds the span of damped steps, the gradient and the previous step."""

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
        """Damped steps for a grid of dampings around that of the last step; ``precondition`` is not used."""
        comm = objective.comm
        J, rho = self._sketcher.draw(objective, batches, (turn.seed, turn.iteration))
        steps = damped_steps(J, rho, g, lambda largest: self._grid(largest, turn.damping), comm)
        candidates = [*steps.full, *steps.sketched]
        vectors = [v for v in (*candidates, g, d_prev) if v is not None]
        room = min(len(vectors), objective.parameters.count)
        if self._V is None or not self._V.holds(room, g):
            self._V = Rows(room, g)
        V = self._V

        def product(v: Tensor) -> Tensor:
            w = J.T @ inner(comm, len(v), lambda piece: J[:, piece] @ v[piece])
            objective.add_decay(w, v)
            return w

        subspace = spanned_basis(product, vectors, V, room, comm)

        def in_basis(d: Tensor) -> Tensor:
            c = inner(comm, len(d), lambda piece: V.dots(d, piece)).to("cpu", torch.float64)
            return c if bool(c.isfinite().all()) else torch.zeros_like(c)

        coefficients = torch.stack([in_basis(d) for d in candidates]).view(2, -1, V.m)
        return replace(subspace, starts=Starts(coefficients, steps.dampings.cpu(), self._options.polish))

    def _grid(self, largest: float, damping: float | None) -> Tensor:
        """Around the last step's, and within what the curvature can feel: λ far above it only shortens steps."""
        count = self._options.dampings
        if not 0 < largest < math.inf:
            return torch.ones(count, dtype=torch.float64, device="cpu")
        centre = min(max(_FIRST * largest if damping is None else damping, 1e-12 * largest), 1e2 * largest)
        exponents = torch.arange(count, dtype=torch.float64, device="cpu") - count // 2
        return centre * self._options.ratio**exponents

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
        taken = self._options.rows * parameters.numel * parameters.dtype.itemsize
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
