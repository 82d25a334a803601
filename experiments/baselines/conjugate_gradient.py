"""Preconditioned conjugate gradients with the stop rule and the kept iterates of Martens' Hessian-free code.

Letters: φ(x) = ½xᵀAx − bᵀx, r = Ax − b its gradient, y = M⁻¹r, p the direction; all vectors are flat [P].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from krylov_descent.report import StopReason

_TOLERANCE = 5e-4  # of relative progress per iteration
_GAP, _GAP_SHARE = 10, 0.1  # progress is measured over max(10, 0.1 i) iterations
_FIRST_KEPT, _KEPT_RATIO = 5.0, 1.3


class Iterate(NamedTuple):
    """An iterate that was kept: after how many iterations, where, and φ there."""

    iteration: int
    x: Tensor
    value: float


@dataclass(frozen=True, eq=False)
class CGResult:
    """Iterates in order, of which the last is where CG ended; the iterations taken; and why it ended.

    CONVERGED by the relative stop or a zero residual, MAX_ITERATIONS, NEGATIVE_CURVATURE or NON_FINITE.
    """

    iterates: tuple[Iterate, ...]
    iterations: int
    stop_reason: StopReason


def stalled(values: Sequence[float]) -> bool:
    """The stop rule, given φ after iterations 1 … i: over the last k = max(10, ⌈0.1 i⌉), less than 5e-4·k of |φ|.

    Example:
        >>> stalled([-1.0] * 10), stalled([-1.0] * 11), stalled([1.0] * 11)
        (False, True, False)
    """
    i = len(values)
    k = max(_GAP, math.ceil(_GAP_SHARE * i))
    if i <= k:
        return False
    now, before = values[-1], values[-1 - k]
    # Past zero again, rounding has taken over.
    return before < 0 and (now >= 0 or (now - before) / now < _TOLERANCE * k)


# Deviations from Martens' code:
# 1. Where curvature is negative, both end and keep what there is; so does this where a number is not finite.
# 2. A residual of exactly zero ends it, which there leads to 0/0.
# 3. No product is spent on a start at zero.
def conjugate_gradient(
    product: Callable[[Tensor], Tensor],
    b: Tensor,
    x0: Tensor | None = None,
    precondition: Callable[[Tensor], Tensor] | None = None,
    *,
    max_iterations: int = 250,
) -> CGResult:
    """Minimise φ(x) = ½xᵀAx − bᵀx.

    Args:
        product: v → Av; it may return the same buffer each time.
        b: [P]; the solution is A⁻¹b.
        x0: where to start; None for zero. It is not written to.
        precondition: r → M⁻¹r, of which the same is true; None for the identity.
        max_iterations: the cap.

    Returns:
        Iterates after 5, 7, 9, 11, 15, … iterations (⌈5·1.3ʲ⌉), and the last.

    Example:
        >>> A = torch.diag(torch.tensor([1.0, 4.0]))
        >>> result = conjugate_gradient(lambda v: A @ v, torch.tensor([1.0, 2.0]))
        >>> result.stop_reason.value, result.iterates[-1].x.tolist()
        ('converged', [1.0, 0.5])
    """
    x = torch.zeros_like(b) if x0 is None else x0.clone()
    r = -b if x0 is None else product(x0) - b
    y = r if precondition is None else precondition(r)
    p = -y
    ry = float(torch.dot(r, y))
    value = _value(x, r, b)
    values: list[float] = []
    kept: list[Iterate] = []
    following = _FIRST_KEPT
    reason = StopReason.MAX_ITERATIONS
    while len(values) < max_iterations:
        if not 0 < ry < math.inf:
            reason = StopReason.CONVERGED if ry == 0 else StopReason.NON_FINITE
            break
        Ap = product(p)
        pAp = float(torch.dot(p, Ap))
        if not 0 < pAp < math.inf:
            reason = StopReason.NEGATIVE_CURVATURE if -math.inf < pAp <= 0 else StopReason.NON_FINITE
            break
        alpha = ry / pAp
        r.add_(Ap, alpha=alpha)
        y = r if precondition is None else precondition(r)
        ry, before = float(torch.dot(r, y)), ry
        if not math.isfinite(ry):
            reason = StopReason.NON_FINITE
            break
        x.add_(p, alpha=alpha)
        p.mul_(ry / before).sub_(y)
        value = _value(x, r, b)
        values.append(value)
        if len(values) == math.ceil(following):
            kept.append(Iterate(len(values), x.clone(), value))
            following *= _KEPT_RATIO
        if stalled(values):
            reason = StopReason.CONVERGED
            break
    if not kept or kept[-1].iteration < len(values):
        kept.append(Iterate(len(values), x, value))
    return CGResult(tuple(kept), len(values), reason)


def _value(x: Tensor, r: Tensor, b: Tensor) -> float:
    """φ = ½xᵀ(r − b); the products are summed in the vectors' dtype, and subtracted in float64."""
    return 0.5 * (float(torch.dot(x, r)) - float(torch.dot(x, b)))
