"""Sigmoid networks of nn.Linear layers with Martens' (2010) sparse initialisation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

INCOMING = 15  # N(0,1) weights per unit; with Glorot's, deep sigmoid autoencoders sit on the mean-image plateau


def sparse_(weight: Tensor, generator: torch.Generator) -> None:
    """Zero but for 15 incoming N(0,1) weights per unit, a unit being a row."""
    with torch.no_grad():
        weight.zero_()
        for row in weight:
            chosen = torch.randperm(len(row), generator=generator)[:INCOMING]
            row[chosen] = torch.randn(len(chosen), generator=generator)


def linear(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    """A layer of zeros: nothing is drawn from the global generator."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs, bias)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    return layer


def dense(widths: Sequence[int], seed: int, code: int | None = None) -> nn.Sequential:
    """Sparsely initialised layers, sigmoid but for the last and the one of index ``code``; zero biases."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for i, (m, n) in enumerate(itertools.pairwise(widths)):
        layer = linear(m, n)
        sparse_(layer.weight, generator)
        layers.append(layer)
        if i not in (code, len(widths) - 2):
            layers.append(nn.Sigmoid())
    return nn.Sequential(*layers)


def autoencoder(sizes: Sequence[int], seed: int) -> nn.Sequential:
    """Layers of ``sizes`` down to a linear code, mirrored; logits come out."""
    return dense([*sizes, *reversed(sizes[:-1])], seed, code=len(sizes) - 2)
