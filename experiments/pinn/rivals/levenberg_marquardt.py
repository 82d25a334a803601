"""Levenberg–Marquardt on all residuals, dense, with the damping rule of Nielsen 1999.

Letters: f = ½‖ρ‖², J = ∂ρ/∂θ [N, n], g = Jᵀρ, x = (JᵀJ + λ)⁻¹g, θ ← θ − x. The quadratic model predicts a decrease of
½(λxᵀx + gᵀx); γ is the part of it that came true. A step that lowers f is kept and λ multiplied by
max(1/down, 1 − (2γ − 1)³); one that does not is refused and λ multiplied by up, 2·up, 4·up … with the same J, so that
a retry costs a factorisation and a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from experiments.pinn.rivals.damped import DampedSystem
from experiments.pinn.rivals.least_squares import ALL, LeastSquares, Trainable

_SMALLEST, _LARGEST = 1e-15, 1e8  # of λ: beyond the latter, steps are of the size of rounding


def levenberg_marquardt(
    problem: Trainable, *, seed: int, start: float = 1e-3, up: float = 2.0, down: float = 3.0
) -> Iterator[float]:
    """One accepted step at a time.

    Args:
        problem: what is solved.
        seed: not used: nothing is random.
        start: λ of the first step.
        up: factor of λ after the first refusal of a step.
        down: largest divisor of λ after a success.
    """
    squares = LeastSquares(problem)
    f, damping = squares.value(), start
    if not math.isfinite(f):
        yield math.nan
        return
    while True:
        J, rho = squares.rows(ALL)
        system, g, theta, factor = DampedSystem(J), J.T @ rho, squares.point(), up
        while damping <= _LARGEST:
            x = system.solve(rho, damping)
            if x is not None:
                squares.move(theta, x, -1.0)
                after = squares.value()
                if after < f:
                    break
            damping *= factor
            factor *= 2
        else:
            squares.move(theta)
            return
        gain = (f - after) / max(0.5 * float(damping * (x @ x) + g @ x), 1e-300)
        damping = max(damping * max(1 / down, 1 - (2 * min(gain, 2.0) - 1) ** 3), _SMALLEST)
        f = after
        yield f
        if squares.renewed():
            f = squares.value()
