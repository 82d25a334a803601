"""Regression on a table of the size of those of the UCI collection: eight inputs, 1,500 samples, a tanh network.

The function is the first of Friedman 1991, of x uniform in the cube: 10 sin(πx₁x₂) + 20(x₃ − ½)² + 10x₄ + 5x₅, of mean
14.413 and standard deviation 4.881, here 0 and 1; x₆ to x₈ have nothing to do with it. Noise is normal, in the same
units: Friedman's own is 0.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from experiments.pinn import points as places
from experiments.pinn.networks import Network, Size
from experiments.pinn.samples import Fit, Samples

INPUTS = 8
SAMPLES = 1500
_TEST = 10_000
_NODES = 101
_MEAN, _DEVIATION = 14.413, 4.881
_LOW, _HIGH = (0.0,) * INPUTS, (1.0,) * INPUTS


def regression(seed: int, size: Size, dtype: torch.dtype, points: int | None, *, noise: float) -> Fit:
    """The table.

    Args:
        seed: of weights, samples and noise.
        size: of the network, which is made half as wide: there are few samples.
        dtype: of its weights.
        points: samples to train on; 1,500 unless given.
        noise: standard deviation of what is added to the targets, of the test samples' excepted.
    """
    model = Network([INPUTS, *(size.width // 2,) * size.depth, 1], _LOW, _HIGH, seed, dtype)
    count = SAMPLES if points is None else points
    test = places.draw(places.inside, _TEST, _LOW, _HIGH, ("regression", "test"), torch.float64)
    axis = torch.linspace(0, 1, _NODES, dtype=torch.float64)
    pairs = torch.cartesian_prod(axis, axis)
    plane = torch.cat([pairs, pairs.new_full((len(pairs), INPUTS - 2), 0.5)], 1)
    return Fit(
        model,
        _drawn(count, noise, (seed, "train")),
        _drawn(count, noise, (seed, "held out")),
        Samples(test, friedman(test)),
        ("x1", "x2"),
        (axis, axis),
        Samples(plane, friedman(plane)),
    )


def friedman(x: Tensor) -> Tensor:
    """The function [n] at x [n, 8] of the unit cube, of mean 0 and variance 1."""
    f = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return (f - _MEAN) / _DEVIATION


def _drawn(count: int, noise: float, key: tuple[int, str]) -> Samples:
    generator = torch.Generator().manual_seed(places.number(("regression", *key)))
    x = torch.rand(count, INPUTS, dtype=torch.float64, generator=generator)
    return Samples(x, friedman(x) + noise * torch.randn(count, dtype=torch.float64, generator=generator))
