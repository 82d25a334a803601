"""Algorithm 3, lines 7-12: whiten the subspace by its own curvature and minimise the true loss over it.

Letters: V [m, P] basis, H̄ [m, m], Ĥ floored H̄ = C Cᵀ, a [m] coefficients, step d = V̄ a with V̄ = Vᵀ C⁻ᵀ [P, m].
V̄ is never formed: C⁻ᵀ is applied to a. Everything of size m is float64 on the CPU, the same on every rank.

The search sees the objective along lines: θ + d the point where a line begins, p its direction. Both are held whole on
every rank [P], so that a trial costs two numbers between ranks: its value and its slope. Vectors travel once a line:
its direction, and the gradient at its end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from krylov_descent.distributed import Comm
from krylov_descent.krylov.basis import Subspace
from krylov_descent.krylov.bfgs import bfgs_on_lines
from krylov_descent.krylov.candidates import Carry, best_start
from krylov_descent.objective.objective import Derivative, Objective
from krylov_descent.progress import Progress
from krylov_descent.report import StopReason
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.vectors.storage import Rows


class Walk:
    """Moves the parameters to trial points; where it leaves them is for the caller to settle."""

    def __init__(self, objective: Objective, batches: Sequence[Microbatch]) -> None:
        self._objective, self._batches = objective, batches
        self._origin = objective.parameters.read()  # where the line begins
        self._direction: Tensor | None = None
        self._alpha = 0.0
        self._trial: Derivative | None = None
        self._evaluations = 0

    def at_origin(self) -> tuple[float, Tensor]:
        """f and this rank's part of ∇f [P_local] where the first line begins."""
        if self._evaluations:
            self._objective.parameters.write(self._origin)
        losses, g = self._objective.value_and_gradient(self._batches)
        self._count()
        return losses.mean, g

    def value(self, p: Tensor | None = None) -> float:
        """f at p from the origin, or at the origin itself, by forward passes; p is this rank's part [P_local]."""
        objective = self._objective
        if p is not None:
            objective.parameters.write(self._origin, objective.comm.all_gather(p, objective.parameters.numel), 1.0)
        value = objective.value(self._batches).mean
        self._count()
        return value

    def begin(self, p: Tensor, *, moved: bool) -> None:
        """A line along p, of which this is the rank's part [P_local], from the last trial if ``moved``."""
        if moved:
            assert self._direction is not None
            self._origin.add_(self._direction, alpha=self._alpha)
        self._direction = self._trial = None  # vectors of P numbers, before another is made
        self._direction = self._objective.comm.all_gather(p, self._objective.parameters.numel)

    def at(self, alpha: float) -> tuple[float, float]:
        """Value and slope at ``alpha`` along the line."""
        self._trial = None  # its sums are as long as θ
        assert self._direction is not None
        self._objective.parameters.write(self._origin, self._direction, alpha)
        self._alpha = alpha
        self._trial = self._objective.differentiate(self._batches, along=self._direction)
        self._count()
        return self._trial.losses.mean, self._trial.slope

    def _count(self) -> None:
        self._evaluations += 1
        self._objective.tell(Progress("search", self._evaluations, None))

    def gradient(self) -> Tensor:
        """∇f at the last trial, this rank's part [P_local]."""
        assert self._trial is not None
        trial, self._trial = self._trial, None
        return trial.gradient()


@dataclass(frozen=True)
class Search:
    """Settings of the search over the subspace; the defaults need no tuning.

    Args:
        iterations: cap on BFGS iterations; 30 is the paper's (section 5.2).
        evaluations: cap on evaluations of f and its gradient on C; more than two per iteration are never needed.
        tolerance: stop when the predicted decrease is below this part of |f|. None is the rounding noise of the
            dtype: 1e-6 in float32, 2e-15 in float64.
        floor: ε, eigenvalues of H̄ are floored at ε·max|λ|. None is the square root of the dtype's precision: 3.5e-4
            in float32, near the paper's 1e-4 (section 4), and 1.5e-8 in float64, where the paper's would hide
            directions that matter at the end (docs/paper-map.md has the measurement).
        negative: what becomes of negative eigenvalues: "floor" raises them to the floor as in the paper;
            "absolute" takes |λ|, the saddle-free variant (Dauphin et al. 2014).
        model: take the minimum of the quadratic model (gradient on A, curvature on B) without a search, where f on C
            falls there by at least this part of what the model predicts; None always searches, as the paper does. For
            sets so small that a search would find their minimum and not that of other samples.

    Example:
        >>> from krylov_descent import KSD, Search
        >>> optimizer = KSD([torch.nn.Parameter(torch.ones(3))], search=Search(iterations=10))
    """

    iterations: int = 30
    evaluations: int = 60
    tolerance: float | None = None
    floor: float | None = None
    negative: Literal["floor", "absolute"] = "floor"
    model: float | None = None

    def __post_init__(self) -> None:
        for name in ("iterations", "evaluations"):
            if getattr(self, name) < 1:
                raise ValueError(f"Search({name}={getattr(self, name)}): must be at least 1.")
        if self.tolerance is not None and not 0 <= self.tolerance < 1:
            raise ValueError(f"Search(tolerance={self.tolerance}): must be in [0, 1).")
        if self.floor is not None and not 0 < self.floor <= 1:
            raise ValueError(f"Search(floor={self.floor}): must be in (0, 1]; the paper's is 1e-4.")
        if self.negative not in ("floor", "absolute"):
            raise ValueError(f"Search(negative={self.negative!r}): must be 'floor' or 'absolute'.")
        if self.model is not None and not 0 < self.model <= 1:
            raise ValueError(f"Search(model={self.model}): must be in (0, 1], 0.5 for example, or None.")


