"""Solutions without a closed form, in float64: Burgers' by quadrature, Allen–Cahn's and KdV's by a spectral method.

Letters: points [n, 2] with columns x and t; ν viscosity; û Fourier coefficients of u, k their wave numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

BURGERS_VISCOSITY = 0.01 / math.pi
ALLEN_CAHN_DIFFUSION, ALLEN_CAHN_RATE = 1e-4, 5.0
TIMES = 100  # the solution is kept at t = 0, 1/100, …, 1
KDV_DISPERSION = 0.0025


def burgers(points: Tensor, order: int = 128, viscosity: float = BURGERS_VISCOSITY) -> Tensor:
    """u [n] of u_t + u u_x = ν u_xx, u(x, 0) = −sin πx, by the formula of Cole and Hopf.

    u = −∫ sin(πy) w dη / ∫ w dη with y = x − √(4νt) η and w = exp(−η² − cos(πy)/(2πν)), by Gauss–Hermite quadrature.
    Both integrals are divided by the largest w, which would else be as large as e^50.
    """
    nodes, weights = (torch.from_numpy(each).to(points.device) for each in np.polynomial.hermite.hermgauss(order))
    x, t = points.double().unbind(1)
    y = x[:, None] - torch.sqrt(4 * viscosity * t)[:, None] * nodes  # [n, order]
    mass = torch.softmax(weights.log() - torch.cos(math.pi * y) / (2 * math.pi * viscosity), 1)
    return -(torch.sin(math.pi * y) * mass).sum(1)


def allen_cahn(points: Tensor) -> Tensor:
    """u [n] of u_t = 1e-4 u_xx + 5u − 5u³ on [−1, 1], periodic, u(x, 0) = x² cos πx; t must be a multiple of 1/100.

    Raises:
        ValueError: another t is asked for.
    """
    x, row = _rows(points)
    coefficients = allen_cahn_coefficients()
    k = math.pi * torch.arange(coefficients.shape[1], dtype=torch.float64)
    u = _by_time(x, row, lambda x, i: torch.cos((x[:, None] + 1) * k) @ coefficients[i])
    return torch.where(row == 0, x.square() * torch.cos(math.pi * x), u)  # cosines of a kink converge slowly


def kdv(points: Tensor) -> Tensor:
    """u [n] of u_t + u u_x + 0.0025 u_xxx = 0 on [−1, 1], periodic, u(x, 0) = cos πx; t must be a multiple of 1/100.

    Raises:
        ValueError: another t is asked for.
    """
    x, row = _rows(points)
    coefficients = kdv_coefficients()
    k = math.pi * torch.arange(coefficients.shape[1], dtype=torch.float64)
    return _by_time(x, row, lambda x, i: (torch.exp(1j * (x[:, None] + 1) * k) @ coefficients[i]).real)


def _rows(points: Tensor) -> tuple[Tensor, Tensor]:
    """x, and the numbers of the kept times."""
    x, t = points.detach().double().unbind(1)
    row = (t * TIMES).round()
    if not torch.allclose(row / TIMES, t, rtol=0, atol=1e-6):
        raise ValueError(f"the reference has t = 0, 1/{TIMES}, …, 1 only: round t to these.")
    return x, row


def _by_time(x: Tensor, row: Tensor, series: Callable[[Tensor, int], Tensor]) -> Tensor:
    """u [n], one kept time after the other, since [n, wave numbers] would be large."""
    u = torch.empty_like(x)
    for i in sorted(set(row.int().tolist())):
        u[row == i] = series(x[row == i], i)
    return u


@functools.cache
def allen_cahn_coefficients(nodes: int = 2048, steps: int = 500) -> Tensor:
    """Cosine coefficients [times, nodes/2 + 1] with u(x, t) = Σ û_k cos(πk(x + 1)): the solution is even.

    Runge–Kutta of order 4 with the linear part e^{Lt} exactly. The periodic initial value has a kink at x = ±1, so its
    coefficients are the integrals: samples would alias, and be wrong by 5e-4 there.

    Raises:
        ValueError: steps is not a multiple of the kept times.
    """
    m = torch.arange(nodes // 2 + 1, dtype=torch.float64)
    k = math.pi * m
    half = torch.exp((ALLEN_CAHN_RATE - ALLEN_CAHN_DIFFUSION * k.square()) * (1 / steps) / 2)

    def cubic(v: Tensor) -> Tensor:
        result: Tensor = -ALLEN_CAHN_RATE * torch.fft.rfft(torch.fft.irfft(v, n=nodes) ** 3)
        return result

    # rfft's scale, and its origin at x = −1: û_k = (−1)ᵏ ½∫ x² cos πx cos πkx dx, of cosines of k − 1 and k + 1.
    sign = 1 - 2 * (m % 2)
    v = (nodes / 4 * sign * (_moment(m - 1) + _moment(m + 1))).to(torch.complex128)
    coefficients = _runge_kutta(v, half, cubic, steps, TIMES).real / nodes
    coefficients[:, 1:-1] *= 2  # the conjugate half of the spectrum
    return coefficients


@functools.cache
def kdv_coefficients(nodes: int = 192, steps: int = 3000, times: int = TIMES) -> Tensor:
    """Complex coefficients [times + 1, nodes/2 + 1] with u(x, t) = Re Σ û_k e^{iπk(x + 1)}, by the same method.

    The upper third of the wave numbers is zero, so that u² does not alias.

    Raises:
        ValueError: steps is not a multiple of the kept times.
    """
    m = torch.arange(nodes // 2 + 1, dtype=torch.float64)
    k = math.pi * m
    half = torch.polar(torch.ones_like(k), KDV_DISPERSION * k**3 / (2 * steps))  # −(ik)³ = ik³
    square = -0.5j * k * (m < nodes / 3)

    def transport(v: Tensor) -> Tensor:
        result: Tensor = square * torch.fft.rfft(torch.fft.irfft(v, n=nodes) ** 2)
        return result

    v = torch.zeros_like(half)
    v[1] = -nodes / 2  # cos πx, from x = −1
    coefficients = _runge_kutta(v, half, transport, steps, times) / nodes
    coefficients[:, 1:-1] *= 2
    return coefficients


def _runge_kutta(v: Tensor, half: Tensor, f: Callable[[Tensor], Tensor], steps: int, times: int) -> Tensor:
    """v at t = 0, 1/times, …, 1 of v' = Lv + f(v), half = e^{L/(2 steps)}."""
    if steps % times:
        raise ValueError(f"steps is {steps}: it must be a multiple of {times}.")
    h, whole, kept = 1 / steps, half.square(), [v]
    for step in range(1, steps + 1):
        a = f(v)
        b = f(half * (v + h / 2 * a))
        c = f(half * v + h / 2 * b)
        d = f(whole * v + h * half * c)
        v = whole * (v + h / 6 * a) + h / 3 * half * (b + c) + h / 6 * d
        if step % (steps // times) == 0:
            kept.append(v)
    return torch.stack(kept)


def _moment(m: Tensor) -> Tensor:
    """∫ x² cos(πmx) dx over [−1, 1] for whole numbers m."""
    sign = 1 - 2 * (m % 2)
    return torch.where(m == 0, 2 / 3, 4 * sign / (math.pi * m.where(m != 0, 1)).square())
