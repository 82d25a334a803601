"""A problem as optimizers see it: the parameters as one vector, and the loss, its gradient, its rows at a point.

Letters: θ [n] parameters, f the loss, g [n] its gradient; J [N, n] and ρ [N] with f = ½‖ρ‖², so that Jᵀρ = g and JᵀJ is
the Gauss–Newton matrix of f.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from krylov_descent.distributed import SingleProcess
from krylov_descent.flow.sketch import Sketcher
from krylov_descent.objective.objective import Objective
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.vectors.parameters import ParameterVector

ALL = 10**9
"""As a number of rows: all there are."""


class Trainable(Protocol):
    """What a method needs of a problem."""

    @property
    def model(self) -> nn.Module:
        """The network that is trained."""
        ...

    @property
    def closure(self) -> Callable[[], tuple[Tensor, tuple[Tensor, ...]]]:
        """→ f and residual terms z with f = Σ z.square().mean(); it never calls backward."""
        ...

    @property
    def draw(self) -> int:
        """Which points these are the residuals of: another number, other points."""
        ...

    @property
    def part(self) -> Callable[[int, torch.Generator], Callable[[], tuple[Tensor, tuple[Tensor, ...]]]]:
        """(how many, generator) → the closure on so many of the points, drawn evenly."""
        ...


class LeastSquares:
    """f and what can be had of it, at the parameters of the model."""

    def __init__(self, problem: Trainable) -> None:
        self._problem = problem
        self.parameters = ParameterVector([{"params": list(problem.model.parameters()), "weight_decay": 0.0}])
        self._objective = Objective(lambda _: problem.closure(), self.parameters, SingleProcess())
        self._sketchers: dict[int, Sketcher] = {}
        self._part, self._part_sketcher = problem.closure, Sketcher(ALL)
        self._on_part = Objective(lambda _: self._part(), self.parameters, SingleProcess())
        self._draw = problem.draw

    def renewed(self) -> bool:
        """Whether points were drawn since this was asked last: f and g that are remembered are then of another loss."""
        before, self._draw = self._draw, self._problem.draw
        return self._draw != before

    def point(self) -> Tensor:
        """θ, a copy."""
        return self.parameters.read()

    def move(self, theta: Tensor, direction: Tensor | None = None, length: float = 1.0) -> None:
        """To θ, or θ + length·direction."""
        self.parameters.write(theta, direction, length)

    def value(self) -> float:
        """f by a forward pass."""
        with self.parameters.frozen():
            return float(self._problem.closure()[0].detach())

    def gradient(self) -> tuple[float, Tensor]:
        """f and g."""
        loss, _ = self._problem.closure()
        return float(loss.detach()), self.parameters.flatten(torch.autograd.grad(loss, self.parameters.params))

    def rows(self, count: int, key: Sequence[int] = (0,)) -> tuple[Tensor, Tensor]:
        """J and ρ of about so many residuals, rescaled to stand for all; ``key`` seeds which are drawn."""
        sketcher = self._sketchers.setdefault(count, Sketcher(count))
        sketch = sketcher.draw(self._objective, [Microbatch(None, None)], key)
        return sketch.J, sketch.rho

    def rows_of_batch(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """J and ρ of the loss on about so many points, drawn evenly; no others are looked at."""
        self._part = self._problem.part(count, generator)
        sketch = self._part_sketcher.draw(self._on_part, [Microbatch(None, None)], (0,))
        return sketch.J, sketch.rho


def in_turn(*phases: Iterator[float]) -> Iterator[float]:
    """One phase after the other; a loss that is not finite ends them all, as NaN."""
    for phase in phases:
        for loss in phase:
            if not math.isfinite(loss):
                yield math.nan
                return
            yield loss
