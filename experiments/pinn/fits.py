"""Problems without an equation, for the machinery of the PINN study: images, a table of samples, an operator.

The loss is the mean of squares of u − y, one term. The data are generated, and nothing of them is anyone else's.

n   parameters of networks 3x32 and 4x50: images 2,241 and 7,851 (RGB 2,307 and 7,953, of Fourier features 3,201 and
    10,251), regression 705 and 2,201, DeepONet 4,960 and 16,450
N   residuals: one for each pixel (RGB: three), 1,500 samples, 3,000 and 8,000 pairs of a function and a place
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from experiments.pinn.images import image
from experiments.pinn.networks import Size
from experiments.pinn.operators import antiderivative
from experiments.pinn.regressions import regression
from experiments.pinn.samples import Fit


class _Image(NamedTuple):
    side: int
    channels: int = 1
    fourier: bool = False


_IMAGES: Mapping[str, _Image] = {
    "image64": _Image(64),
    "image128": _Image(128),
    "image256": _Image(256),
    "image64-rgb": _Image(64, channels=3),
    "image64-fourier": _Image(64, fourier=True),
}

_MAKERS: Mapping[str, Callable[[int, Size, torch.dtype, int | None], Fit]] = {
    **{name: functools.partial(image, **each._asdict()) for name, each in _IMAGES.items()},
    "regression": functools.partial(regression, noise=0.0),
    "regression-noisy": functools.partial(regression, noise=0.2),
    "deeponet": antiderivative,
}

FITS: tuple[str, ...] = tuple(_MAKERS)
IMAGES: tuple[str, ...] = tuple(_IMAGES)


def fit(name: str, seed: int, size: Size, dtype: torch.dtype, points: int | None) -> Fit:
    """The fit of that name; ``points`` is how many samples are trained on, if not all there are."""
    return _MAKERS[name](seed, size, dtype, points)
