"""Tanh networks u: points [n, d] → values [n], their inputs scaled to [−1, 1] by a fixed affine map.

The map is part of the model, has no parameters, and makes the same weights a fair start on every domain. Weights are
Xavier-normal, biases zero, both drawn from the seed alone; float32 and float64 networks of a seed start alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from experiments.supervised.networks import linear


class Size(NamedTuple):
    """Hidden layers, their width, and how many points such a network is trained on."""

    depth: int
    width: int
    interior: int
    boundary: int  # all boundary and initial terms together, about


NETWORKS: dict[str, Size] = {
    "3x32": Size(3, 32, 3000, 400),  # 2,241 parameters in two dimensions
    "4x50": Size(4, 50, 8000, 800),  # 7,851
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
        """u [n] at points [n, d]."""
        u: Tensor = self.layers((points - self.centre) / self.radius)
        return u.squeeze(1)
