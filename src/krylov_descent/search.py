"""Algorithm 3, lines 7-12: whiten the subspace by its own curvature and minimise the true loss over it.

Letters: V [m, P] basis, H̄ [m, m], Ĥ floored H̄ = C Cᵀ, a [m] coefficients, step d = V̄ a with V̄ = Vᵀ C⁻ᵀ [P, m].
V̄ is never formed: C⁻ᵀ is applied to a. Everything of size m is float64 on the CPU, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from krylov_descent.basis import Subspace
from krylov_descent.bfgs import bfgs
from krylov_descent.distributed import Comm
from krylov_descent.report import StopReason


@dataclass(frozen=True)
class Search:
    """Settings of the search over the subspace; the defaults need no tuning.

    Args:
        iterations: cap on BFGS iterations; 30 is the paper's (section 5.2).
        evaluations: cap on evaluations of f and its gradient on C. Two per iteration: more are never needed in
            practice.
        tolerance: stop when the predicted decrease is below this part of |f|. None is the rounding noise of the
            dtype: 1e-6 in float32, 2e-15 in float64.
        floor: ε, eigenvalues of H̄ are floored at ε·max|λ|. None is the square root of the dtype's precision: 3.5e-4
            in float32, near the paper's 1e-4 (section 4), and 1.5e-8 in float64, where the paper's would hide from
            the search the directions that matter at the end (docs/paper-map.md has the measurement).
        negative: what becomes of negative eigenvalues: "floor" raises them to the floor as in the paper;
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
                raise ValueError(f"Search({name}={getattr(self, name)}): must be at least 1.")
        if self.tolerance is not None and not 0 <= self.tolerance < 1:
            raise ValueError(f"Search(tolerance={self.tolerance}): must be in [0, 1).")
        if self.floor is not None and not 0 < self.floor <= 1:
            raise ValueError(f"Search(floor={self.floor}): must be in (0, 1]; the paper's is 1e-4.")
        if self.negative not in ("floor", "absolute"):
            raise ValueError(f"Search(negative={self.negative!r}): must be 'floor' or 'absolute'.")


@dataclass(frozen=True, eq=False)
class Found:
    """The minimum over the subspace.

    Attributes:
        d: the step [P_local], or None if no better point than the start was found.
        before, after: f on C at the start of the search and at its end.
    """

    d: Tensor | None
    before: float
    after: float
    iterations: int
    evaluations: int
    stop_reason: StopReason


def whiten(H: Tensor, floor: float, negative: str = "floor") -> Tensor:
    """Lines 7-8: H̄ → C, lower triangular, with C Cᵀ = Ĥ.

    Deviation from the paper: the floor is ε·max|λ|, not ε·max λ, so that an all-negative H̄ still has a
    positive one; H̄ = 0 (a loss without curvature) gives C = I.
    """
    eigenvalues, Q = torch.linalg.eigh(H)
    largest = float(eigenvalues.abs().max())
    if largest == 0:
        return torch.eye(len(H), dtype=H.dtype, device=H.device)
    raised = (eigenvalues.abs() if negative == "absolute" else eigenvalues).clamp(min=floor * largest)
    factor: Tensor = torch.linalg.cholesky((Q * raised) @ Q.T)
    return factor


def search_subspace(
    evaluate: Callable[[Tensor], tuple[float, Tensor]],
    subspace: Subspace,
    options: Search,
    noise: float,
    comm: Comm,
    at_zero: tuple[float, Tensor] | None = None,
) -> Found:
    """Minimise f(θ + V̄a) over a.

    Args:
        evaluate: d [P_local] → f(θ + d) and its gradient [P_local]; d may be overwritten.
        subspace: V and H̄.
        options: caps, floor and tolerance.
        noise: relative rounding noise of f.
        comm: completes inner products.
        at_zero: evaluate(0), if it is known.
    """
    V = subspace.V
    floor = torch.finfo(V.dtype).eps ** 0.5 if options.floor is None else options.floor
    C = whiten(subspace.H, floor, options.negative)  # lines 7-8

    def step(a: Tensor) -> Tensor:  # line 9: V̄a = Vᵀ(C⁻ᵀa)
        c = torch.linalg.solve_triangular(C.T, a[:, None], upper=True)[:, 0]
        return V.combine(c.to(V.device, V.dtype))

    def project(g: Tensor) -> Tensor:  # V̄ᵀg = C⁻¹(V g)
        reduced = comm.sum(V.dots(g)).to("cpu", torch.float64)
        projected: Tensor = torch.linalg.solve_triangular(C, reduced[:, None], upper=False)[:, 0]
        return projected

    def fun(a: Tensor) -> tuple[float, Tensor]:
        f, g = evaluate(step(a))
        return f, project(g)

    zero = torch.zeros(len(C), dtype=torch.float64, device="cpu")  # line 10
    at_rest = fun(zero) if at_zero is None else (at_zero[0], project(at_zero[1]))
    first = int(at_zero is None)
    a0, start = zero, at_rest
    if subspace.start is not None:
        # Begin where the builder says, if that is better than not moving.
        offered = C.T @ subspace.start
        at_offered = fun(offered)
        first += 1
        if at_offered[0] < at_rest[0]:
            a0, start = offered, at_offered
    result = bfgs(  # line 11
        fun,
        a0,
        max_iterations=options.iterations,
        max_evaluations=max(1, options.evaluations - first),
        tolerance=noise if options.tolerance is None else options.tolerance,
        noise=noise,
        start=start,
    )
    moved = bool((result.x != 0).any())
    return Found(
        step(result.x) if moved else None,  # line 12
        at_rest[0],
        result.f,
        result.iterations,
        first + result.evaluations,
        result.stop_reason,
    )
