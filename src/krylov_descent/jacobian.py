"""Rows of the outputs' Jacobian, hundreds at the cost of a few gradients.

Letters: z outputs [N, c], J = ∂z/∂θ, S ⊂ {1 … N} chosen rows, s of them, u [s, c] a cotangent for each.

Row i of the outputs depends on one row of a layer's inputs only: row i, or row o + i where several sets of points go
through the network together, or on one of each of several sets, rows o₁ + i, o₂ + i, … (both ends of a periodic
boundary). So each chosen row of the inputs is given weights of its own,
W + Δᵢ with Δ = 0 [s, out, in], and one backward pass from Σ_{i∈S} uᵢ·zᵢ has ∂/∂Δᵢ = uᵢᵀ∂zᵢ/∂W for all of S at once:
rows that would take a backward pass each. It stays right where the closure differentiates the network itself, as
physics-informed networks do, because Δ is part of what is differentiated there.

Parameters in no linear layer (unknown coefficients of an equation), if of few entries, have their columns instead: the
backward pass is linear in its cotangent, and the derivative of one entry of it by the weight of each uᵢ is a column.

It is silently wrong where a parameter acts both in a linear layer and elsewhere, one of many entries in none, or rows
of outputs share rows of the layers' inputs. ``along`` tells: Σᵢ wᵢ(uᵢᵀJᵢ) must be the ordinary backward pass from the
cotangent w∘u.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CHUNK = 64  # rows that take a backward pass each, at a time
_SETS = 8  # rows of the inputs that a row of the outputs may come from
_FEW = 32  # entries in no linear layer that take a derivative of a backward pass each


@dataclass(frozen=True)
class Place:
    """Where the rows of an output come from: row i from rows o + i of calls with ``rows`` rows, for each offset o."""

    rows: int
    offset: int
    further: tuple[int, ...] = ()

    def of(self, S: Tensor) -> Tensor:
        """Rows of the calls [offsets, s] that those of S come from."""
        return S + torch.tensor((self.offset, *self.further), device=S.device)[:, None]


class Calls(TorchFunctionMode):
    """While active, keeps what linear layers with weights in ``params`` give."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        super().__init__()
        self._params = set(map(id, params))
        self.results: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        y = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and y.requires_grad and y.ndim > 1:
            _, W, b = _linear(*args, **(kwargs or {}))
            if id(W) in self._params or id(b) in self._params:
                self.results.append(y)
        return y


