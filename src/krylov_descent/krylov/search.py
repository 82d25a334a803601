"""Algorithm 3, lines 7-12: whiten the subspace by its own curvature and minimise the true loss over it.

Letters: V [m, P] basis, H̄ [m, m], Ĥ floored H̄ = C Cᵀ, a [m] coefficients, step d = V̄ a with V̄ = Vᵀ C⁻ᵀ [P, m].
V̄ is never formed: C⁻ᵀ is applied to a. Everything of size m is float64 on the CPU, the same on every rank.

The search evaluates f along lines from θ + d in direction p. Every rank holds both vectors whole [P], so that ranks
exchange two numbers a trial, value and slope, and two vectors a line, its direction and the gradient at its end.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from krylov_descent.distributed import Comm
from krylov_descent.krylov.bfgs import bfgs_on_lines
from krylov_descent.krylov.orthonormal_basis import Subspace
from krylov_descent.objective.objective import Derivative, Objective, relative_noise
from krylov_descent.progress import Progress
from krylov_descent.report import StopReason
from krylov_descent.samples.interface import Microbatch, Stateless
from krylov_descent.stepping.gradient_pass import GradientPass
from krylov_descent.stepping.search_result import SearchResult
from krylov_descent.vectors.devices import sent


class LineEvaluator:
    """Evaluates the objective along lines; moves the parameters to trial points and leaves them there."""

    def __init__(self, objective: Objective, batches: Sequence[Microbatch]) -> None:
        self._objective, self._batches = objective, batches
        self._origin = objective.parameters.read()  # where the line begins
        self._direction: Tensor | None = None
        self._alpha = 0.0
        self._trial: Derivative | None = None
        self._evaluations = 0

    def at_origin(self) -> tuple[float, Tensor]:
        """Return f and this rank's part of ∇f [P_local] where the first line begins."""
        if self._evaluations:
            self._objective.parameters.write(self._origin)
        losses, g = self._objective.value_and_gradient(self._batches)
        self._count()
        return losses.mean, g

    def value(self, p: Tensor | None = None) -> float:
        """Return f at origin + p, or at the origin, by forward passes; p is this rank's part [P_local]."""
        if p is not None:
            self.move(p)
        value = self._objective.value(self._batches).mean
        self._count()
        return value

    def move(self, p: Tensor) -> None:
        """Set θ to origin + p."""
        parameters = self._objective.parameters
        parameters.write(self._origin, self._objective.comm.all_gather(p, parameters.numel), 1.0)

    def begin(self, p: Tensor, *, moved: bool) -> None:
        """Begin a line along p [P_local], from the last trial if ``moved``, otherwise from the same origin."""
        if moved:
            assert self._direction is not None
            self._origin.add_(self._direction, alpha=self._alpha)
        self._direction = self._trial = None  # vectors [P]: free them before the next is made
        self._direction = self._objective.comm.all_gather(p, self._objective.parameters.numel)

    def at(self, alpha: float) -> tuple[float, float]:
        """Return value and slope at ``alpha`` along the line."""
        self._trial = None  # it holds sums [P]
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
        """Return ∇f at the last trial, this rank's part [P_local]."""
        assert self._trial is not None
        trial, self._trial = self._trial, None
        return trial.gradient()


class LossOnLines(Protocol):
    """f along lines in parameter space; vectors are this rank's parts [P_local]."""

    def at_origin(self) -> tuple[float, Tensor]:
        """Return f and its gradient where the first line begins."""
        ...

    def value(self, p: Tensor | None = None) -> float:
        """Return f at origin + p, or at the origin, of the first line."""
        ...

    def begin(self, p: Tensor, *, moved: bool) -> None:
        """Begin a line along p, from the last trial if ``moved``, otherwise from where the last line began."""
        ...

    def at(self, alpha: float) -> tuple[float, float]:
        """Return value and slope at ``alpha`` along the line."""
        ...

    def gradient(self) -> Tensor:
        """Return ∇f at the last trial."""
        ...


