"""The solutions of the PINN study that have no closed form, against other methods and finer ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from experiments.pinn import references
from experiments.pinn.equations import EQUATIONS, allen_cahn
from experiments.pinn.further import FURTHER, kdv
from experiments.pinn.problems import problem
from scipy.integrate import solve_ivp
from torch import Tensor


def between(rows: Tensor, s: Tensor) -> Tensor:
    """To fourth order in s [n], from rows [n, 5] at s = −2 … 2."""
    weights = [s * (s * s - 1) * (s - 2) / 24, -s * (s - 1) * (s * s - 4) / 6, (s * s - 1) * (s * s - 4) / 4]
    weights += [-s * (s + 1) * (s * s - 4) / 6, s * (s * s - 1) * (s + 2) / 24]
    return (rows * torch.stack(weights, 1)).sum(1)


def test_the_allen_cahn_solution_satisfies_its_terms() -> None:
    equation = EQUATIONS["allen-cahn"]
    grid = problem("allen-cahn", seed=0, points=10).grid
    x = grid.axes[0]
    torch.testing.assert_close(grid.exact[:, 0], x.square() * torch.cos(math.pi * x))
    torch.testing.assert_close(grid.exact[0], grid.exact[-1], rtol=0, atol=1e-12)
    k = math.pi * torch.arange(1025, dtype=torch.float64)
    coefficients = references.allen_cahn_coefficients()

    def near_half(at: Tensor) -> Tensor:
        rows = torch.cos((at[:, :1] + 1) * k) @ coefficients[48:53].T  # t = 0.48 … 0.52
        return between(rows, (at[:, 1] - 0.5) * 100)

    at = torch.stack([x, torch.full_like(x, 0.5)], 1).requires_grad_()
    assert allen_cahn(near_half, at).abs().max() < 1e-4
    assert equation.terms[0].residual is allen_cahn
    ends = torch.tensor([[-1.0, 0.5], [-1.0, 0.495]], dtype=torch.float64).requires_grad_()
    for term in equation.terms[2:]:  # u and u_x are periodic
        assert term.residual(near_half, ends).abs().max() < 1e-6


def test_the_allen_cahn_reference_has_converged() -> None:
    x, t = torch.linspace(-1, 1, 65, dtype=torch.float64), torch.linspace(0.01, 1, 12, dtype=torch.float64)
    at = torch.cartesian_prod(x, t)
    k = math.pi * torch.arange(2049, dtype=torch.float64)

    def field(nodes: int, steps: int) -> Tensor:
        kept = references.allen_cahn_coefficients(nodes, steps)
        return kept[1:] @ torch.cos((x + 1) * k[: nodes // 2 + 1, None])

    found = field(2048, 500)
    assert (found - field(2048, 200)).abs().max() < 1e-6
    assert (found - field(2048, 1000)).abs().max() < 1e-8
    assert (found - field(4096, 500)).abs().max() < 1e-8
    torch.testing.assert_close(references.allen_cahn(at).view(65, 12), found.T[:, ::9], rtol=0, atol=1e-10)


def test_the_allen_cahn_reference_agrees_with_finite_differences() -> None:
    n = 2048
    x = np.linspace(-1, 1, n, endpoint=False)

    def slope(_: float, u: np.ndarray) -> np.ndarray:
        near, far = np.roll(u, 1) + np.roll(u, -1), np.roll(u, 2) + np.roll(u, -2)
        return np.asarray(1e-4 * (16 * near - far - 30 * u) / (12 * (2 / n) ** 2) + 5 * u - 5 * u**3)

    end = solve_ivp(slope, (0, 1), x**2 * np.cos(np.pi * x), rtol=1e-9, atol=1e-10).y[:, -1]
    at = torch.stack([torch.from_numpy(x), torch.ones(n, dtype=torch.float64)], 1)
    assert (references.allen_cahn(at) - torch.from_numpy(end)).abs().max() < 1e-5


def test_the_allen_cahn_reference_refuses_times_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="round t"):
        references.allen_cahn(torch.tensor([[0.0, 0.123]]))
    with pytest.raises(ValueError, match="multiple of 100"):
        references.allen_cahn_coefficients(steps=250)


def test_the_kdv_solution_satisfies_its_terms() -> None:
    equation = FURTHER["kdv"]
    grid = problem("kdv", seed=0, points=10).grid
    x = grid.axes[0]
    torch.testing.assert_close(grid.exact[:, 0], torch.cos(math.pi * x))
    for power, conserved in ((1, 0.0), (2, 1.0)):
        assert (torch.trapezoid(grid.exact**power, x, dim=0) - conserved).abs().max() < 1e-8
    coefficients = references.kdv_coefficients(steps=3000, times=1000)[798:803]  # t = 0.798 … 0.802
    k = math.pi * torch.arange(coefficients.shape[1], dtype=torch.float64)

    def near(at: Tensor) -> Tensor:
        phase = (at[:, :1] + 1) * k
        rows = torch.cos(phase) @ coefficients.real.T - torch.sin(phase) @ coefficients.imag.T
        return between(rows, (at[:, 1] - 0.8) * 1000)

    at = torch.stack([x, torch.full_like(x, 0.8)], 1).requires_grad_()
    torch.testing.assert_close(near(at), grid.exact[:, 80], rtol=0, atol=1e-10)
    assert kdv(near, at).abs().max() < 1e-4
    with torch.no_grad():
        assert kdv(near, at).abs().max() < 1e-4
    ends = torch.tensor([[-1.0, 0.8], [-1.0, 0.7995]], dtype=torch.float64).requires_grad_()
    assert equation.terms[0].residual is kdv
    for term in equation.terms[2:]:  # u, u_x and u_xx are periodic
        assert term.residual(near, ends).abs().max() < 1e-8


def test_the_kdv_reference_has_converged() -> None:
    found, coarser = references.kdv_coefficients(192, 3000), references.kdv_coefficients(256, 1500)
    assert (found - coarser[:, : found.shape[1]]).abs().max() < 1e-7  # of order 4: then found is 15 times as near
    with pytest.raises(ValueError, match="multiple of 100"):
        references.kdv_coefficients(steps=250)


@pytest.mark.parametrize("nu", [0.01 / math.pi, 0.01])
def test_the_burgers_reference_agrees_with_the_trapezoidal_rule(nu: float) -> None:
    x, t = torch.linspace(-1, 1, 33, dtype=torch.float64), torch.tensor([0.0, 1e-3, 0.1, 0.35, 0.7, 1.0])
    at = torch.cartesian_prod(x, t.double())
    eta = torch.linspace(-14, 14, 2001, dtype=torch.float64)  # the integrand is largest as far out as 10
    y = at[:, :1] - torch.sqrt(4 * nu * at[:, 1:]) * eta
    mass = torch.exp(-eta.square() - (torch.cos(math.pi * y) - 1) / (2 * math.pi * nu) - 100)
    expected = -(torch.sin(math.pi * y) * mass).sum(1) / mass.sum(1)
    found = references.burgers(at, viscosity=nu)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(found, references.burgers(at, order=200, viscosity=nu), rtol=0, atol=1e-12)
    torch.testing.assert_close(found.view(33, 6)[:, 0], -torch.sin(math.pi * x))
    assert references.burgers(torch.tensor([[0.01, 1.0]])).item() < -0.5  # the shock
