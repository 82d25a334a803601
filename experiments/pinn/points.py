"""Where the equations are asked to hold: scrambled Sobol points of a seed, moved onto the set of each term.

A ``Place`` takes points [n, d] of the unit cube to a subset of it: all of it, the initial time, faces. The time, where
there is one, is the last column.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Place = Callable[[Tensor], Tensor]


def inside(unit: Tensor) -> Tensor:
    """The whole cube."""
    return unit


def at_start(unit: Tensor) -> Tensor:
    """Time 0."""
    return _with(unit, -1, 0.0)


def at_left(unit: Tensor) -> Tensor:
    """The lower end of the first coordinate."""
    return _with(unit, 0, 0.0)


def at_ends(unit: Tensor) -> Tensor:
    """Both ends of the first coordinate, half of the points on each."""
    return _on_faces(unit, columns=1)


def all_faces(unit: Tensor) -> Tensor:
    """The boundary of the cube, as many points on each face."""
    return _on_faces(unit, columns=unit.shape[1])


def _on_faces(unit: Tensor, columns: int) -> Tensor:
    # Runs of neighbours, not every k-th: every 2^j-th Sobol point lies in the same strip of the cube.
    runs = unit.tensor_split(2 * columns)
    return torch.cat([_with(run, i // 2, float(i % 2)) for i, run in enumerate(runs)])


def _with(unit: Tensor, column: int, value: float) -> Tensor:
    moved = unit.clone()
    moved[:, column] = value
    return moved


def draw(
    place: Place, count: int, low: Sequence[float], high: Sequence[float], key: Sequence[object], dtype: torch.dtype
) -> Tensor:
    """Points [count, d] of a place in the box from ``low`` to ``high``; the same for the same key."""
    engine = torch.quasirandom.SobolEngine(len(low), scramble=True, seed=number(key))  # type: ignore[no-untyped-call]
    unit = place(engine.draw(count, dtype=torch.float64))
    bottom, top = (torch.tensor(each, dtype=torch.float64) for each in (low, high))
    return (bottom + (top - bottom) * unit).to(dtype)


def number(key: Sequence[object]) -> int:
    """A seed out of numbers and words."""
    digest = hashlib.blake2b(repr(tuple(key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def counts(interior: int, boundary: int, data: Sequence[int | None]) -> list[int]:
    """How many points each term gets: no two as many, so that rows can be told apart by their number.

    The first gets ``interior``; the others share ``boundary``, but for those that have a number of data.
    """
    found = [interior]
    share = boundary // max(1, data[1:].count(None))
    for n in data[1:]:
        count = share if n is None else n
        while count in found:
            count += 1
        found.append(count)
    return found