@dataclass(frozen=True, eq=False)
class SearchStart:
    """The information at the start θ of a search.

    Attributes:
        noise: relative rounding noise of f.
        comm: adds inner products over the ranks.
        at_zero: f on C and its gradient [P_local], if known.
        gradient: the gradient of the quadratic model [P_local], on A; None, with C outside of A, for that of f on C.
    """

    noise: float
    comm: Comm
    at_zero: tuple[float, Tensor] | None = None
    gradient: Tensor | None = None

    @classmethod
    def of(cls, at: GradientPass) -> SearchStart:
        """Return the start of a search on C after this pass over A."""
        noise = relative_noise(at.objective.parameters.params[0].dtype)
        known = (at.losses.mean, at.g) if at.sets.searches_all and at.g is not None else None
        return cls(noise, at.objective.comm, known, None if at.sets.holds_out else at.g)


class SubspaceSearch(ABC):
    """Minimises the loss over a subspace; subclass it for a search of your own, ``KSD(..., search=Mine())``.

    Attributes:
        needs_gradient: whether the search needs the gradient on A.
    """

    needs_gradient: bool = False

    def init(self) -> Any:
        """Return the state of a new run: a frozen dataclass of numbers and tensors."""
        return Stateless()

    @abstractmethod
    def minimise(self, lines: LossOnLines, subspace: Subspace, start: SearchStart, state: Any) -> SearchResult:
        """Find the best point; the result includes the search's new state.

        Args:
            lines: f on C along lines; the first line begins at θ.
            subspace: V and H̄.
            start: the information at θ.
            state: the search's state.
        """


@dataclass(frozen=True)
class Search(SubspaceSearch):
    """Minimises the loss over the subspace by BFGS, as in the paper; the defaults need no tuning.

    Args:
        iterations: cap on BFGS iterations; 30 is the paper's (section 5.2).
        evaluations: cap on evaluations of f and its gradient on C; more than two per iteration are never needed.
            Deviation from the paper (10 of krylov/step.py), which caps iterations only; ``PAPER`` has 120.
        tolerance: stop when the predicted decrease is below this fraction of |f|. None is the rounding noise of the
            dtype: 1e-6 in float32, 2e-15 in float64.
        floor: ε, eigenvalues of H̄ are floored at ε·max|λ|. None is the square root of the dtype's precision: 3.5e-4
            in float32, near the paper's 1e-4 (section 4), and 1.5e-8 in float64, where the paper's would hide
            directions that matter at the end (docs/paper-map.md has the measurement).
        negative: the treatment of negative eigenvalues: "floor" raises them to the floor as in the paper;
            "absolute" takes |λ|, the saddle-free variant (Dauphin et al. 2014).

    Example:
        >>> from krylov_descent import KSD, Search
        >>> optimizer = KSD([torch.nn.Parameter(torch.ones(3))], search=Search(iterations=10))
    """

    iterations: int = 30
    evaluations: int = 60
    tolerance: float | None = None
    floor: float | None = None
    negative: Literal["floor", "absolute"] = "floor"

    def __post_init__(self) -> None:
        for name in ("iterations", "evaluations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{type(self).__name__}({name}={getattr(self, name)}): must be at least 1.")
        if self.tolerance is not None and not 0 <= self.tolerance < 1:
            raise ValueError(f"{type(self).__name__}(tolerance={self.tolerance}): must be in [0, 1).")
        if self.floor is not None and not 0 < self.floor <= 1:
            raise ValueError(f"{type(self).__name__}(floor={self.floor}): must be in (0, 1]; the paper's is 1e-4.")
        if self.negative not in ("floor", "absolute"):
            raise ValueError(f"{type(self).__name__}(negative={self.negative!r}): must be 'floor' or 'absolute'.")

    def minimise(self, lines: LossOnLines, subspace: Subspace, start: SearchStart, state: Any) -> SearchResult:
        """Lines 7-12: whiten, then run BFGS from a = 0."""
        return self._bfgs(Coordinates(lines, subspace, self, start))

    def _bfgs(self, space: Coordinates) -> SearchResult:
        """Lines 10-12."""
        start = space.begun()
        noise, spent = space.start.noise, space.evaluations
        done = bfgs_on_lines(  # line 11
            space,
            torch.zeros(space.m, dtype=torch.float64, device="cpu"),  # line 10
            start,
            max_iterations=self.iterations,
            max_evaluations=max(1, self.evaluations - spent),
            tolerance=noise if self.tolerance is None else self.tolerance,
            noise=noise,
        )
        return space.found(done.x, start[0], done.f, done.stop_reason, done.iterations, spent + done.evaluations)


