"""The equations of the study: residuals of the interior, boundary and initial terms, and solutions to compare with.

A residual is a function of a field u (any differentiable callable, points [n, d] → values [n], or [n, k] of k fields)
and of points [n, d]; it is zero for the solution. Columns of the points are x and y, or x and t. Interior terms have
weight 1, all boundary, initial and data terms weight 100, in every equation. All conditions are soft, and nothing is
built into the network, unless the equation says so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from experiments.pinn import networks, references
from experiments.pinn import points as places

Field = Callable[[Tensor], Tensor]
Residual = Callable[[Field, Tensor], Tensor]
PI = math.pi


@dataclasses.dataclass(frozen=True)
class Term:
    """A condition, where it is to hold, and its weight in the loss; ``data``: so many places, never drawn anew."""

    residual: Residual
    place: places.Place
    weight: float = 100.0
    data: int | None = None


@dataclasses.dataclass(frozen=True)
class Equation:
    """Terms on a box, the interior first, and the solution.

    ``grid`` is the number of test points along each axis, ``build`` makes the model.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    names: tuple[str, str]  # of the first two columns
    terms: tuple[Term, ...]
    exact: Field
    grid: tuple[int, int] = (101, 101)
    build: networks.Build = networks.one


def derivatives(u: Field, points: Tensor, second: Sequence[int] = ()) -> tuple[Tensor, Tensor, list[Tensor]]:
    """u [n], its gradient [n, d] and ∂²u/∂x_c² [n] for the columns c of ``second``."""
    value, (first,), (twice,) = derivatives_of_fields(u, points, second)
    return value, first, twice


def derivatives_of_fields(
    u: Field, points: Tensor, *second: Sequence[int]
) -> tuple[Tensor, list[Tensor], list[list[Tensor]]]:
    """u [n] or [n, k], and of the first of its fields, one for each ``second``, what ``derivatives`` has of one.

    Where gradients are switched off outside, they are switched on for this, and the last graph is not built.
    """
    outside = torch.is_grad_enabled()
    gradients, twice = list[Tensor](), list[list[Tensor]]()
    with torch.enable_grad():
        at = points if points.requires_grad else points.detach().requires_grad_()
        if isinstance(u, networks.Several):  # columns of one tensor would each be differentiated through all networks
            fields = u.fields(at)
            value = torch.stack(fields, 1)
        else:
            value = u(at)
            fields = [value] if value.ndim == 1 else list(value.unbind(1))
        for field, columns in zip(fields, second, strict=False):
            slope = functools.partial(torch.autograd.grad, inputs=at, retain_graph=True)
            (first,) = slope(field.sum(), create_graph=outside or bool(columns))
            twice.append([slope(first[:, c].sum(), create_graph=outside)[0][:, c] for c in columns])
            gradients.append(first if outside else first.detach())
    return value if outside else value.detach(), gradients, twice


def minus_laplacian(u: Field, points: Tensor, f: Field) -> Tensor:
    """−Δu − f."""
    _, _, second = derivatives(u, points, range(points.shape[1]))
    return -torch.stack(second).sum(0) - f(points.detach())


def burgers(u: Field, points: Tensor, viscosity: float = references.BURGERS_VISCOSITY) -> Tensor:
    """u_t + u u_x − ν u_xx."""
    value, first, (u_xx,) = derivatives(u, points, (0,))
    return first[:, 1] + value * first[:, 0] - viscosity * u_xx


def convection(u: Field, points: Tensor, speed: float) -> Tensor:
    """u_t + β u_x."""
    _, first, _ = derivatives(u, points)
    return first[:, 1] + speed * first[:, 0]


def wave(u: Field, points: Tensor) -> Tensor:
    """u_tt − 4 u_xx."""
    _, _, (u_xx, u_tt) = derivatives(u, points, (0, 1))
    return u_tt - 4 * u_xx


def reaction(u: Field, points: Tensor, rate: float) -> Tensor:
    """u_t − ρ u (1 − u)."""
    value, first, _ = derivatives(u, points)
    return first[:, 1] - rate * value * (1 - value)


def allen_cahn(u: Field, points: Tensor) -> Tensor:
    """u_t − 1e-4 u_xx − 5u + 5u³."""
    value, first, (u_xx,) = derivatives(u, points, (0,))
    source = references.ALLEN_CAHN_RATE * (value - value**3)
    return first[:, 1] - references.ALLEN_CAHN_DIFFUSION * u_xx - source


def helmholtz(u: Field, points: Tensor, q: Field) -> Tensor:
    """Δu + u − q."""
    value, _, (u_xx, u_yy) = derivatives(u, points, (0, 1))
    return u_xx + u_yy + value - q(points.detach())


def equals(u: Field, points: Tensor, target: Field) -> Tensor:
    """u − target: Dirichlet and initial values."""
    return u(points) - target(points.detach())


def starts_at_rest(u: Field, points: Tensor) -> Tensor:
    """u_t."""
    return derivatives(u, points)[1][:, 1]


def periodic(u: Field, points: Tensor, length: float) -> Tensor:
    """u at the left end minus u at the right end."""
    return u(points) - u(_right(points, length))


def periodic_slope(u: Field, points: Tensor, length: float) -> Tensor:
    """u_x at the left end minus u_x at the right end."""
    return derivatives(u, points)[1][:, 0] - derivatives(u, _right(points, length))[1][:, 0]