def place_of(z: Tensor, results: Sequence[Tensor]) -> Place | None:
    """Which rows of the layers' inputs those of z are, as one of the first and one of the last tell; None: too many."""
    n = z.shape[0]
    for rows in sorted({y.shape[0] for y in results if y.shape[0] >= n > 0}):
        ys = [y for y in results if y.shape[0] == rows]
        i, first = _telling(z, ys, (0, 1, n // 4, n // 2))
        j, last = _telling(z, ys, (n - 1, n - 2, n - 1 - n // 4, n // 2))
        offsets = [o - i for o in first]
        apart = all(after - before >= n for before, after in itertools.pairwise(offsets))
        inside = bool(first) and offsets[0] >= 0 and offsets[-1] + n <= rows
        if inside and apart and last == [o + j for o in offsets]:
            if len(offsets) > _SETS:  # an integral: weights of their own for all points, to have a row or two
                return None
            return Place(rows, offsets[0], tuple(offsets[1:]))
    return Place(n, 0)  # none that can be told: its rows will be refuted, and had one by one


def _telling(z: Tensor, ys: Sequence[Tensor], candidates: Sequence[int]) -> tuple[int, list[int]]:
    """The first of these rows that comes from any, and which: hard constraints make some of them constant."""
    i, found = candidates[0], list[int]()
    for i in dict.fromkeys(i for i in candidates if 0 <= i < len(z)):
        if found := _touched(z[i], ys):
            break
    return i, found


def _touched(e: Tensor, ys: Sequence[Tensor]) -> list[int]:
    grads = torch.autograd.grad(e.sum(), ys, retain_graph=True, allow_unused=True)
    found = [g.reshape(len(g), -1).abs().sum(1).nonzero()[:, 0].tolist() for g in grads if g is not None]
    return sorted(set().union(*found))


class OwnWeights(TorchFunctionMode):
    """While active, linear layers give each chosen row of their inputs weights of its own.

    Args:
        params: the parameters, by position.
        chosen: number of rows → which of them, ascending; inputs with another number of rows are left alone.

    Attributes:
        eps: ε of the coarsest dtype that such a layer gave: inside an autocast it is coarser than the parameters'.
    """

    def __init__(self, params: Sequence[Tensor], chosen: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._params, self._index = params, {id(p): i for i, p in enumerate(params)}
        self._chosen = chosen
        self._own: dict[tuple[int, int], Tensor] = {}
        self.eps = 0.0

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        y = func(*args, **(kwargs or {}))
        if func is not torch.nn.functional.linear:
            return y
        x, W, b = _linear(*args, **(kwargs or {}))
        trained = id(W) in self._index or id(b) in self._index
        if not trained or x.ndim < 2 or x.shape[0] not in self._chosen:
            return y
        S = self._chosen[x.shape[0]]
        self.eps = max(self.eps, torch.finfo(y.dtype).eps)
        # [s, positions, in], so that one product serves vectors and sequences
        xs = x[S].reshape(len(S), -1, x.shape[-1])
        added = xs.new_zeros(())
        if id(W) in self._index:
            added = xs @ self._of(W, x.shape[0], len(S)).transpose(1, 2)
        if b is not None and id(b) in self._index:
            added = added + self._of(b, x.shape[0], len(S))[:, None]
        added = added.expand(len(S), xs.shape[1], y.shape[-1]).reshape(len(S), *y.shape[1:])
        return y.index_add(0, S, added.to(y.dtype))  # of another dtype inside an autocast

    def _of(self, p: Tensor, rows: int, s: int) -> Tensor:
        key = self._index[id(p)], rows
        if key not in self._own:
            self._own[key] = torch.zeros(s, *p.shape, dtype=p.dtype, device=p.device, requires_grad=True)
        return self._own[key]

    def of(self, place: Place, S: Tensor) -> tuple[list[tuple[int, Tensor]], Tensor]:
        """(position of the parameter, Δ) of the layers that an output comes from, and where its rows are in Δ."""
        pairs = [(i, own) for (i, rows), own in self._own.items() if rows == place.rows]
        return pairs, torch.searchsorted(self._chosen[place.rows], place.of(S))

    @property
    def inside(self) -> set[int]:
        """Positions of the parameters that have weights of their own."""
        return {i for i, _ in self._own}

    def outside(self, zs: Tensor) -> dict[int, Tensor]:
        """Position → parameter, of those in no linear layer on which these outputs depend; none if of many entries."""
        found = {i: p for i, p in enumerate(self._params) if i not in self.inside}
        if sum(p.numel() for p in found.values()) > _FEW:
            slopes = torch.autograd.grad(zs.sum(), list(found.values()), retain_graph=True, allow_unused=True)
            found = {i: p for (i, p), slope in zip(found.items(), slopes, strict=True) if slope is not None}
        return found if sum(p.numel() for p in found.values()) <= _FEW else {}


def _linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def write_rows(own: OwnWeights, z: Tensor, place: Place, S: Tensor, u: Tensor, into: Sequence[Tensor]) -> int:
    """uᵢᵀ∂zᵢ/∂θ for all i in S, into views [s, …] of the parameters' columns; → how many backward passes it took."""
    pairs, at = own.of(place, S)
    for view in into:
        view.zero_()
    if pairs:
        rows = torch.autograd.grad(z[S], [delta for _, delta in pairs], u, retain_graph=True, allow_unused=True)
        for (i, _), row in zip(pairs, rows, strict=True):
            if row is not None:
                into[i].copy_(row if len(row) == at.shape[1] else row[at].sum(0))
    zs = z[S]
    if outside := own.outside(zs):
        try:
            _write_columns(zs, u, list(outside.values()), [into[i] for i in outside])
        except RuntimeError:  # an operation without a second derivative: zero is refuted, and rows had one by one
            return 1
    return 1 + sum(p.numel() for p in outside.values())


def _write_columns(zs: Tensor, u: Tensor, params: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """As ``write_rows``, for any operations that can be differentiated twice, entry by entry of the parameters."""
    w = torch.ones(len(u), *(1,) * (u.ndim - 1), dtype=u.dtype, device=u.device, requires_grad=True)
    slopes = torch.autograd.grad(zs, params, u * w, create_graph=True, allow_unused=True)
    for view, slope in zip(into, slopes, strict=True):
        if slope is not None and slope.requires_grad:
            columns = [torch.autograd.grad(e, w, retain_graph=True)[0].reshape(-1) for e in slope.reshape(-1)]
            view.copy_(torch.stack(columns, 1).view_as(view))


def along(z: Tensor, S: Tensor, wu: Tensor, params: Sequence[Tensor]) -> Iterator[Tensor | None]:
    """Jᵀ of the cotangent that is wu on the chosen rows and zero elsewhere, by the ordinary backward pass."""
    cotangent = torch.zeros_like(z).index_copy(0, S, wu)
    yield from torch.autograd.grad(z, params, cotangent, retain_graph=True, allow_unused=True)


def write_rows_one_by_one(z: Tensor, S: Tensor, u: Tensor, params: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """As ``write_rows``, for any operations, by a backward pass for each row: right, and slow."""
    for start in range(0, len(S), _CHUNK):
        part = slice(start, start + _CHUNK)
        cotangents = z.new_zeros(len(S[part]), *z.shape)
        cotangents[torch.arange(len(S[part]), device=z.device), S[part]] = u[part]
        for view, row in zip(into, _batched(z, params, cotangents), strict=True):
            view[part] = 0 if row is None else row


def _batched(z: Tensor, params: Sequence[Tensor], cotangents: Tensor) -> Sequence[Tensor | None]:
    try:
        return torch.autograd.grad(z, params, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True)
    except RuntimeError:  # an operation that cannot be batched
        rows = [torch.autograd.grad(z, params, c, retain_graph=True, allow_unused=True) for c in cotangents]
        return [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]