@dataclass(frozen=True)
class ModelSearch(Search):
    """Takes the minimum of the quadratic model if the loss on C agrees with the model, and runs BFGS otherwise.

    It is meant for small sets, whose minimum a search would overfit. The model has the curvature on B and the gradient
    on A, or on C where that is outside of A, since a step overfits the samples that it is made of. Deviation from the
    paper, which always searches (lines 9-12).

    Args:
        agreement: the least ratio of actual to predicted decrease of f on C at which the model's minimum is taken.

    Example:
        >>> from krylov_descent import KSD, ModelSearch
        >>> optimizer = KSD([torch.nn.Parameter(torch.ones(3))], search=ModelSearch(agreement=0.5))
    """

    agreement: float = 0.1
    needs_gradient = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.agreement <= 1:
            raise ValueError(f"ModelSearch(agreement={self.agreement}): must be in (0, 1], 0.1 for example.")

    def minimise(self, lines: LossOnLines, subspace: Subspace, start: SearchStart, state: Any) -> SearchResult:
        """Return the model's minimum, or the point that BFGS finds."""
        space = Coordinates(lines, subspace, self, start)
        g = space.at_zero()[1] if start.gradient is None else start.gradient
        before = space.value_at_zero()
        a = -space.project(g)  # the quadratic model's minimum: its Hessian is I in these coordinates
        del g
        predicted = float(a @ a) / 2
        c = space.coefficients(a)
        after = space.value(c) if space.within_reach(c) else math.inf
        if predicted > start.noise * abs(before):
            space.agreement = -math.inf if math.isnan(after) else (before - after) / predicted
        if before - after >= self.agreement * predicted > 0:
            return space.found(a, before, after, StopReason.MODEL, 0, space.evaluations, exact=True)
        return self._bfgs(space)


def whiten(H: Tensor, floor: float, negative: str = "floor") -> Tensor:
    """Lines 7-8: return C, lower triangular, with C Cᵀ = Ĥ.

    Deviations from the paper:

    1. The floor is ε·max|λ|, not ε·max λ, so that it is positive for an all-negative H̄; ε is √eps of the dtype by
       default, not 1e-4 (``PAPER`` has 1e-4). H̄ = 0 (a loss without curvature) gives C = I.
    2. ``negative="absolute"`` takes |λ|: a different method (saddle-free).
    """
    eigenvalues, Q = torch.linalg.eigh(H)
    largest = float(eigenvalues.abs().max())
    if largest == 0:
        return torch.eye(len(H), dtype=H.dtype, device=H.device)
    floor = max(floor, 16 * len(H) * torch.finfo(H.dtype).eps)  # with less, rounding may break Cholesky
    raised = (eigenvalues.abs() if negative == "absolute" else eigenvalues).clamp(min=floor * largest)
    factor: Tensor = torch.linalg.cholesky((Q * raised) @ Q.T)
    return factor


