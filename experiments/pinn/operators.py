"""A small DeepONet (Lu et al. 2021, arXiv 1910.03193) that learns the antiderivative of random functions.

v a function on [0, 1], y ∈ [0, 1], G(v)(y) = ∫₀ʸ v. A sample is a pair of a function, given by its values at 20
sensors, and a y: both networks are called once on all pairs, so that a residual comes from one row of each.

Functions are of a Gaussian process, v(s) = Σ_k (a_k cos ω_k s + b_k sin ω_k s)/√K with a_k, b_k standard normal. The
K frequencies are fixed, drawn from a normal of deviation 5: given them, the covariance is Σ_k cos ω_k(s − s')/K, which
is near exp(−(s − s')²/(2·0.2²)). So the antiderivatives are exact.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, nn

from experiments.pinn import points as places
from experiments.pinn.networks import Network, Size
from experiments.pinn.samples import Fit, Samples

SENSORS = 20
PLACES = 5
"""Values of y for each function that is trained on."""

_LENGTH = 0.2  # over which a function changes
_FREQUENCIES = 100
_TEST, _NODES = 100, 101  # functions, and values of y for each


class DeepONet(nn.Module):
    """(v at the sensors, y) [n, sensors + 1] → Σ_k branch_k(v) trunk_k(y)/√width [n]."""

    def __init__(self, size: Size, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden = (size.width,) * size.depth  # the last of them without tanh: the features that are multiplied
        seeds = [places.number((seed, part)) for part in ("branch", "trunk")]
        self.branch = Network([SENSORS, *hidden], (-1.0,) * SENSORS, (1.0,) * SENSORS, seeds[0], dtype)
        self.trunk = Network([1, *hidden], (0.0,), (1.0,), seeds[1], dtype)
        self._scale = 1 / math.sqrt(size.width)

    def forward(self, pairs: Tensor) -> Tensor:
        """G(v)(y) for every pair."""
        branch: Tensor = self.branch(pairs[:, :-1])
        trunk: Tensor = self.trunk(pairs[:, -1:])
        return (branch * trunk).sum(1) * self._scale


def antiderivative(seed: int, size: Size, dtype: torch.dtype, points: int | None) -> Fit:
    """The operator.

    Args:
        seed: of weights and functions.
        size: of branch and trunk, and as many pairs as such a network usually has interior points.
        dtype: of the weights.
        points: pairs to train on, if not so many.
    """
    count = size.interior if points is None else points
    test, function = _test(), torch.arange(_TEST, dtype=torch.float64)
    return Fit(
        DeepONet(size, seed, dtype),
        _drawn(count, (seed, "train")),
        _drawn(count, (seed, "held out")),
        test,
        ("function", "y"),
        (function, _nodes()),
        test,
    )


def values(coefficients: Tensor, s: Tensor) -> Tensor:
    """Functions of coefficients [n, 2, K] at places s [n, m]: [n, m]."""
    phase = s[:, :, None] * _frequencies()
    a, b = coefficients[:, :, None].unbind(1)
    return (a * torch.cos(phase) + b * torch.sin(phase)).sum(2) / math.sqrt(_FREQUENCIES)


def integrals(coefficients: Tensor, y: Tensor) -> Tensor:
    """Their integrals from 0 to y [n, m]: [n, m]."""
    half = y[:, :, None] * _frequencies() / 2
    a, b = coefficients[:, :, None].unbind(1)
    # sin(ωy)/ω and (1 − cos ωy)/ω, as they can be had for ω = 0 too; torch.sinc(x) is sin(πx)/(πx).
    small = y[:, :, None] * torch.sinc(half / math.pi)
    return ((a * torch.cos(half) + b * torch.sin(half)) * small).sum(2) / math.sqrt(_FREQUENCIES)


def _drawn(count: int, key: tuple[int, str]) -> Samples:
    generator = torch.Generator().manual_seed(places.number(("antiderivative", *key)))
    functions = math.ceil(count / PLACES)
    coefficients = torch.randn(functions, 2, _FREQUENCIES, dtype=torch.float64, generator=generator)
    pairs = _pairs(coefficients, torch.rand(functions, PLACES, dtype=torch.float64, generator=generator))
    return Samples(pairs.x[:count], pairs.y[:count])


@functools.cache
def _test() -> Samples:
    generator = torch.Generator().manual_seed(places.number(("antiderivative", "test")))
    coefficients = torch.randn(_TEST, 2, _FREQUENCIES, dtype=torch.float64, generator=generator)
    return _pairs(coefficients, _nodes().expand(_TEST, _NODES))


def _pairs(coefficients: Tensor, y: Tensor) -> Samples:
    """Every function with its places y [n, m]."""
    n, m = y.shape
    sensors = torch.linspace(0, 1, SENSORS, dtype=torch.float64).expand(n, SENSORS)
    seen = values(coefficients, sensors)[:, None].expand(n, m, SENSORS)
    x = torch.cat([seen, y[:, :, None]], 2).reshape(n * m, SENSORS + 1)
    return Samples(x, integrals(coefficients, y).reshape(n * m))


def _nodes() -> Tensor:
    return torch.linspace(0, 1, _NODES, dtype=torch.float64)


@functools.cache
def _frequencies() -> Tensor:
    generator = torch.Generator().manual_seed(places.number(("antiderivative", "frequencies")))
    return torch.randn(_FREQUENCIES, dtype=torch.float64, generator=generator) / _LENGTH
