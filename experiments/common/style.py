"""How figures of the studies look: the palette of ``krylov_descent.plot``, dashes, sizes, titles of panels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from krylov_descent.plot.style import theme

#: Inches of a figure, and points of its text: legible at half size.
WIDTH = 9.0
SIZE = 14.0


@dataclasses.dataclass(frozen=True)
class Line:
    """A method's name in figures, its colour (a field of ``Theme``; blue is ours) and its dashes."""

    name: str
    colour: str
    dashes: Any = "-"

    def arguments(self) -> dict[str, Any]:
        """For ``Axes.plot``: ours in front and thicker."""
        ours = self.colour == "blue"
        look = {"linewidth": 3.2 if ours else 2.0, "zorder": 4 if ours else 3}
        return {"color": getattr(theme(), self.colour), "linestyle": self.dashes, **look}


#: Panels of other problems have the problem's name as title.
TITLES: Mapping[str, str] = {
    "sine-gordon": "Sine–Gordon",
    "fisher": "Fisher",
    "cubic-poisson": "Cubic Poisson",
    "kdv": "Korteweg–de Vries",
    "burgers01": "Burgers, ν = 0.01",
    "poisson-inverse": "Poisson, inverse",
    "reaction-diffusion": "Reaction–diffusion",
    "advection-periodic": "Advection, periodic",
    "helmholtz-fourier": "Helmholtz, Fourier",
    "curves": "CURVES autoencoder",
    "curves5": "CURVES, code of 5",
    "mnist-ae": "MNIST autoencoder",
    "mnist-class": "MNIST classifier",
    "mnist-pretrained": "MNIST, pretrained",
    "spoken-digits": "Spoken digits",
    "starcraft": "StarCraft openings",
    "adding-50": "Adding, T = 50",
    "adding-100": "Adding, T = 100",
    "order-50": "Order, T = 50",
    "order-100": "Order, T = 100",
    "fashion-conv": "Fashion-MNIST, conv",
    "char-lstm": "Character LSTM",
    "char-transformer": "Char. transformer",
}
