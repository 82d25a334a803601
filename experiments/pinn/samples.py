"""What a fit has in place of an equation: samples to train on, others to measure on, and a network.

Letters: x inputs [n, d], y targets [n], or [n, c] of several outputs. The samples of a fit are those it has: no others
are drawn while it is trained.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Samples(NamedTuple):
    """Inputs and targets, float64."""

    x: Tensor
    y: Tensor

    def to(self, dtype: torch.dtype) -> Samples:
        """The same in another precision."""
        return Samples(self.x.to(dtype), self.y.to(dtype))


@dataclasses.dataclass(frozen=True, eq=False)
class Fit:
    """A network and its samples.

    Attributes:
        model: x → an estimate of y.
        train: what is fitted.
        held_out: drawn as those, never trained on.
        test: without noise, the same for all seeds.
        names: of the two axes of the picture.
        axes: their nodes.
        plane: inputs and exact values at all pairs of nodes, the second axis the faster.
    """

    model: nn.Module
    train: Samples
    held_out: Samples
    test: Samples
    names: tuple[str, str]
    axes: tuple[Tensor, Tensor]
    plane: Samples
