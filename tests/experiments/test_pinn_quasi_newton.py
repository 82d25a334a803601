"""SSBroyden: the update is the textbook's, term by term, and keeps the inverse Hessian positive definite."""

from __future__ import annotations

import math

import pytest
import torch
from experiments.pinn.rivals.quasi_newton import Family, InverseHessian, self_scaled
from torch import Tensor

F64 = torch.float64


def pair(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """H, g, s = −αHg and a y with yᵀs > 0."""
    root = torch.randn(n, n, dtype=F64)
    H, g, alpha = root @ root.T + torch.eye(n, dtype=F64), torch.randn(n, dtype=F64), 0.4
    s = -alpha * (H @ g)
    other = torch.randn(n, n, dtype=F64)
    return H, g, s, (other @ other.T + 0.1 * torch.eye(n, dtype=F64)) @ s, alpha


def textbook_bfgs(H: Tensor, s: Tensor, y: Tensor) -> Tensor:
    r = s @ y
    left = torch.eye(len(s), dtype=s.dtype) - torch.outer(s, y) / r
    return left @ H @ left.T + torch.outer(s, s) / r


def test_ssbroyden_with_tau_and_phi_one_is_bfgs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    H, g, s, y, alpha = pair(9)
    monkeypatch.setattr("experiments.pinn.rivals.quasi_newton.self_scaled", lambda *_, **__: Family(1.0, 1.0))
    inverse = InverseHessian(9)
    inverse.H.copy_(H)
    inverse.update(s, y, g, alpha, H @ g)
    torch.testing.assert_close(inverse.H, textbook_bfgs(H, s, y))


@pytest.mark.parametrize("family", [None, Family(0.3, 0.5), Family(2.0, 1.7)])
@pytest.mark.parametrize("seed", range(5))
def test_ssbroyden_is_its_formula(family: Family | None, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Term by term, with the secant equation, symmetric and positive definite, and the direction it hands back."""
    torch.manual_seed(seed)
    H, g, s, y, alpha = pair(9)
    w, r = H @ y, s @ y
    q = y @ w
    if family is None:
        B = torch.linalg.inv(H)
        chosen = self_scaled(float(s @ B @ s / r), float(q / r), 9, first=True)
    else:
        chosen = family
        monkeypatch.setattr("experiments.pinn.rivals.quasi_newton.self_scaled", lambda *_, **__: family)
    inverse = InverseHessian(9)
    inverse.H.copy_(H)
    direction = inverse.update(s, y, g, alpha, H @ g)
    v = s / r - w / q
    expected = (H - torch.outer(w, w) / q + chosen.phi * q * torch.outer(v, v)) / chosen.tau + torch.outer(s, s) / r
    torch.testing.assert_close(inverse.H, expected)
    torch.testing.assert_close(inverse.H @ y, s)
    torch.testing.assert_close(direction, inverse.H @ (g + y))
    assert float(torch.linalg.eigvalsh(inverse.H)[0]) > 0


@pytest.mark.parametrize("b", [0.05, 0.5, 1.0, 3.0, 50.0])
@pytest.mark.parametrize("excess", [0.0, 1e-3, 1.0, 1e3])
@pytest.mark.parametrize("first", [True, False])
def test_scaling_and_mixture_keep_it_positive_definite(b: float, excess: float, first: bool) -> None:
    """τ > 0, and φ above −1/a, where the family turns singular."""
    h = (1 + excess) / b
    tau, phi = self_scaled(b, h, 100, first=first)
    assert 0 < tau < math.inf
    assert 1 + phi * excess > 0
    if not first:
        assert tau <= 1 + 1e-12  # H is enlarged, never shrunk
