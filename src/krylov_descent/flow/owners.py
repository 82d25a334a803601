"""Owners: to which output row each row of a use of a weight belongs, learnt from a few backward passes.

Letters: z [n, …] an output, S [s] chosen rows of it, R the number of rows of a use (flow/taps.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.flow.taps import Left, Taps
from krylov_descent.layers.verify import tolerance
from krylov_descent.vectors.devices import sent, wide

_COLOURS = 8  # most backward passes for the rows of one output
_PARTS = 4 * _COLOURS  # most parts into which rows are split to find them


@dataclass(frozen=True, eq=False)
class Colour:
    """Output rows of which no two depend on the same row of a use, so that one backward pass serves them all.

    Attributes:
        rows: which output rows these are [n], in host memory.
        owners: by use, the output row to which each of its rows belongs [R], in host memory; n for none.
    """

    rows: Tensor
    owners: dict[int, Tensor]


class Owners:
    """To which output rows the rows of uses belong; equal answers are one tensor."""

    def __init__(self) -> None:
        self._known: list[Tensor] = []

    def learn(self, taps: Taps, z: Tensor) -> list[Colour] | None:
        """Return the colours of an output's rows; None if there are too many."""
        n, colours = len(z), list[Colour]()
        parts = [(0, n)] if z.numel() else []
        count = 0
        while parts:
            low, high = parts.pop()
            count += 1
            if count > _PARTS:
                return None
            rows = torch.zeros(n, dtype=torch.bool, device="cpu")
            rows[low:high] = True
            if (owners := self._owners(taps, z, rows)) is None:
                middle = (low + high) // 2
                parts += [(middle, high), (low, middle)]
                continue
            self._add(colours, Colour(rows, owners), n)
        return colours if len(colours) <= _COLOURS else None

    def _add(self, colours: list[Colour], new: Colour, n: int) -> None:
        for k, colour in enumerate(colours):
            shared = colour.owners.keys() & new.owners.keys()
            if not any(bool(((colour.owners[use] < n) & (new.owners[use] < n)).any()) for use in shared):
                both = {use: torch.minimum(colour.owners[use], new.owners[use]) for use in shared}
                owners = {**colour.owners, **new.owners, **both}
                colours[k] = Colour(colour.rows | new.rows, {use: self._one(x) for use, x in owners.items()})
                return
        colours.append(new)

    def _owners(self, taps: Taps, z: Tensor, rows: Tensor) -> dict[int, Tensor] | None:
        """Return the owners among these output rows; None if a row of a use has two."""
        n = len(z)
        random = torch.Generator("cpu").manual_seed(n)
        v = torch.rand(z.shape, generator=random, dtype=torch.float64, device="cpu").add_(0.5).to(z)
        inside = rows.to(z.device)
        v[~inside] = 0

        def pass_with(w: Tensor) -> dict[int, Left]:
            return taps.record(z, v * w.to(z).reshape(-1, *(1,) * (z.ndim - 1)))

        eps = max(taps.eps, torch.finfo(z.dtype).eps)
        base = int(min(2.0**20, max(2.0, eps**-0.5 / 8)))
        first = pass_with(torch.ones(n))
        found = {use: torch.zeros(len(left.incoming), dtype=torch.long, device=z.device) for use, left in first.items()}
        place = 1
        while place < n:
            digits = torch.arange(n, device=z.device) // place % base
            for use, left in pass_with(1 + wide(digits) / base).items():
                was = first[use].incoming
                ratio = (left.incoming * was).sum(1) / was.square().sum(1)
                digit = ((wide(ratio) - 1) * base).round().nan_to_num(0.0).clamp(0, base - 1)
                found[use] += place * digit.long().to(z.device)
            place *= base
        w = torch.rand(n, generator=random, dtype=torch.float64, device="cpu").add_(0.5).to(z)
        for use, left in pass_with(w).items():
            was = first[use].incoming
            owner = found[use].clamp_(max=n - 1)
            size = was.abs().amax(1)
            allowed = eps**0.5 * size + tolerance(eps) * size.max()
            if not bool(((left.incoming - w.to(was)[owner, None] * was).abs().amax(1) <= allowed).all()):
                return None
            owner[(size == 0) | ~inside[owner]] = n
        return {use: self._one(owner.cpu()) for use, owner in found.items()}

    def _one(self, owner: Tensor) -> Tensor:
        known = next((x for x in self._known if torch.equal(x, owner)), owner)
        if known is owner:
            self._known.append(owner)
        return known


class Slots:
    """The rows of a use that belong to chosen output rows, in the order of these.

    All is found in host memory, where it needs no reads, and copied to the device of the use.

    Attributes:
        slots: the chosen rows that own any, by their number [k].
    """

    def __init__(self, owner: Tensor, S: Tensor, member: Tensor, n: int, device: torch.device) -> None:
        number = torch.full((n + 1,), -1, dtype=torch.long, device="cpu")
        number[S[member]] = torch.arange(len(S), device="cpu")[member]
        slot = number[owner]
        at = (slot >= 0).nonzero()[:, 0]
        slot, order = slot[at].sort(stable=True)
        slots, which, counts = torch.unique_consecutive(slot, return_inverse=True, return_counts=True)
        self._width = int(counts.max()) if len(counts) else 0
        self._even = len(at) == self._width * len(slots)
        rank = torch.arange(len(slot), device="cpu") - (counts.cumsum(0) - counts)[which]
        beside = ((owner == n).nonzero()[:, 0], at[order], slots, *(() if self._even else (which, rank)))
        self._none, self._at, self.slots, *self._places = [sent(x, device) for x in beside]

    def of(self, x: Tensor) -> Tensor:
        """Return the rows of x [R, c], as [k, width, c]."""
        taken = x[self._at]
        if self._even:
            return taken.view(len(self.slots), self._width, x.shape[1])
        placed = x.new_zeros(len(self.slots), self._width, x.shape[1])
        placed[tuple(self._places)] = taken
        return placed

    def missed(self, incoming: Tensor) -> list[Tensor]:
        """Return whether a row that belonged to none has a gradient now, 0-d; nothing if there was no such row."""
        return [incoming[self._none].any()] if len(self._none) else []


def same_points(first: Sequence[Colour], second: Sequence[Colour]) -> bool:
    """Whether rows of the same number depend on the same rows of a use; those that depend on none tell nothing."""
    for x in first:
        for y in second:
            n = len(x.rows)
            for use in x.owners.keys() & y.owners.keys() if len(y.rows) == n else ():
                a, b = x.owners[use], y.owners[use]
                both = (a < n) & (b < n)
                if bool(both.any()):
                    return bool((a == b)[both].all())
    return False
