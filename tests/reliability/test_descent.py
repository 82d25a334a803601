"""The loss on A never rises over a step and its acceptance check by more than the tolerance of the comparison.

The tolerance is ``relative_noise``: 8 ε of the parameters' dtype, relative to the loss (about 1e-6 in float32, 2e-15 in
float64). With sets, a step may raise the loss on A until the next one, or ``settle``, looks at it.
"""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from krylov_descent import KSD, GaussNewtonFlow, Subsets
from krylov_descent.objective.objective import relative_noise

pytestmark = pytest.mark.nightly

#: More of them by the environment.
SEEDS = range(int(os.environ.get("KRYLOV_DESCENT_TEST_SEEDS", "6")))
STEPS = 5


def network(draw: random.Random) -> nn.Module:
    width = draw.choice((2, 5, 16))
    kind = draw.choice((nn.Tanh, nn.ReLU, nn.GELU, nn.Softplus))
    hidden = [layer for _ in range(draw.randint(0, 2)) for layer in (nn.Linear(width, width), kind())]
    return nn.Sequential(nn.Linear(4, width), kind(), *hidden, nn.Linear(width, 3))


class Training:
    """A small problem of a seed: network, data, loss, decay and sizes of sets."""

    def __init__(self, seed: int, method: str, dtype: torch.dtype, sets: bool) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.model = network(draw).to(dtype)
        x = torch.randn(80, 4, dtype=dtype) * draw.choice((0.1, 1, 10))
        self.classify = draw.random() < 0.5
        noise = torch.randn(80, 3, dtype=dtype)
        z = x[:, :3].sin() + 0.5 * noise
        self.data = x, z.argmax(1) if self.classify else z * draw.choice((1e-3, 1, 1e3))
        self.sets = (
            Subsets(self.data, batch_size=32, fraction=draw.choice((0.05, 0.2, 0.5)), seed=seed) if sets else None
        )
        krylov_dim, decay = draw.choice((1, 4, 10)), draw.choice((0.0, 1e-3))
        self.optimizer: KSD | GaussNewtonFlow
        if method == "ksd":
            self.optimizer = KSD(self.model.parameters(), krylov_dim=krylov_dim, weight_decay=decay)
        else:
            self.optimizer = GaussNewtonFlow(self.model.parameters(), rows=30, weight_decay=decay)

    def closure(self, batch: Any = None) -> tuple[Tensor, Tensor]:
        x, y = self.data if batch is None else batch
        z = self.model(x)
        return F.cross_entropy(z, y) if self.classify else F.mse_loss(z, y), z

    def step(self) -> float:
        if self.sets is None:
            return self.optimizer.step(lambda: self.closure()).loss
        return self.optimizer.step(self.closure, self.sets).loss

    def settled(self) -> float:
        if self.sets is None:
            return self.optimizer.settle(lambda: self.closure()).loss
        return self.optimizer.settle(self.closure, self.sets).loss


@pytest.mark.parametrize("sets", [False, True], ids=["full batch", "sets"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", ["ksd", "flow"])
def test_the_loss_on_A_never_rises(method: str, dtype: torch.dtype, sets: bool) -> None:
    fell = 0
    for seed in SEEDS:
        training = Training(seed, method, dtype, sets)
        losses = [training.step() for _ in range(STEPS)]
        losses.append(training.settled())
        for number, (before, after) in enumerate(itertools.pairwise(losses)):
            assert after <= before + relative_noise(dtype) * abs(before), f"seed {seed}, step {number}: {losses}"
        fell += losses[-1] < losses[0]
    assert fell > len(SEEDS) // 2
