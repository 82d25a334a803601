"""Corrected steps move the outputs of a sketch straight, to all orders."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from krylov_descent.flow.straight_steps import Step, StraightSteps
from tests.least_squares import F64

J = torch.randn(5, 12, dtype=F64, generator=torch.Generator().manual_seed(0))
RHO = torch.randn(5, dtype=F64, generator=torch.Generator().manual_seed(1))
B = torch.randn(5, 12, 12, dtype=F64, generator=torch.Generator().manual_seed(2))
PHI = -torch.linalg.pinv(J) @ RHO


def steps(bend: float, seen: list[Tensor] | None = None) -> StraightSteps:
    """Outputs that are quadratic in the parameters, and the loss that is half of their squares."""

    def look(d: Tensor) -> tuple[float, Tensor]:
        if seen is not None:
            seen.append(d)
        change = J @ d + bend * torch.einsum("kij,i,j->k", B, d, d)
        loss = float((RHO + change).square().sum()) / 2
        return (loss if math.isfinite(loss) else math.inf), change

    pinv = torch.linalg.pinv(J)
    return StraightSteps(PHI, float(PHI.norm()), RHO, J @ PHI, lambda e: -pinv @ e, look, lambda v: float(v.norm()))


@pytest.mark.parametrize(("eta", "bend"), [(0.5, -3.0), (1.0, -1.0)])
def test_residuals_shrink_straight(eta: float, bend: float) -> None:
    """Where φ alone is far off."""
    of = steps(bend)
    step = of.at(eta)

    def off(d: Tensor) -> float:
        return float((of.look(d)[1] + eta * RHO).norm() / RHO.norm())

    assert off(eta * PHI) > 0.03
    assert of.look(eta * PHI)[0] > step.loss
    assert step.corrections in (1, 2, 3, 4, 5)
    assert off(step.d) < min(0.1 * max(1 - eta, 0.1), 0.5 * off(eta * PHI))
    assert step.loss == of.look(step.d)[0]


def test_each_correction_gains_an_order() -> None:
    """Of η: the first is geodesic acceleration, with which outputs move straight to third order."""
    off: dict[float, list[float]] = {}
    for eta in (1e-2, 1e-3):
        of = steps(3.0)
        d, found = eta * PHI, []
        for _ in range(3):
            e = of.look(d)[1] - eta * J @ PHI
            found.append(float(e.norm()))
            d = d + of.correct(e)
        off[eta] = found
    orders = [math.log10(a / b) for a, b in zip(off[1e-2], off[1e-3], strict=True)]
    assert orders == pytest.approx([2, 3, 4], abs=0.2)


def test_outputs_that_are_linear_need_no_correction() -> None:
    seen: list[Tensor] = []
    step = steps(0.0, seen).at(0.5)
    assert step.corrections == 0
    assert step.quick
    assert len(seen) == 1


def test_corrections_end_where_they_lead_nowhere() -> None:
    """Beyond the length of the step itself, or if the error does not shrink: the step has not settled."""
    step = steps(100.0).at(1.0)
    assert step.corrections is None
    assert not step.quick
    assert float((step.d - PHI).norm()) <= float(PHI.norm())


def test_corrections_are_taken_over_from_a_step_nearby() -> None:
    seen: list[Tensor] = []
    of = steps(-3.0, seen)
    near = of.at(0.5)
    off = []
    for start in (None, near):
        seen.clear()
        of.at(0.6, start)
        off.append(float((of.look(seen[0])[1] + 0.6 * RHO).norm()))
    assert off[1] < 0.8 * off[0]


def chosen(losses: Callable[[float], float], settles: Callable[[float], int | None], first: float) -> float:
    """The fraction that is chosen of 2, 1, …, 1/16, from one of them."""

    class Known(StraightSteps):
        def at(self, eta: float, near: Step | None = None) -> Step:
            return Step(eta, PHI, losses(eta), 1.0, settles(eta))

    fractions = [2.0**-k for k in range(-1, 5)]
    of = steps(0.0)
    known = Known(of.phi, of.length, of.rho, of.straight, of.correct, of.look, of.norm)
    return known.lowest(fractions, fractions.index(first), 1.0).fraction


def test_longer_steps_are_tried_while_they_settle_quickly() -> None:
    def falling(eta: float) -> float:
        return 1 - eta / 4

    assert chosen(falling, lambda eta: 1, 0.25) == 2
    assert chosen(falling, lambda eta: 1 if eta < 0.5 else 5, 0.25) == 0.5
    assert chosen(falling, lambda eta: 1 if eta < 0.5 else None, 0.25) == 0.5
    assert chosen(lambda eta: abs(eta - 0.5), lambda eta: 1, 0.25) == 0.5


def test_shorter_steps_are_tried_where_none_settles() -> None:
    assert chosen(lambda eta: abs(eta - 0.125), lambda eta: None, 1.0) == 0.125
    assert chosen(lambda eta: math.inf if eta > 0.1 else eta, lambda eta: None, 1.0) == 0.0625  # out of overflow
    assert chosen(lambda eta: 1 - eta / 4, lambda eta: None, 0.5) == 1.0  # once, as no shorter one is lower


def test_a_step_that_settles_slowly_is_taken_if_it_lowers_the_loss() -> None:
    assert chosen(lambda eta: eta / 4, lambda eta: 5, 1.0) == 1.0
    assert chosen(lambda eta: eta + 0.01, lambda eta: 5, 1.0) == 0.0625
