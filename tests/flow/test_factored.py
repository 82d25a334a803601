"""The flow direction and damped steps agree with dense algebra."""

from __future__ import annotations

import pytest
import torch

from krylov_descent.distributed import SingleProcess
from krylov_descent.flow.factored import Factored, damped_step, flow_direction
from tests.least_squares import F64


@pytest.mark.parametrize("m", [5, 30])  # fewer rows than parameters, and more
def test_steps_are_those_of_dense_algebra(m: int) -> None:
    torch.manual_seed(0)
    J, rho = torch.randn(m, 12, dtype=F64), torch.randn(m, dtype=F64)
    g, carried = torch.randn(2, 12, dtype=F64)
    sketch = Factored(J, SingleProcess())
    assert sketch.trace == pytest.approx(float((J.T @ J).trace()))
    for lam in (1e-3, 1.0, 10.0):
        H = J.T @ J + lam * torch.eye(12, dtype=F64)
        torch.testing.assert_close(damped_step(sketch, g, lam), -torch.linalg.solve(H, g))
        flow = flow_direction(sketch, rho, carried, lam)
        torch.testing.assert_close(flow, torch.linalg.solve(H, -J.T @ rho + lam * carried))
        torch.testing.assert_close(flow_direction(sketch, rho, None, lam), -torch.linalg.solve(H, J.T @ rho))


@pytest.mark.parametrize("lam", [1e-18, 1e-10])
@pytest.mark.parametrize("m", [6, 30])  # fewer rows than parameters, and more
def test_small_singular_values_are_not_lost(m: int, lam: float) -> None:
    """K has their squares, 1e-18 of the largest. With the smaller λ, its rounding would swallow them."""
    torch.manual_seed(0)
    r = min(m, 12)
    s = torch.logspace(0, -9, r, dtype=F64)
    U, V = (torch.linalg.qr(torch.randn(n, r, dtype=F64)).Q for n in (m, 12))
    rho = U @ torch.randn(r, dtype=F64)
    expected = -V @ (s / (s.square() + lam) * (U.T @ rho))
    phi = flow_direction(Factored(U @ (s[:, None] * V.T), SingleProcess()), rho, None, lam)
    torch.testing.assert_close(phi, expected, rtol=1e-4, atol=1e-4 * float(expected.norm()))


def test_the_flow_gathers_what_successive_sketches_say() -> None:
    """Rows drawn ten at a time from forty: the direction comes to be that of all of them."""
    torch.manual_seed(0)
    J, rho = torch.randn(40, 60, dtype=F64), torch.randn(40, dtype=F64)
    whole = -torch.linalg.pinv(J) @ rho
    errors, phi = [], None
    for _ in range(200):
        S = torch.randperm(40)[:10]
        phi = flow_direction(Factored(J[S], SingleProcess()), rho[S], phi, 1e-6)
        errors.append(float((phi - whole).norm() / whole.norm()))
    assert errors[0] > 0.5
    assert errors[-1] < 1e-2


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-4), (torch.float32, 1e-3)])
@pytest.mark.parametrize("m", [30, 300])  # fewer rows than parameters, and more
def test_damped_steps_are_accurate_for_small_dampings(m: int, dtype: torch.dtype, tolerance: float) -> None:
    """−(JᵀJ + λ)⁻¹g is short where J is large: a difference of long vectors would lose it."""
    torch.manual_seed(0)
    r = min(m, 100)
    s = torch.logspace(0, -9 if dtype == F64 else -3, r, dtype=F64)
    U, V = (torch.linalg.qr(torch.randn(n, r, dtype=F64)).Q for n in (m, 100))
    J = (U @ (s[:, None] * V.T)).to(dtype)
    g = (V @ torch.randn(r, dtype=F64)).to(dtype)
    sketch = Factored(J, SingleProcess())
    for relative in (1.1e-11, 1e-9, 1e-7) if dtype == F64 else (1e-7,):
        lam = relative * sketch.trace
        _, s_J, Vh = torch.linalg.svd(J.double(), full_matrices=True)
        curvature = torch.cat([s_J.square(), torch.zeros(100 - len(s_J), dtype=F64)])
        expected = -Vh.T @ ((Vh @ g.double()) / (curvature + lam))
        found = damped_step(sketch, g, lam).double()
        assert float((found - expected).norm() / expected.norm()) < tolerance


def test_only_the_last_factors_are_kept() -> None:
    torch.manual_seed(0)
    sketch = Factored(torch.randn(30, 10, dtype=F64), SingleProcess())
    for lam in (1e-14, 1e-13, 1e-3):
        damped_step(sketch, torch.ones(10, dtype=F64), lam)
    assert list(sketch._damped) == [1e-3]
