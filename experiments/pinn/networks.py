"""Tanh networks u: points [n, d] → values [n], or [n, k] of several fields.

Their inputs are scaled to [−1, 1] by a fixed affine map. It is part of the model, has no parameters, and makes
the same weights a fair start on every domain. Weights are Xavier-normal, biases zero, both drawn from the seed alone;
float32 and float64 networks of a seed start alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from experiments.pinn import points as places
from experiments.supervised.networks import linear


class Size(NamedTuple):
    """Hidden layers, their width, and how many points such a network is trained on."""

    depth: int
    width: int
    interior: int
    boundary: int  # all boundary and initial terms together, about


NETWORKS: dict[str, Size] = {
    "3x32": Size(3, 32, 3000, 400),  # 2,241 parameters in two dimensions
    "3x48": Size(3, 48, 8000, 800),  # 4,897
    "4x50": Size(4, 50, 8000, 800),  # 7,851
    "4x64": Size(4, 64, 8000, 800),  # 12,737
    "6x128": Size(6, 128, 8000, 800),  # 83,073
}


def size(name: str) -> Size:
    """The network of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in NETWORKS:
        raise ValueError(f"no network is named {name!r}: choose from {', '.join(NETWORKS)}")
    return NETWORKS[name]


class Network(nn.Module):
    """A tanh network on the box from ``low`` to ``high``."""

    centre: Tensor
    radius: Tensor

    def __init__(
        self, widths: Sequence[int], low: Sequence[float], high: Sequence[float], seed: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        bottom, top = torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64)
        # Not persistent: a state_dict is the parameters and nothing else.
        self.register_buffer("centre", (top + bottom) / 2, persistent=False)
        self.register_buffer("radius", (top - bottom) / 2, persistent=False)
        layers: list[nn.Module] = []
        for m, n in itertools.pairwise(widths):
            layer = linear(m, n).double()
            nn.init.xavier_normal_(layer.weight, generator=generator)
            layers += [layer, nn.Tanh()]
        self.layers = nn.Sequential(*layers[:-1])
        self.to(dtype)

    def forward(self, points: Tensor) -> Tensor:
        """u [n] at points [n, d], or [n, k] of k outputs."""
        u: Tensor = self.layers((points - self.centre) / self.radius)
        return u.squeeze(1)


Build = Callable[[Size, Sequence[float], Sequence[float], int, torch.dtype], nn.Module]
"""(size, low, high, seed, dtype) → the model of an equation."""


def one(
    size: Size, low: Sequence[float], high: Sequence[float], seed: int, dtype: torch.dtype, outputs: int = 1
) -> Network:
    """One network of the coordinates."""
    return Network([len(low), *(size.width,) * size.depth, outputs], low, high, seed, dtype)


class Several(nn.Module):
    """Networks of one output each and trainable coefficients, as fields [n, k]: those of coefficients are constant."""

    def __init__(
        self,
        size: Size,
        low: Sequence[float],
        high: Sequence[float],
        seed: int,
        dtype: torch.dtype,
        networks: int = 1,
        coefficients: Sequence[float] = (),
    ) -> None:
        super().__init__()
        seeds = [places.number((seed, i)) for i in range(networks)]
        self.networks = nn.ModuleList(one(size, low, high, each, dtype) for each in seeds)
        self.coefficients = nn.ParameterList(torch.tensor(each, dtype=dtype) for each in coefficients)

    def forward(self, points: Tensor) -> Tensor:
        """All fields [n, k]."""
        return torch.stack(self.fields(points), 1)

    def fields(self, points: Tensor) -> list[Tensor]:
        """Each field [n], networks first."""
        fields = [network(points) for network in self.networks]
        return [*fields, *(each.expand(len(points)) for each in self.coefficients)]


class Periodic(nn.Module):
    """A network of cos and sin of the first coordinate, so that each side of the box is the other, and of the rest."""

    def __init__(self, size: Size, low: Sequence[float], high: Sequence[float], seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._wave_number = 2 * math.pi / (high[0] - low[0])
        self.network = one(size, (-1.0, -1.0, *low[1:]), (1.0, 1.0, *high[1:]), seed, dtype)

    def forward(self, points: Tensor) -> Tensor:
        """u [n] at points [n, d]."""
        phase = self._wave_number * points[:, :1]
        u: Tensor = self.network(torch.cat([torch.cos(phase), torch.sin(phase), points[:, 1:]], 1))
        return u
