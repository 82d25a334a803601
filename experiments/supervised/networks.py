"""Sigmoid networks of nn.Linear layers with Martens' (2010) sparse initialisation, and one of convolutions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

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


def convolutional(classes: int, seed: int) -> nn.Module:
    """Of 28 × 28 images, which come as rows: 8 and 16 channels of 5 × 5 with a stride of 2, 64 units, ReLU."""
    return usual(
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            nn.Conv2d(1, 8, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        ),
        seed,
    )


def usual(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A network with torch's usual initial weights, from a seed; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()
