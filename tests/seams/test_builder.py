"""A subspace builder of a user's own: the span of the last gradients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD
from krylov_descent.curvature import CurvatureProduct, GaussNewtonGraph
from krylov_descent.krylov.orthonormal_basis import Subspace, shortest_basis
from krylov_descent.krylov.subspace import BasisBuffer, SubspaceBuilder
from krylov_descent.preconditioners.interface import Solve
from krylov_descent.safety.budget import Storage
from krylov_descent.samples.interface import SamplePolicy
from krylov_descent.state import vector
from krylov_descent.stepping.gradient_pass import GradientPass
from tests.distributed.pool import Pool
from tests.reference import dense_ggn
from tests.seams import contract


@dataclass(frozen=True, eq=False)
class LastGradients:
    """The newest first, [P_local] each."""

    gradients: tuple[Tensor, ...] = vector(())


@dataclass(frozen=True)
class GradientSpan(SubspaceBuilder):
    """span{D⁻¹g of the last steps}, with the Gauss–Newton matrix in it."""

    krylov_dim: int = 4

    def init(self) -> LastGradients:
        return LastGradients()

    def build(self, at: GradientPass, solve: Solve, state: Any) -> Subspace:
        assert at.g is not None
        objective = at.objective
        product = CurvatureProduct(GaussNewtonGraph, objective, at.b)
        V = objective.workspace.of(BasisBuffer).rows(self.krylov_dim, at.g, Storage())
        before = [solve(g) for g in state.gradients]
        subspace = shortest_basis(product.within, solve, at.g, before, V, objective.comm)
        assert subspace is not None
        return subspace

    def after(self, at: GradientPass, state: Any, d: Tensor | None) -> LastGradients:
        assert at.g is not None
        return LastGradients((at.g, *state.gradients)[: self.krylov_dim - 1])


def make(group: Any) -> tuple[nn.Module, KSD, SamplePolicy]:
    model = contract.network()
    optimizer = KSD(model.parameters(), subspace=GradientSpan(), preconditioner=None, process_group=group)
    return model, optimizer, contract.quarter()


def test_what_builds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="subspace=3: must be a SubspaceBuilder"):
        KSD(contract.network().parameters(), subspace=3)  # type: ignore[arg-type]


def test_it_resumes(tmp_path: Path) -> None:
    contract.resumes_exactly(make, tmp_path)


def test_its_steps_are_atomic() -> None:
    contract.is_atomic(make)


def test_ranks_agree(pool: Pool) -> None:
    contract.agrees_on_two_ranks(make, pool)


def test_the_subspace_has_the_dense_curvature_of_b() -> None:
    model, optimizer, sets = make(None)
    contract.steps(model, optimizer, sets, 2)
    params = list(model.parameters())
    b = [batch.data for batch in contract.quarter().draw(2, krylov_dim=4).b]
    x, y = (torch.cat(parts) for parts in zip(*b, strict=True))
    r = model(x) - y
    G = dense_ggn(r.square().mean(), r, params)
    report = optimizer.step(contract.closure_of(model), sets)
    V = optimizer.basis()
    assert V.shape == (3, len(G))
    torch.testing.assert_close(V @ V.T, torch.eye(3, dtype=V.dtype), rtol=0, atol=1e-12)
    ritz = torch.tensor(report.ritz_values, dtype=V.dtype)
    torch.testing.assert_close(ritz, torch.linalg.eigvalsh(V @ G @ V.T), rtol=1e-9, atol=1e-12)
