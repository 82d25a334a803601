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

_LARGE = 4  # times the mean size: what a row must exceed to be drawn more often than others


@dataclass(frozen=True)
class Seen:
    """What is known of a closure's outputs: shapes, and where their rows come from, if from few rows each."""

    shapes: tuple[tuple[int, ...], ...]
    places: tuple[Place | None, ...]


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


@dataclass(frozen=True, eq=False)
class Chosen:
    """Rows of one output.

    Attributes:
        rows: S [s], ascending.
        chance: π [s], with which each was to be drawn.
    """

    rows: Tensor
    chance: Tensor


def sizes_of(evaluation: Evaluation) -> list[Tensor]:
    """For every output, how much of the loss hangs on each of its rows: ‖∂f/∂z‖² [n] of row z."""
    outputs = evaluation.outputs
    deltas: Sequence[Tensor | None] = [None] * len(outputs)
    if evaluation.loss.requires_grad:
        deltas = torch.autograd.grad(evaluation.loss, outputs, allow_unused=True)
    found = []
    for z, delta in zip(outputs, deltas, strict=True):
        n = z.shape[0] if z.ndim else 1
        size = (torch.zeros_like(z) if delta is None else delta).detach().reshape(n, z.numel() // max(1, n))
        found.append(size.double().square().sum(1).nan_to_num(0.0, 0.0, 0.0).cpu())
    return found


def counts(seen: Seen, wanted: int) -> list[int]:
    """How many rows of each output are drawn: in proportion to their number, but at least a third of an even share."""
    return [
        min(shape[0] if shape else 1, max(1, round(s)))
        for shape, s in zip(seen.shapes, _shares(seen, wanted), strict=True)
    ]


def widths(seen: Seen, wanted: int, numel: int) -> list[int]:
    """How many cotangents each row of an output gets: of a few rows with many entries each, more than one.

    Those are then no larger than the rows of J, which have ``numel`` entries.
    """
    found = []
    for shape, share in zip(seen.shapes, _shares(seen, wanted), strict=True):
        c = math.prod(shape[1:])
        found.append(cotangents(c, share / max(1, shape[0] if shape else 1) * min(1.0, numel / max(1, c))))
    return found


def _shares(seen: Seen, wanted: int) -> list[float]:
    """Of each output, if it had as many rows as one could wish."""
    numbers = [shape[0] if shape else 1 for shape in seen.shapes]
    least = [max(1, cotangents(math.prod(shape[1:]))) for shape in seen.shapes]
    total = max(1, sum(n * k for n, k in zip(numbers, least, strict=True)))
    return [wanted * max(n / total, 1 / (3 * k * len(numbers))) for n, k in zip(numbers, least, strict=True)]


def everything(seen: Seen, wanted: int) -> bool:
    """Whether all rows are drawn."""
    return all(s == (shape[0] if shape else 1) for s, shape in zip(counts(seen, wanted), seen.shapes, strict=True))


def choose(
    seen: Seen, sizes: Sequence[Tensor], wanted: int, generator: torch.Generator, device: torch.device
) -> list[Chosen]:
    """Which rows of each output are drawn; the same of outputs that come from the same rows.

    Evenly, but for rows whose ``sizes`` are far above the mean: a few, at a front, may hold most of the loss.
    """
    keys = [(place, len(size)) for place, size in zip(seen.places, sizes, strict=True)]
    most: dict[tuple[Place | None, int], int] = {}
    summed: dict[tuple[Place | None, int], Tensor] = {}
    for key, size, s in zip(keys, sizes, counts(seen, wanted), strict=True):
        most[key] = max(s, most.get(key, 0))
        summed[key] = size + summed.get(key, 0.0)
    drawn = {}
    for key, s in most.items():
        chance = chances(summed[key], s)
        S = systematic(chance, s, generator)
        drawn[key] = Chosen(S.to(device), chance[S])
    return [drawn[key] for key in keys]


def chances(size: Tensor, s: int) -> Tensor:
    """π [n] with Σπ = s and π ≤ 1: even, but in proportion to the size of rows that are far above the mean.

    Example:
        >>> size = torch.ones(20, dtype=torch.float64)
        >>> size[0] = 181.0
        >>> chances(size, 4)[:3]
        tensor([0.7694, 0.1700, 0.1700], dtype=torch.float64)
    """
    n, whole = len(size), float(size.sum())
    share = torch.full_like(size, 1 / max(1, n))
    if 0 < whole < math.inf:
        share = torch.maximum(share, size / (_LARGE * whole))
    sure = share < 0
    while True:  # what is beyond 1 goes to the others
        left = s - int(sure.sum())
        chance = share * (left / float(share[~sure].sum()) if left else 0.0)
        chance[sure] = 1
        more = chance > 1
        if not bool(more.any()):
            return chance
        sure |= more


def systematic(chance: Tensor, s: int, generator: torch.Generator) -> Tensor:
    """s rows [s], ascending, each drawn with just its chance (systematic sampling in a random order)."""
    order = torch.randperm(len(chance), generator=generator, device="cpu")
    first = torch.rand(1, dtype=torch.float64, generator=generator, device="cpu")
    marks = first + torch.arange(s, dtype=torch.float64, device="cpu")
    at = torch.searchsorted(chance[order].cumsum(0), marks).clamp(max=len(chance) - 1)
    drawn: Tensor = torch.unique(order[at])
    return drawn


def samples_of(seen: Seen, chosen: Sequence[Chosen]) -> dict[int, Tensor]:
    """For each number of rows of a layer's inputs, those that some output was chosen from."""
    rows: dict[int, list[Tensor]] = {}
    for place, drawn in zip(seen.places, chosen, strict=True):
        if place is None or not len(drawn.rows):
            continue
        rows.setdefault(place.rows, []).append(place.of(drawn.rows).reshape(-1))
    return {number: torch.unique(torch.cat(parts)) for number, parts in rows.items()}