class Coordinates:
    """The objective as BFGS sees it, in the whitened coordinates a of a subspace.

    Attributes:
        start: the information at a = 0.
        evaluations: the number of evaluations of f before BFGS.
        agreement: the ratio of actual to predicted decrease of f at the model's minimum; NaN if not computed.
    """

    def __init__(self, lines: LossOnLines, subspace: Subspace, options: Search, start: SearchStart) -> None:
        self._lines, self._V = lines, subspace.V
        floor = torch.finfo(self._V.dtype).eps ** 0.5 if options.floor is None else options.floor
        self._C = whiten(subspace.H, floor, options.negative)  # lines 7-8
        self._a = torch.zeros(self.m, dtype=torch.float64, device="cpu")
        self._line: tuple[Tensor, Tensor] = self._a, self._a  # coefficients of its origin and direction
        self._reach = torch.finfo(self._V.dtype).max / 2
        self._at_zero = start.at_zero
        self.start = start
        self.evaluations = 0
        self.agreement = math.nan

    @property
    def m(self) -> int:
        """The dimension of the subspace."""
        return len(self._C)

    def at_zero(self) -> tuple[float, Tensor]:
        """Return f and its gradient [P_local] at a = 0."""
        if self._at_zero is None:
            self.evaluations += 1
            self._at_zero = self._lines.at_origin()
        return self._at_zero

    def begun(self) -> tuple[float, Tensor]:
        """Return f and its gradient [m] at a = 0, and free the gradient [P_local]."""
        before, g = self.at_zero()
        self._at_zero = None
        return before, self.project(g)

    def value_at_zero(self) -> float:
        """Return f at a = 0, by a forward pass if it is not known."""
        if self._at_zero is not None:
            return self._at_zero[0]
        self.evaluations += 1
        return self._lines.value()

    def value(self, c: Tensor) -> float:
        """Return f at the step Vᵀc, by a forward pass."""
        self.evaluations += 1
        return self._lines.value(self.combine(c))

    def step(self, a: Tensor) -> Tensor:
        """Line 9: return V̄a = Vᵀ(C⁻ᵀa)."""
        return self.combine(self.coefficients(a))

    def combine(self, c: Tensor) -> Tensor:
        """Return Vᵀc."""
        return self._V.combine(sent(c, self._V.device, self._V.dtype))

    def coefficients(self, a: Tensor) -> Tensor:
        """Return C⁻ᵀa, the step's coefficients in the rows of V."""
        c: Tensor = torch.linalg.solve_triangular(self._C.T, a[:, None], upper=True)[:, 0]
        return c

    def project(self, g: Tensor) -> Tensor:
        """Return V̄ᵀg = C⁻¹(V g)."""
        reduced = self.start.comm.sum(self._V.dots(g)).to("cpu", torch.float64)
        projected: Tensor = torch.linalg.solve_triangular(self._C, reduced[:, None], upper=False)[:, 0]
        return projected

    def found(
        self,
        a: Tensor,
        before: float,
        after: float,
        reason: StopReason,
        iterations: int,
        evaluations: int,
        *,
        exact: bool = False,
    ) -> SearchResult:
        """Line 12: return the result with the step V̄a."""
        d = self.step(a) if bool((a != 0).any()) else None
        c = tuple(self.coefficients(a).tolist())
        return SearchResult(d, before, after, iterations, evaluations, reason, c, exact, self.agreement)

    def begin(self, x: Tensor, p: Tensor) -> None:
        """Begin a line from x along p."""
        self._lines.begin(self.step(p), moved=not torch.equal(x, self._a))
        self._a = x
        self._line = self.coefficients(x), self.coefficients(p)

    def at(self, alpha: float) -> tuple[float, float]:
        """Return value and slope along the line."""
        c, along = self._line
        if not alpha < self._reach or not self.within_reach(c + alpha * along):
            return math.inf, math.nan
        return self._lines.at(alpha)

    def within_reach(self, c: Tensor) -> bool:
        """Return whether the step Vᵀc is representable in the dtype of V."""
        return float(c.abs().sum()) < self._reach

    def gradient(self) -> Tensor:
        """Return the gradient [m] at the last trial."""
        return self.project(self._lines.gradient())
