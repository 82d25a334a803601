"""Equations that nothing was chosen on when they were first run: no default of the flow, no rival's setting, no seed.

``problems.SHOWN`` has those of which that still holds. Conventions, weights and points are those of other equations.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from experiments.pinn import points as places
from experiments.pinn.equations import PI, Equation, Field, Residual, Term, derivatives, equals, starts_at_rest

_DIFFUSION, _RATE = 0.01, 6.0  # of Fisher's equation: a front 0.1 wide, that moves by 0.5
_FREQUENCY = 0.6  # of the breather


def klein_gordon(u: Field, points: Tensor) -> Tensor:
    """u_tt − u_xx + u³ − f, f that of the solution x cos 5πt + (xt)³."""
    value, _, (u_xx, u_tt) = derivatives(u, points, (0, 1))
    x, t = points.detach().unbind(1)
    f = -25 * PI**2 * x * torch.cos(5 * PI * t) + 6 * x * t * (x**2 - t**2) + _growing(points.detach()) ** 3
    return u_tt - u_xx + value**3 - f


def sine_gordon(u: Field, points: Tensor) -> Tensor:
    """u_tt − u_xx + sin u."""
    value, _, (u_xx, u_tt) = derivatives(u, points, (0, 1))
    return u_tt - u_xx + torch.sin(value)


def fisher(u: Field, points: Tensor) -> Tensor:
    """u_t − 0.01 u_xx − 6 u (1 − u)."""
    value, first, (u_xx,) = derivatives(u, points, (0,))
    return first[:, 1] - _DIFFUSION * u_xx - _RATE * value * (1 - value)


def cubic_poisson(u: Field, points: Tensor) -> Tensor:
    """−Δu + u³ − f, f that of the solution sin πx sin πy + ½ sin 3πx sin 2πy."""
    value, _, (u_xx, u_yy) = derivatives(u, points, (0, 1))
    one, two = _modes(points.detach())
    return -u_xx - u_yy + value**3 - (2 * PI**2 * one + 13 * PI**2 * two + (one + two) ** 3)


def _growing(points: Tensor) -> Tensor:
    x, t = points.unbind(1)
    return x * torch.cos(5 * PI * t) + (x * t) ** 3


def _breather(points: Tensor) -> Tensor:
    x, t = points.unbind(1)
    width = math.sqrt(1 - _FREQUENCY**2)
    return 4 * torch.atan(width / _FREQUENCY * torch.cos(_FREQUENCY * t) / torch.cosh(width * x))


def _front(points: Tensor) -> Tensor:
    x, t = points.unbind(1)
    return (1 + torch.exp(math.sqrt(_RATE / (6 * _DIFFUSION)) * x - 5 * _RATE * t / 6)) ** -2.0


def _modes(points: Tensor) -> tuple[Tensor, Tensor]:
    x, y = points.unbind(1)
    return torch.sin(PI * x) * torch.sin(PI * y), torch.sin(3 * PI * x) * torch.sin(2 * PI * y) / 2


def _two_modes(points: Tensor) -> Tensor:
    one, two = _modes(points)
    return one + two


def _evolving(
    low: tuple[float, float], high: tuple[float, float], interior: Residual, exact: Field, *at_start: Residual
) -> Equation:
    """With the solution's values at the start and at both ends."""
    values = functools.partial(equals, target=exact)
    terms = (Term(interior, places.inside, 1.0), Term(values, places.at_start), Term(values, places.at_ends))
    return Equation(low, high, ("x", "t"), (*terms, *(Term(each, places.at_start) for each in at_start)), exact)


UNSEEN: dict[str, Equation] = {
    "klein-gordon": _evolving((0.0, 0.0), (1.0, 1.0), klein_gordon, _growing, starts_at_rest),
    "sine-gordon": _evolving((-10.0, 0.0), (10.0, 10.0), sine_gordon, _breather, starts_at_rest),
    "fisher": _evolving((0.0, 0.0), (1.0, 1.0), fisher, _front),
    "cubic-poisson": Equation(
        (-1.0, -1.0),
        (1.0, 1.0),
        ("x", "y"),
        (
            Term(cubic_poisson, places.inside, 1.0),
            Term(functools.partial(equals, target=_two_modes), places.all_faces),
        ),
        _two_modes,
    ),
}
