"""A curvature of a user's own: JᵀJ, the Gauss–Newton matrix without the loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from krylov_descent import KSD
from krylov_descent.curvature import CurvatureProduct, MicrobatchGraph
from krylov_descent.curvature.linearise import Linearisation
from krylov_descent.distributed import SingleProcess
from krylov_descent.objective.closure import Evaluation
from krylov_descent.objective.objective import Objective
from krylov_descent.samples.interface import Microbatch, SamplePolicy
from krylov_descent.vectors.parameters import ParameterVector
from tests.distributed.pool import Pool
from tests.reference import gradient
from tests.seams import contract


class OutputMetric(MicrobatchGraph):
    """v → JᵀJv / n of one micro-batch of n samples."""

    product_cost: ClassVar[float] = 4 / 3

    def __init__(self, evaluation: Evaluation, params: Sequence[Tensor]) -> None:
        self._linear, self._samples = Linearisation(evaluation.outputs, params), evaluation.samples

    def product(self, v: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        return self._linear.vjp([x / self._samples for x in self._linear.jvp(v)])


def make(group: Any) -> tuple[nn.Module, KSD, SamplePolicy]:
    model = contract.network()
    return model, KSD(model.parameters(), krylov_dim=4, curvature=OutputMetric, process_group=group), contract.quarter()


def test_it_resumes(tmp_path: Path) -> None:
    contract.resumes_exactly(make, tmp_path)


def test_its_steps_are_atomic() -> None:
    contract.is_atomic(make)


def test_ranks_agree(pool: Pool) -> None:
    contract.agrees_on_two_ranks(make, pool)


def test_products_are_those_of_the_dense_matrix_and_symmetric() -> None:
    model, (x, y) = contract.network(), contract.data()
    params = list(model.parameters())
    parameters = ParameterVector([{"params": params, "weight_decay": 0.0}])
    objective = Objective(contract.closure_of(model), parameters, SingleProcess())
    batches = [Microbatch((x[i : i + 40], y[i : i + 40]), len(x[i : i + 40]), i) for i in range(0, 96, 40)]
    product = CurvatureProduct(OutputMetric, objective, batches)
    J = torch.stack([gradient(e, params) for e in (model(x) - y).reshape(-1)])
    dense = J.T @ J / 96
    H = torch.stack([product(v).clone() for v in torch.eye(len(dense), dtype=dense.dtype)])
    torch.testing.assert_close(H, dense, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(H, H.T, rtol=0, atol=1e-13)
