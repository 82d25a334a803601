"""Problems on which neither a rule of ``check`` nor a default of an optimizer was chosen."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.supervised.data import MNIST
from experiments.supervised.sources import images
from krylov_descent import Subsets

Made = tuple[nn.Module, Callable[..., tuple[Tensor, Tensor]], Subsets | None]

_POINTS, _EDGE, _WEIGHT = 1000, 100, 10.0  # of the heat equation: inside, on each edge, and of the edges' residuals
_DIFFUSION = 0.1
_STEPS, _STEP = 40, 0.15  # of the integrator
_SPIRAL = ((-0.1, -2.0), (2.0, -0.1))  # dy/dt = Ay
_IMAGES = 10_000


def heat(seed: int, _: Path | None, *, dtype: torch.dtype) -> Made:
    """u_t = 0.1 u_xx on the unit square, u = sin πx + ½ sin 3πx at t = 0 and 0 at both ends; one residual vector."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = _tanh(2, 64, 64, 64, 64, 1).to(dtype)
    inside = torch.rand(_POINTS, 2, generator=generator).to(dtype).requires_grad_()
    start, low, high = (torch.rand(_EDGE, 2, generator=generator).to(dtype) for _ in range(3))
    start[:, 1], low[:, 0], high[:, 0] = 0, 0, 1
    at_start = torch.sin(math.pi * start[:, 0]) + torch.sin(3 * math.pi * start[:, 0]) / 2
    ends = torch.cat([low, high])

    def closure() -> tuple[Tensor, Tensor]:
        (first,) = torch.autograd.grad(model(inside).sum(), inside, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), inside, create_graph=True)
        equation = first[:, 1] - _DIFFUSION * second[:, 0]
        residual = torch.cat([equation, _WEIGHT * (model(start)[:, 0] - at_start), _WEIGHT * model(ends)[:, 0]])
        return residual.square().mean(), residual

    return model, closure, None


def ode(seed: int, _: Path | None) -> Made:
    """A spiral in the plane, by a network for dy/dt and a Runge–Kutta integrator of order 4 with fixed steps."""
    torch.manual_seed(seed)
    model = _tanh(2, 32, 32, 2)
    A = torch.tensor(_SPIRAL)
    start = torch.tensor([2.0, 0.0])
    path = torch.stack([torch.linalg.matrix_exp(A * _STEP * (i + 1)) @ start for i in range(_STEPS)])

    def closure() -> tuple[Tensor, Tensor]:
        y, found = start, []
        for _ in range(_STEPS):
            a = model(y)
            b = model(y + _STEP / 2 * a)
            c = model(y + _STEP / 2 * b)
            y = y + _STEP / 6 * (a + 2 * b + 2 * c + model(y + _STEP * c))
            found.append(y)
        residual = torch.stack(found) - path
        return residual.square().mean(), residual

    return model, closure, None


class Rows(nn.Module):
    """An LSTM that reads an image row by row, and a linear layer on its last state."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(28, hidden, batch_first=True), nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 28, 28] → logits [n, 10]."""
        logits: Tensor = self.head(self.lstm(x)[0][:, -1])
        return logits


def lstm(seed: int, data: Path | None) -> Made:
    """The digits of MNIST, read row by row."""
    torch.manual_seed(seed)
    model = Rows()
    x, y = images(MNIST, data, (_IMAGES, 1))[0]

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]), logits

    return model, closure, Subsets((x.view(-1, 28, 28), y), batch_size=1000, seed=seed)


PROBLEMS: dict[str, Callable[[int, Path | None], Made]] = {
    "heat32": functools.partial(heat, dtype=torch.float32),
    "heat64": functools.partial(heat, dtype=torch.float64),
    "ode": ode,
    "lstm": lstm,
}


def _tanh(*widths: int) -> nn.Sequential:
    layers = [layer for i in range(len(widths) - 1) for layer in (nn.Linear(widths[i], widths[i + 1]), nn.Tanh())]
    return nn.Sequential(*layers[:-1])
