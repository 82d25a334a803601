"""An image as a function of the place, fitted on the centres of its pixels.

The image is a formula: smooth shades, rings that get finer outwards, a disk and three letters with sharp edges, three
channels from −1 to 1; a grey image is their mean. All sizes show the same image, so that edges, 0.04 wide, are one
pixel of 64 and five of 256. It is tested on the centres of a grid twice as fine.

Networks are the sine network of Sitzmann et al. 2020 (arXiv 2006.09661), x ← sin(ω(Wx + b)) in every layer but the
last, or a tanh network of the Fourier features of Tancik et al. 2020 (arXiv 2006.10739), sin Bx and cos Bx of a random
B that is not trained.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from experiments.pinn import points as places
from experiments.pinn.networks import Network, Size
from experiments.pinn.samples import Fit, Samples
from experiments.supervised.networks import linear

_FREQUENCY = 30.0  # ω, the authors'
_DEVIATION = 10.0  # of the entries of B
_EDGE = 0.01  # of a sigmoid; from a tenth to nine tenths of the ink it is 4.4 times as wide
_STROKE = 0.035  # half the width of a stroke
_LOW, _HIGH = (-1.0, -1.0), (1.0, 1.0)

# Strokes of three letters, each a line through these places (x, y).
_LETTERS = (
    ((-0.8, -0.8), (-0.8, -0.3)),
    ((-0.5, -0.3), (-0.8, -0.55), (-0.5, -0.8)),
    ((0.1, -0.35), (-0.05, -0.3), (-0.2, -0.4), (-0.15, -0.52), (0.05, -0.58)),
    ((0.05, -0.58), (0.1, -0.7), (-0.05, -0.8), (-0.2, -0.75)),
    ((0.4, -0.8), (0.4, -0.3), (0.6, -0.32), (0.75, -0.45), (0.75, -0.65), (0.6, -0.78), (0.4, -0.8)),
)
_INK = (0.95, 0.8, 0.65)  # of the channels
_DISK = (-0.9, -0.6, -0.75)


def image(
    seed: int, size: Size, dtype: torch.dtype, points: int | None, *, side: int, channels: int, fourier: bool
) -> Fit:
    """The image of so many pixels along a side.

    Args:
        seed: of the weights, of the held-out places and of the pixels, if not all are trained on.
        size: of the network.
        dtype: of its weights.
        points: how many pixels are trained on; all unless given.
        side: pixels along a side.
        channels: 3 for colours, 1 for grey.
        fourier: as many Fourier features as the network is wide, and tanh, in place of sines.

    Raises:
        ValueError: there are not so many pixels.
    """
    pixels = centres(side)
    if points is not None and points > len(pixels):
        raise ValueError(f"points is {points}: the image has {len(pixels)} pixels, so give as many or fewer")
    if points is not None:
        generator = torch.Generator().manual_seed(places.number((seed, "pixels")))
        pixels = pixels[torch.randperm(len(pixels), generator=generator)[:points]]
    widths = [2, *(size.width,) * size.depth, channels]
    model = FourierNetwork(widths, seed, dtype) if fourier else SineNetwork(widths, seed, dtype)
    others = places.draw(places.inside, len(pixels), _LOW, _HIGH, (seed, "between pixels"), torch.float64)
    test, axis = finer(side, channels), _axis(2 * side)
    return Fit(
        model,
        Samples(pixels, brightness(pixels, channels)),
        Samples(others, brightness(others, channels)),
        test,
        ("x", "y"),
        (axis, axis),
        test,
    )


def centres(side: int) -> Tensor:
    """Of the pixels, [side², 2]."""
    return torch.cartesian_prod(_axis(side), _axis(side))


@functools.cache
def finer(side: int, channels: int) -> Samples:
    """The grid twice as fine, and the image there."""
    at = centres(2 * side)
    return Samples(at, brightness(at, channels))


def brightness(at: Tensor, channels: int) -> Tensor:
    """The image at places [n, 2]: [n] in grey, [n, 3] in colours."""
    return picture(at) if channels == 3 else picture(at).mean(1)


def picture(at: Tensor) -> Tensor:
    """The three channels [n, 3] at places [n, 2] of [−1, 1]²."""
    x, y = at.unbind(1)
    tilt = torch.linspace(0, 1, 3, dtype=at.dtype)
    smooth = 0.35 * torch.sin(1.5 * x[:, None] + 2 * y[:, None] + 2 * tilt) + 0.15 * torch.cos(3 * y)[:, None]
    far = (x - 0.45) ** 2 + (y - 0.45) ** 2
    rings = 0.4 * torch.cos(60 * far) * torch.exp(-6 * far)
    shade = smooth + rings[:, None] * (1 - 0.5 * tilt)
    inside = torch.sigmoid((0.3 - torch.hypot(x + 0.5, y - 0.45)) / _EDGE)
    shade = _over(shade, inside, _DISK)
    near = torch.stack([_distance(at, a, b) for line in _LETTERS for a, b in itertools.pairwise(line)]).amin(0)
    return _over(shade, torch.sigmoid((_STROKE - near) / _EDGE), _INK)


class SineNetwork(nn.Module):
    """Places [n, 2] → values [n], or [n, c] where there are several; weights and biases from the seed alone."""

    def __init__(self, widths: Sequence[int], seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList()
        for i, (m, n) in enumerate(itertools.pairwise(widths)):
            layer = linear(m, n).double()
            bound = math.sqrt(6 / m) / _FREQUENCY if i else 1 / m
            nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
            nn.init.uniform_(layer.bias, -(m**-0.5), m**-0.5, generator=generator)
            self.layers.append(layer)
        self.to(dtype)

    def forward(self, at: Tensor) -> Tensor:
        """Values at places [n, d]."""
        *hidden, last = self.layers
        for layer in hidden:
            at = torch.sin(_FREQUENCY * layer(at))
        u: Tensor = last(at)
        return u.squeeze(1)


class FourierNetwork(nn.Module):
    """The same by a tanh network of as many sines and cosines as its first layer is wide."""

    B: Tensor

    def __init__(self, widths: Sequence[int], seed: int, dtype: torch.dtype, deviation: float = _DEVIATION) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(places.number((seed, "Fourier")))
        B = deviation * torch.randn(widths[0], widths[1] // 2, dtype=torch.float64, generator=generator)
        features = 2 * B.shape[1]
        self.network = Network([features, *widths[1:]], (-1.0,) * features, (1.0,) * features, seed, dtype)
        self.register_buffer("B", B.to(dtype))

    def forward(self, at: Tensor) -> Tensor:
        """Values at places [n, d]."""
        phase = at @ self.B
        u: Tensor = self.network(torch.cat([torch.sin(phase), torch.cos(phase)], 1))
        return u


def _axis(count: int) -> Tensor:
    """Centres of so many cells of [−1, 1]."""
    return (2 * torch.arange(count, dtype=torch.float64) + 1) / count - 1


def _over(below: Tensor, amount: Tensor, colour: Sequence[float]) -> Tensor:
    return below + amount[:, None] * (below.new_tensor(colour) - below)


def _distance(at: Tensor, a: tuple[float, float], b: tuple[float, float]) -> Tensor:
    """From places [n, 2] to the stroke from a to b."""
    start, along = at.new_tensor(a), at.new_tensor(b) - at.new_tensor(a)
    share = ((at - start) @ along / (along @ along)).clamp(0, 1)
    offset = at - start - share[:, None] * along
    return torch.hypot(offset[:, 0], offset[:, 1])
