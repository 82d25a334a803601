"""Further equations: systems, unknown coefficients, third derivatives, and networks of features of the coordinates.

``problems.CHOOSING`` and ``problems.SHOWN`` say on which of them constants were chosen, and on which nothing was.
Conventions, weights and points are those of the other equations. Of several fields, columns of u [n, k], a term has
all residuals in one tensor [n, c]; an unknown coefficient is a field that is constant.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from experiments.pinn import networks, references
from experiments.pinn import points as places
from experiments.pinn.equations import (
    PI,
    Equation,
    Field,
    Residual,
    Term,
    burgers_of,
    derivatives,
    derivatives_of_fields,
    equals,
    helmholtz,
    periodic,
    periodic_slope,
)
from experiments.pinn.images import FourierNetwork

_REYNOLDS = 40.0
_DECAY = _REYNOLDS / 2 - math.sqrt(_REYNOLDS**2 / 4 + 4 * PI**2)  # λ of Kovasznay's flow
_CONDUCTIVITY, _GUESS = 0.1, 1.0  # of the heat equation, and where it starts
_DIFFUSIONS = (0.01, 0.05)  # of u and v
_SPEED, _VISCOSITY = 10.0, 0.02  # of the transport
_WAVES = (4, 6)  # of the Helmholtz equation
_DEVIATION = 2 * PI * 2.0  # of the frequencies of its network


def kovasznay(u: Field, points: Tensor) -> Tensor:
    """Momentum u u_x + v u_y + p_x − Δu/Re, the same for v with p_y, and mass u_x + v_y, of fields u, v, p."""
    value, (of_u, of_v, of_p), (twice_u, twice_v, _) = derivatives_of_fields(u, points, (0, 1), (0, 1), ())
    flow = value[:, :2]
    x = (flow * of_u).sum(1) + of_p[:, 0] - (twice_u[0] + twice_u[1]) / _REYNOLDS
    y = (flow * of_v).sum(1) + of_p[:, 1] - (twice_v[0] + twice_v[1]) / _REYNOLDS
    return torch.stack([x, y, of_u[:, 0] + of_v[:, 1]], 1)


def heat(u: Field, points: Tensor) -> Tensor:
    """u_t − k u_xx of fields u, k."""
    value, (first,), ((u_xx,),) = derivatives_of_fields(u, points, (0,))
    return first[:, 1] - value[:, 1] * u_xx


def kdv(u: Field, points: Tensor) -> Tensor:
    """u_t + u u_x + 0.0025 u_xxx."""
    value, (of_u_xx,), _ = derivatives_of_fields(functools.partial(_curvature_and_below, u), points, ())
    _, u_, u_x, u_t = value.unbind(1)
    return u_t + u_ * u_x + references.KDV_DISPERSION * of_u_xx[:, 0]


def periodic_curvature(u: Field, points: Tensor, length: float) -> Tensor:
    """u_xx at the left end minus u_xx at the right end."""
    return periodic(lambda at: derivatives(u, at, (0,))[2][0], points, length)


def diffusion(u: Field, points: Tensor) -> Tensor:
    """−∇·(a∇u) − f of fields u, a; f that of the solution."""
    value, (of_u, of_a), (twice, _) = derivatives_of_fields(u, points, (0, 1), ())
    x, y = points.detach().unbind(1)
    (sx, cx), (sy, cy) = ((torch.sin(PI * each), torch.cos(PI * each)) for each in (x, y))
    s2, c2 = torch.sin(2 * PI * x), torch.cos(2 * PI * x)
    slopes = PI / 2 * cx * sy * (1 + PI / 2 * c2 * sy) + PI / 2 * sx * cy * (1 + PI / 4 * s2 * cy)
    f = 5 * PI**2 / 4 * s2 * sy * (1 + sx * sy / 2) - slopes
    return -value[:, 1] * (twice[0] + twice[1]) - (of_u * of_a).sum(1) - f


def reaction_diffusion(u: Field, points: Tensor) -> Tensor:
    """u_t − D₁ u_xx − u + u³ + v − f and v_t − D₂ v_xx − u + v − g of fields u, v; f and g those of the solution."""
    value, first, ((u_xx,), (v_xx,)) = derivatives_of_fields(u, points, (0,), (0,))
    (u_, v), (one, two) = value.unbind(1), _coupled(points.detach()).unbind(1)
    x, t = points.detach().unbind(1)
    D1, D2 = _DIFFUSIONS
    f = -2 * PI * torch.sin(2 * PI * x) * torch.sin(2 * PI * t) + (4 * PI**2 * D1 - 1) * one + one**3 + two
    g = 9 * PI**2 * D2 * two - one
    return torch.stack([first[0][:, 1] - D1 * u_xx - u_ + u_**3 + v - f, first[1][:, 1] - D2 * v_xx - u_ + v - g], 1)


def transport(u: Field, points: Tensor) -> Tensor:
    """u_t + 10 u_x − 0.02 u_xx."""
    _, first, (u_xx,) = derivatives(u, points, (0,))
    return first[:, 1] + _SPEED * first[:, 0] - _VISCOSITY * u_xx


def first_equals(u: Field, points: Tensor, target: Field) -> Tensor:
    """The first field minus that of the target."""
    return u(points)[:, 0] - target(points.detach())[:, 0]


def _curvature_and_below(u: Field, at: Tensor) -> Tensor:
    """u_xx, u, u_x, u_t."""
    value, first, (u_xx,) = derivatives(u, at, (0,))
    return torch.stack([u_xx, value, *first.unbind(1)], 1)


def _flow(points: Tensor) -> Tensor:
    x, y = points.unbind(1)
    decay = torch.exp(_DECAY * x)
    u, v = 1 - decay * torch.cos(2 * PI * y), _DECAY / (2 * PI) * decay * torch.sin(2 * PI * y)
    return torch.stack([u, v, (1 - decay.square()) / 2], 1)


def _cooling(points: Tensor) -> Tensor:
    x, t = points.unbind(1)
    k = torch.full_like(x, _CONDUCTIVITY)
    slow = torch.exp(-(PI**2) * k * t) * torch.sin(PI * x)
    return torch.stack([slow + torch.exp(-9 * PI**2 * k * t) * torch.sin(3 * PI * x) / 2, k], 1)


def _cosine(points: Tensor) -> Tensor:
    return torch.cos(PI * points[:, 0])


def _conducted(points: Tensor) -> Tensor:
    """x + y + ¼ sin 2πx sin πy, which grows with y everywhere, so that it says what a is; a = 1 + ½ sin πx sin πy."""
    x, y = points.unbind(1)
    u = x + y + torch.sin(2 * PI * x) * torch.sin(PI * y) / 4
    return torch.stack([u, 1 + torch.sin(PI * x) * torch.sin(PI * y) / 2], 1)


def _coupled(points: Tensor) -> Tensor:
    x, t = points.unbind(1)
    u = torch.sin(2 * PI * x) * torch.cos(2 * PI * t)
    return torch.stack([u, torch.cos(3 * PI * x) * torch.exp(-t) / 2], 1)


def _carried(points: Tensor) -> Tensor:
    x, t = points.unbind(1)
    at = x - _SPEED * t
    return torch.exp(-_VISCOSITY * t) * torch.sin(at) + torch.exp(-9 * _VISCOSITY * t) * torch.cos(3 * at) / 2


def _fast(points: Tensor, scale: float = 1.0) -> Tensor:
    return scale * torch.sin(PI * points * points.new_tensor(_WAVES)).prod(1)


def _fourier(
    size: networks.Size, low: Sequence[float], high: Sequence[float], seed: int, dtype: torch.dtype
) -> nn.Module:
    """On [−1, 1]ᵈ."""
    return FourierNetwork([len(low), *(size.width,) * size.depth, 1], seed, dtype, _DEVIATION)


def _evolving(interior: Residual, *others: Term, exact: Field, build: networks.Build = networks.one) -> Equation:
    """On x ∈ [0, 1], t ∈ [0, 1]."""
    return Equation(
        (0.0, 0.0), (1.0, 1.0), ("x", "t"), (Term(interior, places.inside, 1.0), *others), exact, build=build
    )


_COOLING = functools.partial(first_equals, target=_cooling)
_COUPLED = functools.partial(equals, target=_coupled)
_TWO = functools.partial(networks.Several, networks=2)

FURTHER: dict[str, Equation] = {
    "heat-inverse": _evolving(
        heat,
        Term(_COOLING, places.at_start),
        Term(_COOLING, places.at_ends),
        Term(_COOLING, places.inside, data=100),
        exact=_cooling,
        build=functools.partial(networks.Several, coefficients=(_GUESS,)),
    ),
    "kovasznay": Equation(
        (-0.5, -0.5),
        (1.0, 1.5),
        ("x", "y"),
        (Term(kovasznay, places.inside, 1.0), Term(functools.partial(equals, target=_flow), places.all_faces)),
        _flow,
        build=functools.partial(networks.one, outputs=3),
    ),
    "kdv": Equation(
        (-1.0, 0.0),
        (1.0, 1.0),
        ("x", "t"),
        (
            Term(kdv, places.inside, 1.0),
            Term(functools.partial(equals, target=_cosine), places.at_start),
            Term(functools.partial(periodic, length=2.0), places.at_left),
            Term(functools.partial(periodic_slope, length=2.0), places.at_left),
            Term(functools.partial(periodic_curvature, length=2.0), places.at_left),
        ),
        references.kdv,
        (257, 101),
    ),
    "burgers01": burgers_of(0.01),
    "poisson-inverse": Equation(
        (0.0, 0.0),
        (1.0, 1.0),
        ("x", "y"),
        (
            Term(diffusion, places.inside, 1.0),
            Term(functools.partial(equals, target=_conducted), places.all_faces),
            Term(functools.partial(first_equals, target=_conducted), places.inside, data=200),
        ),
        _conducted,
        build=_TWO,
    ),
    "reaction-diffusion": _evolving(
        reaction_diffusion,
        Term(_COUPLED, places.at_start),
        Term(_COUPLED, places.at_ends),
        exact=_coupled,
        build=_TWO,
    ),
    "advection-periodic": Equation(
        (0.0, 0.0),
        (2 * PI, 1.0),
        ("x", "t"),
        (
            Term(transport, places.inside, 1.0),
            Term(functools.partial(equals, target=_carried), places.at_start),
        ),
        _carried,
        (257, 101),
        networks.Periodic,
    ),
    "helmholtz-fourier": Equation(
        (-1.0, -1.0),
        (1.0, 1.0),
        ("x", "y"),
        (
            Term(
                functools.partial(
                    helmholtz, q=functools.partial(_fast, scale=1 - (_WAVES[0] ** 2 + _WAVES[1] ** 2) * PI**2)
                ),
                places.inside,
                1.0,
            ),
            Term(functools.partial(equals, target=_fast), places.all_faces),
        ),
        _fast,
        (201, 201),
        _fourier,
    ),
}
