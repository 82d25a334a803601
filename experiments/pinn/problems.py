"""A problem of the study: an equation or samples to fit, a network, training points, and what is measured.

Loss: Σ over terms of mean(z²), z = √weight · residual; interior terms have weight 1, all others 100.
Every term has points of its own, and no two terms have as many. Error: ‖u − u*‖ / ‖u*‖ over the test points, u* the
exact solution in float64: a grid that contains the boundary, or in five dimensions 10,000 Sobol points. Where several
fields or coefficients are unknown, u has them all.

A fit has one term, of weight 1, and the error is that on its test samples.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from experiments.pinn import networks
from experiments.pinn import points as places
from experiments.pinn.equations import EQUATIONS, Equation
from experiments.pinn.fits import FITS, fit
from experiments.pinn.further import FURTHER
from experiments.pinn.samples import Fit, Samples
from experiments.pinn.unseen import UNSEEN

PROBLEMS: tuple[str, ...] = tuple(EQUATIONS)

#: Constants of methods are chosen on the first, and shown on the second, on which nothing is chosen.
CHOOSING: tuple[str, ...] = (*PROBLEMS, "heat-inverse", "kovasznay", "klein-gordon")
SHOWN: tuple[str, ...] = (
    *("sine-gordon", "fisher", "cubic-poisson", "kdv", "burgers01", "poisson-inverse"),
    *("reaction-diffusion", "advection-periodic", "helmholtz-fourier"),
)

_ALL = {**EQUATIONS, **UNSEEN, **FURTHER}
_TEST_POINTS = 10_000  # where there are too many dimensions for a grid

Terms = tuple[Tensor, tuple[Tensor, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
    """Two axes of the domain with the fields on them, [n0, n1]; the other coordinates, if any, are at mid-range."""

    names: tuple[str, str]
    axes: tuple[Tensor, Tensor]
    exact: Tensor
    solution: Callable[[], Tensor]  # what the network says


@dataclasses.dataclass(eq=False)
class Problem:
    """An equation to be solved, or samples to be fitted, by training ``model`` on ``closure``.

    Attributes:
        name: of the equation or fit.
        model: points [n, d] → u [n]; of several fields [n, k], of an image in colours [n, 3].
        closure: the loss and the weighted residuals z, for each term a tensor [n] or [n, k]; never calls backward.
            It works with gradients switched off too, and is cheaper then.
        error: relative L2 error on the test points.
        held_out: the loss on points that are never trained on.
        resample: draw new training points, the same for the same number; 0 has those of the beginning. Of a fit, a
            ValueError: it has the samples it has.
        grid: for pictures.
        part: (how many, generator) → the closure on so many of the training points, drawn evenly from those of every
            term, of which each keeps at least a third of an even share.
        draw: the number that ``resample`` was given last.
    """

    name: str
    model: nn.Module
    closure: Callable[[], Terms]
    error: Callable[[], float]
    held_out: Callable[[], float]
    resample: Callable[[int], None]
    grid: Grid
    part: Callable[[int, torch.Generator], Callable[[], Terms]]
    draw: int = 0


def problem(
    name: str,
    *,
    seed: int,
    network: str = "3x32",
    dtype: torch.dtype = torch.float64,
    points: int | None = None,
) -> Problem:
    """The problem of that name; weights and all points come from the seed.

    Args:
        name: one of PROBLEMS, UNSEEN, FURTHER or FITS.
        seed: of weights, training points and held-out points; the test points are the same for all seeds.
        network: one of ``networks.NETWORKS``.
        dtype: of weights, points and losses; errors are measured in float64.
        points: interior training points, or samples of a fit, if not as many as usual.

    Raises:
        ValueError: there is no such problem or network, or points is not positive.
    """
    if name not in _ALL and name not in FITS:
        raise ValueError(f"no problem is named {name!r}: choose from {', '.join((*_ALL, *FITS))}")
    if points is not None and points < 1:
        raise ValueError(f"points is {points}: it must be at least 1, or None for the network's usual number")
    size = networks.size(network)
    if name in FITS:
        return _fitted(name, fit(name, seed, size, dtype, points), dtype)
    equation = _ALL[name]
    model = equation.build(size, equation.low, equation.high, seed, dtype)
    interior = size.interior if points is None else points
    train = _Points(equation, interior, size.boundary, dtype, (name, seed, "train"))
    held_out = _Points(equation, interior, size.boundary, dtype, (name, seed, "held out"))
    axes, nodes, exact = _plane(name)

    @torch.no_grad()
    def solution() -> Tensor:
        return _first(_values(model, nodes)).reshape(equation.grid)

    def part(count: int, generator: torch.Generator) -> Callable[[], Terms]:
        at = train.of_terms
        chosen = _some([len(each) for each in at], count, generator)
        return functools.partial(
            _terms, equation, model, [x.detach()[S].requires_grad_() for x, S in zip(at, chosen, strict=True)]
        )

    return Problem(
        name,
        model,
        closure=lambda: _terms(equation, model, train.of_terms),
        error=functools.partial(_error, model, *_test(name)),
        held_out=functools.partial(_held_out, equation, model, held_out),
        resample=train.redraw,
        grid=Grid(equation.names, axes, _first(exact).reshape(equation.grid), solution),
        part=part,
    )


def _fitted(name: str, made: Fit, dtype: torch.dtype) -> Problem:
    shape = (len(made.axes[0]), len(made.axes[1]))

    def refuse(_: int) -> None:
        raise ValueError(f"{name} is fitted to the samples it has: there are no others to draw")

    @torch.no_grad()
    def solution() -> Tensor:
        return _shade(_values(made.model, made.plane.x)).view(shape)

    train = made.train.to(dtype)

    def part(count: int, generator: torch.Generator) -> Callable[[], Terms]:
        S = _some([len(train.x)], count, generator)[0]
        return functools.partial(_misfit, made.model, Samples(train.x[S], train.y[S]))

    return Problem(
        name,
        made.model,
        closure=functools.partial(_misfit, made.model, train),
        error=functools.partial(_error, made.model, *made.test),
        held_out=functools.partial(_held_out_misfit, made.model, made.held_out.to(dtype)),
        resample=refuse,
        grid=Grid(made.names, made.axes, _shade(made.plane.y).view(shape), solution),
        part=part,
    )


class _Points:
    """Points of every term, replaced together."""

    def __init__(
        self, equation: Equation, interior: int, boundary: int, dtype: torch.dtype, key: Sequence[object]
    ) -> None:
        self._equation, self._dtype, self._key = equation, dtype, key
        self._counts = places.counts(interior, boundary, [term.data for term in equation.terms])
        self.redraw(0)

    def redraw(self, key: int) -> None:
        equation = self._equation
        self.of_terms = [
            places.draw(
                term.place, n, equation.low, equation.high, (*self._key, 0 if term.data else key, i), self._dtype
            )
            for i, (term, n) in enumerate(zip(equation.terms, self._counts, strict=True))
        ]
        for each in self.of_terms:
            each.requires_grad_()


def _some(sizes: Sequence[int], count: int, generator: torch.Generator) -> list[Tensor]:
    """About so many positions in lists of these sizes, drawn evenly in each; of no two lists as many."""
    drawn: list[Tensor] = []
    for n in sizes:
        s = max(1, round(count * max(n / sum(sizes), 1 / (3 * len(sizes)))))
        while s in map(len, drawn):
            s += 1
        drawn.append(torch.randperm(n, generator=generator)[:s])
    return drawn


def _terms(equation: Equation, model: nn.Module, points: Sequence[Tensor]) -> Terms:
    z = tuple(term.weight**0.5 * term.residual(model, each) for term, each in zip(equation.terms, points, strict=True))
    return torch.stack([each.square().mean() for each in z]).sum(), z


@torch.no_grad()
def _held_out(equation: Equation, model: nn.Module, at: _Points) -> float:
    return float(_terms(equation, model, at.of_terms)[0])


def _misfit(model: nn.Module, samples: Samples) -> Terms:
    z = model(samples.x) - samples.y
    return z.square().mean(), (z,)


@torch.no_grad()
def _held_out_misfit(model: nn.Module, samples: Samples) -> float:
    return float(_misfit(model, samples)[0])


def _first(u: Tensor) -> Tensor:
    """The first of several fields [n, k], for pictures."""
    return u if u.ndim == 1 else u[:, 0]


def _shade(u: Tensor) -> Tensor:
    """Colours [n, 3] as their mean, for pictures."""
    return u if u.ndim == 1 else u.mean(1)


@torch.no_grad()
def _error(model: nn.Module, at: Tensor, exact: Tensor) -> float:
    return float((_values(model, at) - exact).norm() / exact.norm())


def _values(model: nn.Module, at: Tensor) -> Tensor:
    """u in float64, whatever the dtype of the model."""
    dtype = next(model.parameters()).dtype
    u: Tensor = model(at.to(dtype))
    return u.double()


@functools.cache
def _plane(name: str) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Axes of the first two coordinates, the points [n0·n1, d] of their grid, and the exact solution there."""
    equation = _ALL[name]
    first, second = (
        torch.linspace(low, high, count, dtype=torch.float64)
        for low, high, count in zip(equation.low[:2], equation.high[:2], equation.grid, strict=True)
    )
    plane = torch.cartesian_prod(first, second)
    middle = [(low + high) / 2 for low, high in zip(equation.low[2:], equation.high[2:], strict=True)]
    nodes = torch.cat([plane, torch.tensor(middle, dtype=torch.float64).expand(len(plane), len(middle))], 1)
    return (first, second), nodes, equation.exact(nodes)


@functools.cache
def _test(name: str) -> tuple[Tensor, Tensor]:
    """Test points and the exact solution there."""
    equation = _ALL[name]
    if len(equation.low) == 2:
        return _plane(name)[1:]
    drawn = places.draw(places.inside, _TEST_POINTS, equation.low, equation.high, (name, "test"), torch.float64)
    return drawn, equation.exact(drawn)