def _right(points: Tensor, length: float) -> Tensor:
    return points + points.new_tensor((length, 0.0))


def _zero(points: Tensor) -> Tensor:
    return torch.zeros_like(points[:, 0])


def _sines(points: Tensor, scale: float, waves: int) -> Tensor:
    """scale · sin πx sin(waves · πy)."""
    return scale * torch.sin(PI * points[:, 0]) * torch.sin(waves * PI * points[:, 1])


def _cosines(points: Tensor, scale: float = 1.0) -> Tensor:
    """scale · Σ_i cos πx_i."""
    return scale * torch.cos(PI * points).sum(1)


def _travelling(points: Tensor, speed: float) -> Tensor:
    return torch.sin(points[:, 0] - speed * points[:, 1])


def _standing(points: Tensor) -> Tensor:
    x, t = points.unbind(1)
    return torch.sin(PI * x) * torch.cos(2 * PI * t) + torch.sin(4 * PI * x) * torch.cos(8 * PI * t) / 2


def _logistic(points: Tensor, rate: float) -> Tensor:
    x, t = points.unbind(1)
    h = torch.exp(-((x - PI) ** 2) / (2 * (PI / 4) ** 2))
    grown = h * torch.exp(rate * t)
    return grown / (grown + 1 - h)


def _minus_sine(points: Tensor) -> Tensor:
    return -torch.sin(PI * points[:, 0])


def _squared_cosine(points: Tensor) -> Tensor:
    return points[:, 0].square() * torch.cos(PI * points[:, 0])


def _poisson(low: float, high: float, dimension: int, exact: Field, f: Field) -> Equation:
    return Equation(
        (low,) * dimension,
        (high,) * dimension,
        ("x", "y") if dimension == 2 else ("x1", "x2"),
        (
            Term(functools.partial(minus_laplacian, f=f), places.inside, 1.0),
            Term(functools.partial(equals, target=exact), places.all_faces),
        ),
        exact,
    )


def _circle(interior: Residual, exact: Field) -> Equation:
    """On x ∈ [0, 2π], periodic, t ∈ [0, 1]."""
    return Equation(
        (0.0, 0.0),
        (2 * PI, 1.0),
        ("x", "t"),
        (
            Term(interior, places.inside, 1.0),
            Term(functools.partial(equals, target=exact), places.at_start),
            Term(functools.partial(periodic, length=2 * PI), places.at_left),
        ),
        exact,
        (257, 101),
    )


def _convection(speed: float) -> Equation:
    return _circle(functools.partial(convection, speed=speed), functools.partial(_travelling, speed=speed))


def burgers_of(viscosity: float) -> Equation:
    """On x ∈ [−1, 1], t ∈ [0, 1], from −sin πx."""
    return Equation(
        (-1.0, 0.0),
        (1.0, 1.0),
        ("x", "t"),
        (
            Term(functools.partial(burgers, viscosity=viscosity), places.inside, 1.0),
            Term(functools.partial(equals, target=_minus_sine), places.at_start),
            Term(_ZERO, places.at_ends),
        ),
        functools.partial(references.burgers, viscosity=viscosity),
        (257, 101),
    )


_ZERO = functools.partial(equals, target=_zero)
_SINES = functools.partial(_sines, scale=1.0, waves=1)
_WAVES = functools.partial(_sines, scale=1.0, waves=4)

EQUATIONS: dict[str, Equation] = {
    "poisson2d": _poisson(-1.0, 1.0, 2, _SINES, functools.partial(_sines, scale=2 * PI**2, waves=1)),
    "poisson5d": _poisson(0.0, 1.0, 5, _cosines, functools.partial(_cosines, scale=PI**2)),
    "burgers": burgers_of(references.BURGERS_VISCOSITY),
    "convection30": _convection(30.0),
    "convection40": _convection(40.0),
    "wave": Equation(
        (0.0, 0.0),
        (1.0, 1.0),
        ("x", "t"),
        (
            Term(wave, places.inside, 1.0),
            Term(functools.partial(equals, target=_standing), places.at_start),
            Term(starts_at_rest, places.at_start),
            Term(_ZERO, places.at_ends),
        ),
        _standing,
    ),
    "reaction": _circle(functools.partial(reaction, rate=5.0), functools.partial(_logistic, rate=5.0)),
    "allen-cahn": Equation(
        (-1.0, 0.0),
        (1.0, 1.0),
        ("x", "t"),
        (
            Term(allen_cahn, places.inside, 1.0),
            Term(functools.partial(equals, target=_squared_cosine), places.at_start),
            Term(functools.partial(periodic, length=2.0), places.at_left),
            Term(functools.partial(periodic_slope, length=2.0), places.at_left),
        ),
        references.allen_cahn,
        (257, 101),
    ),
    "helmholtz": Equation(
        (-1.0, -1.0),
        (1.0, 1.0),
        ("x", "y"),
        (
            Term(
                functools.partial(helmholtz, q=functools.partial(_sines, scale=1 - 17 * PI**2, waves=4)),
                places.inside,
                1.0,
            ),
            Term(_ZERO, places.all_faces),
        ),
        _WAVES,
        (201, 201),
    ),
}
