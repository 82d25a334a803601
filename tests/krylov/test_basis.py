"""Algorithm 2 against its naive transcription, and its properties."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from krylov_descent.distributed import SingleProcess
from krylov_descent.krylov.orthonormal_basis import Subspace, krylov_basis, shortest_basis
from krylov_descent.krylov.search import whiten
from krylov_descent.vectors.storage import BasisStorage
from tests import reference


def build(H: Tensor, D: Tensor, g: Tensor, d_prev: Tensor | None, K: int) -> Subspace:
    return krylov_basis(lambda v: H @ v, lambda w: w / D, g, d_prev, K, BasisStorage(K + 1, g), SingleProcess())


def setup(P: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    A = torch.randn(P, P, dtype=torch.float64)
    H = (A @ A.T / P + torch.diag(torch.logspace(-2, 1, P, dtype=torch.float64))).to(dtype)
    D = (torch.rand(P, dtype=torch.float64) + 0.1).to(dtype)
    return H, D, torch.randn(P).to(dtype), torch.randn(P).to(dtype)


def test_equals_the_naive_transcription() -> None:
    H, D, g, d_prev = setup(40)
    subspace = build(H, D, g, d_prev, 8)
    V, H_bar = reference.algorithm_2(H, D, g, d_prev, 8)
    torch.testing.assert_close(subspace.V.tensor(), V.T, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(subspace.H, H_bar, rtol=1e-8, atol=1e-8)
    assert subspace.krylov_dim == 8
    assert subspace.V.tensor().shape == (9, 40)


def test_spans_the_powers_and_the_previous_direction() -> None:
    """Both earlier public codes lose d_prev by an off-by-one."""
    H, D, g, d_prev = setup(40)
    V = build(H, D, g, d_prev, 6).V.tensor()
    vectors, u = [d_prev], g / D
    for _ in range(6):
        vectors.append(u)
        u = (H @ u) / D
    for x in vectors:
        assert float((x - V.T @ (V @ x)).norm() / x.norm()) < 1e-10
    outside = u  # the next power is not in the span
    assert float((outside - V.T @ (V @ outside)).norm() / outside.norm()) > 1e-6


def test_reduced_hessian_is_tridiagonal_in_the_inner_product_of_D() -> None:
    H, D, g, _ = setup(30)
    V = build(H, D, g, None, 7).V.tensor()
    # A D-orthonormal basis of the same nested spaces.
    L = torch.linalg.cholesky(V @ torch.diag(D) @ V.T)
    W = torch.linalg.solve_triangular(L, V, upper=False)
    T = W @ H @ W.T
    outside = T - torch.triu(torch.tril(T, 1), -1)
    assert float(outside.abs().max() / T.abs().max()) < 1e-9


def test_whitened_basis_is_conjugate() -> None:
    H, D, g, d_prev = setup(30)
    subspace = build(H, D, g, d_prev, 6)
    for H_bar in (subspace.H, subspace.H - 3 * torch.eye(7, dtype=torch.float64), -subspace.H):
        C = whiten(H_bar, 1e-4)
        lam, Q = torch.linalg.eigh(H_bar)
        H_hat = (Q * lam.clamp(min=1e-4 * float(lam.abs().max()))) @ Q.T
        V_bar = torch.linalg.inv(C).T  # in the coordinates of V
        torch.testing.assert_close(V_bar.T @ H_hat @ V_bar, torch.eye(7, dtype=torch.float64), rtol=0, atol=1e-9)
    absolute = whiten(-subspace.H, 1e-4, "absolute")
    torch.testing.assert_close(absolute @ absolute.T, subspace.H)
    torch.testing.assert_close(whiten(torch.zeros(2, 2, dtype=torch.float64), 1e-4), torch.eye(2, dtype=torch.float64))


@pytest.mark.parametrize("with_previous", [True, False])
def test_breakdown_ends_the_krylov_part_and_keeps_the_previous_direction(with_previous: bool) -> None:
    torch.manual_seed(0)
    J = torch.randn(3, 20, dtype=torch.float64)
    H, g = J.T @ J, J.T @ torch.randn(3, dtype=torch.float64)
    d_prev = torch.randn(20, dtype=torch.float64) if with_previous else None
    subspace = build(H, torch.ones(20, dtype=torch.float64), g, d_prev, 10)
    assert subspace.krylov_dim == 3
    assert subspace.V.m == 3 + with_previous
    assert subspace.orthogonality_error < 1e-12
    if d_prev is not None:
        assert float((d_prev - subspace.V.combine(subspace.V.dots(d_prev))).norm()) < 1e-12


def test_previous_direction_inside_the_span_is_left_out() -> None:
    H, D, g, _ = setup(30)
    assert build(H, D, g, g / D, 5).V.m == 5


def test_two_passes_keep_orthogonality_in_float32_at_80_vectors() -> None:
    H, D, g, d_prev = setup(400, dtype=torch.float32)
    ours = build(H, D, g, d_prev, 80).orthogonality_error
    as_printed = reference.algorithm_2(H, D, g, d_prev, 80)[0]
    theirs = float((as_printed.T @ as_printed - torch.eye(81)).abs().max())
    assert ours < 1e-5
    assert theirs > 10 * ours


def test_long_vectors_are_orthonormal_in_float32() -> None:
    """A float32 sum of a million squares in one go is off by 1e-5."""
    torch.manual_seed(0)
    H, g, d_prev = torch.logspace(0, -4, 1_000_000)[torch.randperm(1_000_000)], *torch.randn(2, 1_000_000)
    subspace = krylov_basis(lambda v: H * v, lambda w: w, g, d_prev, 6, BasisStorage(7, g), SingleProcess())
    V = subspace.V.tensor().double()
    error = float((V @ V.T - torch.eye(7, dtype=torch.float64)).abs().max())
    assert error < 1e-5
    assert subspace.orthogonality_error == pytest.approx(error, abs=2e-6)


def test_a_vector_takes_two_passes_over_the_basis_or_three(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: Counter[str] = Counter()
    for name in ("dots", "products", "sweep", "subtract", "gram"):
        original = getattr(BasisStorage, name)

        def noted(V: BasisStorage, *args: object, name: str = name, original: Any = original) -> Any:
            passes[name] += 1
            return original(V, *args)

        monkeypatch.setattr(BasisStorage, name, noted)
    H, D, g, d_prev = setup(400, dtype=torch.float32)
    assert build(H, D, g, d_prev, 20).orthogonality_error < 1e-5
    assert passes.total() - passes["subtract"] == 2 * 21 + 2  # and H̄ of the last Krylov vector and of d_prev
    assert passes["subtract"] < 21


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_no_overflow_in_float32(scale: float) -> None:
    H, D, g, d_prev = setup(20, dtype=torch.float32)
    subspace = build(H, D, g * scale, d_prev * scale, 5)
    assert subspace.V.m == 6
    assert subspace.orthogonality_error < 1e-5


def test_products_that_are_not_finite_are_left_out() -> None:
    H, D, g, d_prev = setup(20)
    calls = []

    def product(v: Tensor) -> Tensor:
        calls.append(v)
        return H @ v if len(calls) in (1, 2, 4) else v * torch.nan

    buffer = BasisStorage(6, g)
    subspace = krylov_basis(product, lambda w: w / D, g, d_prev, 5, buffer, SingleProcess())
    assert (subspace.krylov_dim, subspace.V.m, subspace.finite) == (2, 3, False)
    assert bool(subspace.H.isfinite().all())
    nothing = krylov_basis(lambda v: v * torch.inf, lambda w: w, g, d_prev, 5, buffer, SingleProcess())
    torch.testing.assert_close(nothing.V.tensor(), (g / g.norm())[None])
    assert nothing.H.tolist() == [[1.0]]


@pytest.mark.parametrize("previous", ["another", "the same direction", "none"])
def test_one_krylov_vector_has_its_curvature_at_once(previous: str) -> None:
    H, D, g, d_prev = setup(20)
    d = {"another": d_prev, "the same direction": 3 * g / D, "none": None}[previous]
    by_products = build(H, D, g.clone(), d, 1)
    V = BasisStorage(2, g)
    steps = [] if d is None else [d]
    at_once = shortest_basis(lambda V: V.tensor() @ H @ V.tensor().T, lambda w: w / D, g, steps, V, SingleProcess())
    assert at_once is not None
    torch.testing.assert_close(at_once.V.tensor(), by_products.V.tensor())
    torch.testing.assert_close(at_once.H, by_products.H)
    assert (at_once.krylov_dim, V.m) == (1, 2 if previous == "another" else 1)


def test_several_previous_steps_and_what_is_of_no_use_among_them() -> None:
    H, D, g, d_prev = setup(20)
    generator = torch.Generator().manual_seed(5)
    another = torch.randn(20, generator=generator, dtype=g.dtype)
    steps = [d_prev, 2 * d_prev - g / D, torch.zeros_like(g), another, another * torch.inf]
    V = BasisStorage(6, g)
    found = shortest_basis(lambda V: V.tensor() @ H @ V.tensor().T, lambda w: w / D, g, steps, V, SingleProcess())
    assert found is not None
    assert (found.krylov_dim, V.m, found.finite) == (1, 3, False)
    rows = V.tensor()
    torch.testing.assert_close(rows @ rows.T, torch.eye(3, dtype=g.dtype))
    for vector in (g / D, d_prev, another):
        torch.testing.assert_close(rows.T @ (rows @ vector), vector)
    torch.testing.assert_close(found.H, rows @ H @ rows.T)


def test_one_krylov_vector_without_a_finite_curvature_is_left_to_products() -> None:
    H, D, g, d_prev = setup(20)
    V = BasisStorage(2, g)
    nothing = shortest_basis(
        lambda V: torch.full((V.m, V.m), torch.nan), lambda w: w / D, g, [d_prev], V, SingleProcess()
    )
    assert nothing is None
    assert shortest_basis(lambda V: H, lambda w: w * 0, g, [d_prev], V, SingleProcess()) is None


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rank", [2, 5])
def test_rows_in_a_lower_precision_are_orthonormal_in_that(storage: torch.dtype, rank: int) -> None:
    """H has few eigenvectors: after them only rounding is left of a Krylov vector, that of the rows as stored."""
    torch.manual_seed(rank)
    U = torch.linalg.qr(torch.randn(300, rank, dtype=torch.float64)).Q
    H, g = (U * torch.logspace(0, 2, rank, dtype=torch.float64)) @ U.T, torch.randn(300, dtype=torch.float64)
    V = BasisStorage(11, g, storage)
    subspace = krylov_basis(lambda v: H @ v, lambda w: w.clone(), g, None, 10, V, SingleProcess())
    assert rank < subspace.krylov_dim < 10
    assert subspace.orthogonality_error < 8 * torch.finfo(storage).eps
