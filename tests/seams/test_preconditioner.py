"""A preconditioner of a user's own: a running mean of squared gradients, as in RMSprop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from krylov_descent import KSD
from krylov_descent.preconditioners.interface import Preconditioner, Solved
from krylov_descent.samples.interface import SamplePolicy
from krylov_descent.state import vector
from krylov_descent.stepping.gradient_pass import GradientPass
from tests.distributed.pool import Pool
from tests.seams import contract


@dataclass(frozen=True, eq=False)
class RunningSquares:
    """The mean of g∘g [P_local] over steps, and how many it has."""

    mean: Tensor | None = vector()
    steps: int = 0


@dataclass(frozen=True)
class RootMeanSquare(Preconditioner):
    """D = √mean(g∘g) + ε."""

    epsilon: float = 1e-3
    name: ClassVar[str] = "root mean square"

    def init(self) -> RunningSquares:
        return RunningSquares()

    def solve(self, at: GradientPass, state: Any, noise: float) -> Solved:
        assert at.g is not None
        n, squares = state.steps + 1, at.g.square()
        mean = squares if state.mean is None else state.mean + (squares - state.mean) / n
        D = mean.sqrt() + self.epsilon
        return Solved(lambda w: w / D, RunningSquares(mean, n), self.name)


def make(group: Any) -> tuple[nn.Module, KSD, SamplePolicy]:
    model = contract.network()
    optimizer = KSD(model.parameters(), krylov_dim=4, preconditioner=RootMeanSquare(), process_group=group)
    return model, optimizer, contract.quarter()


def test_it_resumes(tmp_path: Path) -> None:
    contract.resumes_exactly(make, tmp_path)


def test_its_steps_are_atomic() -> None:
    contract.is_atomic(make)


def test_ranks_agree(pool: Pool) -> None:
    contract.agrees_on_two_ranks(make, pool)


def test_krylov_vectors_are_preconditioned_by_the_mean_of_two_steps() -> None:
    """The first row of V of the second step is D⁻¹g, with D of both gradients on A, written out."""
    model, optimizer, sets = make(None)
    closure, gradients = contract.closure_of(model), []
    for _ in range(2):
        loss = closure(contract.data())[0]
        gradients.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]))
        report = optimizer.step(closure, sets)
        assert report.preconditioner == "root mean square"
    D = torch.stack(gradients).square().mean(0).sqrt() + 1e-3
    expected = gradients[1] / D
    torch.testing.assert_close(optimizer.basis()[0], expected / expected.norm(), rtol=1e-9, atol=1e-12)
