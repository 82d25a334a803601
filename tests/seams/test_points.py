"""Points keep what every strategy promises, also at a step that looks at other points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent import KSD, Points
from krylov_descent.samples.interface import SamplePolicy
from tests.distributed.pool import Pool
from tests.seams import contract

STEPS = 6  # the fifth looks at other points


def draw(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=generator, dtype=contract.F64)
    return x, torch.sin(3 * x[:, :2])


def make(group: Any) -> tuple[nn.Module, KSD, SamplePolicy]:
    model = contract.network()
    return model, KSD(model.parameters(), krylov_dim=4, preconditioner=None, process_group=group), Points(draw, 8)


def test_it_resumes(tmp_path: Path) -> None:
    contract.resumes_exactly(make, tmp_path)


def test_its_steps_are_atomic() -> None:
    contract.is_atomic(make)


def losses_on_a_rank(group: Any) -> Tensor:
    model, optimizer, points = make(group)
    return torch.tensor(contract.steps(model, optimizer, points, STEPS), dtype=contract.F64)


def test_ranks_agree(pool: Pool) -> None:
    alone = losses_on_a_rank(None)
    assert alone[4] > 2 * alone[3]  # on other points
    one, other = pool.run(2, losses_on_a_rank)
    assert torch.equal(one, other)
    torch.testing.assert_close(one, alone, rtol=1e-7, atol=0.0)
