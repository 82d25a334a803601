"""Which rows of the closure's outputs a sketch is made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.closure import Evaluation, require_outputs
from krylov_descent.data import Microbatch
from krylov_descent.jacobian import Calls, Place, place_of
from krylov_descent.objective import Objective
from krylov_descent.output_hessian import cotangents


@dataclass(frozen=True)
class Seen:
    """What is known of a closure's outputs: shapes, and where their rows come from."""

    shapes: tuple[tuple[int, ...], ...]
    places: tuple[Place, ...]


def look(objective: Objective, batch: Microbatch) -> Seen:
    """Call the closure, and see."""
    calls = Calls(objective.parameters.params)
    with calls:
        evaluation = objective.evaluate(batch)
    require_outputs(evaluation, "basis='rational'")
    rows = (z.reshape(1) if z.ndim == 0 else z for z in evaluation.outputs)
    return Seen(shapes_of(evaluation), tuple(place_of(z, calls.results) for z in rows))


def shapes_of(evaluation: Evaluation) -> tuple[tuple[int, ...], ...]:
    """Of the outputs."""
    return tuple(tuple(z.shape) for z in evaluation.outputs)


def choose(seen: Seen, wanted: int, generator: torch.Generator) -> list[Tensor]:
    """Which rows of each output are drawn; the same of outputs that come from the same rows.

    In proportion to their number, but no output gets less than a third of an even share.
    """
    numbers = [shape[0] if shape else 1 for shape in seen.shapes]
    widths = [max(1, cotangents(math.prod(shape[1:]))) for shape in seen.shapes]
    total = max(1, sum(n * k for n, k in zip(numbers, widths, strict=True)))
    drawn: dict[tuple[Place, int], Tensor] = {}
    for n, k, place in zip(numbers, widths, seen.places, strict=True):
        s = min(n, max(1, round(wanted * max(n / total, 1 / (3 * k * len(numbers))))))
        if (place, n) not in drawn or s > len(drawn[place, n]):
            drawn[place, n] = torch.randperm(n, generator=generator, device="cpu")[:s].sort().values
    return [drawn[place, n] for n, place in zip(numbers, seen.places, strict=True)]


def samples_of(seen: Seen, chosen: Sequence[Tensor]) -> dict[int, Tensor]:
    """For each number of rows of a layer's inputs, those that some output was chosen from."""
    rows: dict[int, list[Tensor]] = {}
    for place, S in zip(seen.places, chosen, strict=True):
        rows.setdefault(place.rows, []).append(place.of(S).reshape(-1))
    return {number: torch.unique(torch.cat(parts)) for number, parts in rows.items()}