@dataclass(frozen=True, eq=False)
class Found:
    """The minimum over the subspace.

    Attributes:
        d: the step [P_local], or None if no better point than the start was found.
        before, after: f on C at the start of the search and at its end.
        coefficients: of d in the rows of V.
        carry: for the next step's builder, if this one had starts.
        kept: what the next step takes for the last one [P_local], if no step is taken; None for nothing.
        exact: whether ``after`` was computed at d itself, and not at the end of a chain of lines.
        agreement: f's fall at the model's minimum, of what the model promised; NaN if none was asked, or in noise.
    """

    d: Tensor | None
    before: float
    after: float
    iterations: int
    evaluations: int
    stop_reason: StopReason
    coefficients: tuple[float, ...] = ()
    carry: Carry | None = None
    kept: Tensor | None = None
    exact: bool = False
    agreement: float = math.nan


def whiten(H: Tensor, floor: float, negative: str = "floor") -> Tensor:
    """Lines 7-8: H̄ → C, lower triangular, with C Cᵀ = Ĥ.

    Deviation from the paper: the floor is ε·max|λ|, not ε·max λ, so that an all-negative H̄ still has a
    positive one; H̄ = 0 (a loss without curvature) gives C = I.
    """
    eigenvalues, Q = torch.linalg.eigh(H)
    largest = float(eigenvalues.abs().max())
    if largest == 0:
        return torch.eye(len(H), dtype=H.dtype, device=H.device)
    floor = max(floor, 16 * len(H) * torch.finfo(H.dtype).eps)  # below, rounding may leave no Cholesky factor
    raised = (eigenvalues.abs() if negative == "absolute" else eigenvalues).clamp(min=floor * largest)
    factor: Tensor = torch.linalg.cholesky((Q * raised) @ Q.T)
    return factor


class Walker(Protocol):
    """f along lines in parameter space; vectors are this rank's parts [P_local]."""

    def at_origin(self) -> tuple[float, Tensor]:
        """f and its gradient where the first line begins."""
        ...

    def value(self, p: Tensor | None = None) -> float:
        """f at p from where the first line begins, or where it begins, before there is one."""
        ...

    def begin(self, p: Tensor, *, moved: bool) -> None:
        """A line along p, from the point of the last trial if ``moved``, otherwise from where the last line began."""
        ...

    def at(self, alpha: float) -> tuple[float, float]:
        """Value and slope at ``alpha``."""
        ...

    def gradient(self) -> Tensor:
        """At the last trial."""
        ...


class _Subspace:
    """The walk in coordinates a: lines for BFGS."""

    def __init__(self, walk: Walker, V: Rows, C: Tensor, comm: Comm) -> None:
        self._walk, self._V, self._C, self._comm = walk, V, C, comm
        self._a = torch.zeros(len(C), dtype=torch.float64, device="cpu")
        self._line: tuple[Tensor, Tensor] = self._a, self._a  # coefficients where it begins, and along it
        self._reach = torch.finfo(V.dtype).max / 2
        self.agreement = math.nan

    def step(self, a: Tensor) -> Tensor:
        """Line 9: V̄a = Vᵀ(C⁻ᵀa)."""
        return self.combine(self.coefficients(a))

    def combine(self, c: Tensor) -> Tensor:
        """Vᵀc."""
        return self._V.combine(c.to(self._V.device, self._V.dtype))

    def coefficients(self, a: Tensor) -> Tensor:
        """C⁻ᵀa: of the step in the rows of V."""
        c: Tensor = torch.linalg.solve_triangular(self._C.T, a[:, None], upper=True)[:, 0]
        return c

    def project(self, g: Tensor) -> Tensor:
        """V̄ᵀg = C⁻¹(V g)."""
        reduced = self._comm.sum(self._V.dots(g)).to("cpu", torch.float64)
        projected: Tensor = torch.linalg.solve_triangular(self._C, reduced[:, None], upper=False)[:, 0]
        return projected

    def found(
        self,
        a: Tensor,
        before: float,
        after: float,
        iterations: int,
        evaluations: int,
        reason: StopReason,
        carry: Carry | None,
        *,
        exact: bool = False,
    ) -> Found:
        """Line 12: the step of a."""
        d = self.step(a) if bool((a != 0).any()) else None
        c = tuple(self.coefficients(a).tolist())
        return Found(d, before, after, iterations, evaluations, reason, c, carry, exact=exact, agreement=self.agreement)

    def begin(self, x: Tensor, p: Tensor) -> None:
        self._walk.begin(self.step(p), moved=not torch.equal(x, self._a))
        self._a = x
        self._line = self.coefficients(x), self.coefficients(p)

    def at(self, alpha: float) -> tuple[float, float]:
        c, along = self._line
        if not alpha < self._reach or not self.within_reach(c + alpha * along):
            return math.inf, math.nan
        return self._walk.at(alpha)

    def within_reach(self, c: Tensor) -> bool:
        """Whether the vectors' dtype can hold the step of these coefficients."""
        return float(c.abs().sum()) < self._reach

    def gradient(self) -> Tensor:
        return self.project(self._walk.gradient())


def search_subspace(
    walk: Walker,
    subspace: Subspace,
    options: Search,
    noise: float,
    comm: Comm,
    at_zero: tuple[float, Tensor] | None = None,
    g: Tensor | None = None,
) -> Found:
    """Minimise f(θ + V̄a) over a.

    Args:
        walk: f along lines, the first of them from θ.
        subspace: V and H̄.
        options: caps, floor and tolerance.
        noise: relative rounding noise of f.
        comm: completes inner products.
        at_zero: ``walk.at_origin()``, if known.
        g: gradient of the model (``Search(model=...)``) [P_local], of more samples than f is here; None for that of f.
    """
    floor = torch.finfo(subspace.V.dtype).eps ** 0.5 if options.floor is None else options.floor
    C = whiten(subspace.H, floor, options.negative)  # lines 7-8
    lines = _Subspace(walk, subspace.V, C, comm)
    first, carry = 0, None

    def value(c: Tensor | None = None) -> float:
        nonlocal first
        first += 1
        return walk.value(None if c is None else lines.combine(c))

    def known() -> tuple[float, Tensor]:
        nonlocal first
        if at_zero is not None:
            return at_zero
        first += 1
        return walk.at_origin()

    if options.model is not None and subspace.starts is None:
        if g is None:
            at_zero = known()
            g = at_zero[1]
        before = value() if at_zero is None else at_zero[0]
        a = -lines.project(g)  # where the quadratic model, whose Hessian is I in these coordinates, has its minimum
        predicted = float(a @ a) / 2
        c = lines.coefficients(a)
        after = value(c) if lines.within_reach(c) else math.inf
        if predicted > noise * abs(before):
            lines.agreement = -math.inf if math.isnan(after) else (before - after) / predicted
        if before - after >= options.model * predicted > 0:
            return lines.found(a, before, after, 0, first, StopReason.MODEL, carry, exact=True)
    at_zero = known()
    before = at_zero[0]
    start = before, lines.project(at_zero[1])
    g = at_zero = None  # vectors of P numbers
    if subspace.starts is not None:
        best = best_start(subspace.starts, value, before)
        if best is not None:
            point, carry, lowest = best
            return lines.found(C.T @ point, before, lowest, 0, first, StopReason.CANDIDATE, carry)
        carry, kept = subspace.starts.otherwise, subspace.starts.kept
        if kept is not None:
            return Found(None, before, before, 0, first, StopReason.GATHERING, carry=carry, kept=lines.combine(kept))
    done = bfgs_on_lines(  # line 11
        lines,
        torch.zeros(len(C), dtype=torch.float64, device="cpu"),  # line 10
        start,
        max_iterations=options.iterations,
        max_evaluations=max(1, options.evaluations - first),
        tolerance=noise if options.tolerance is None else options.tolerance,
        noise=noise,
    )
    return lines.found(done.x, before, done.f, done.iterations, first + done.evaluations, done.stop_reason, carry)
