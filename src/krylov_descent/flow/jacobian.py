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

``RowWriter`` takes rows of several cotangents, k for each of the s rows, hundreds at a time wherever that is confirmed
to give what a backward pass gives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from krylov_descent.curvature.output_roots import cotangents
from krylov_descent.objective.objective import PROBE, Objective

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


_ROUNDING = 1000  # ε of the largest column: what the small ones may be off by
_HARDLY = 16  # rows, up to which a backward pass has hardly more than one
_AGAIN = 32  # calls after which rows are looked at again at the latest
_COARSE, _ROUGHLY = 5e-4, 0.3  # ε from which whole parameters are compared, not columns, and how closely


class MovedError(Exception):
    """Rows come from other places than they did."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """Rows of one output: which of them, its place, S, and u; ``samples`` is what a call of the closure costs."""

    output: int
    z: Tensor
    place: Place | None
    S: Tensor
    u: Tensor
    samples: int

    @property
    def rows(self) -> int:
        """k·s."""
        return self.u.shape[0] * self.u.shape[1]

    @property
    def apart(self) -> bool:
        """Whether they are combinations of a few rows with many entries: a backward pass for hardly more than one."""
        k, s, *entries = self.u.shape
        return k > 1 and s <= _HARDLY and cotangents(math.prod(entries)) == 1


class RowWriter:
    """What is known of one closure on batches of one size: of which outputs rows may be had together."""

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}
        self._vacant: dict[int, int] = {}  # rows of zeros that were confirmed, at most: hard constraints have some
        self.refuted: set[int] = set()

    def write(
        self, objective: Objective, own: OwnWeights, wanted: Wanted, block: Tensor, moved: Callable[[], bool]
    ) -> int:
        """Rows into ``block`` [k·s, P]; one by one where no place is known, or it was refuted; → how many that were.

        Args:
            objective: what is evaluated.
            own: with which the closure was called.
            wanted: which rows.
            block: where they go.
            moved: looks again where the rows come from, and says whether that has changed.

        Raises:
            MovedError: it has: all has to be done anew.
        """
        params, i = objective.parameters.params, wanted.output
        calls = self._calls[i] = self._calls.get(i, 0) + 1
        # At calls 1, 2, 4, …, 32, 64, 96, …: a closure changes its path rarely, if at all.
        due = calls & (calls - 1) == 0 or calls % _AGAIN == 0
        if wanted.place is not None:
            wrong = i in self.refuted
            if not wrong:
                passes = _write_together(own, wanted, wanted.place, params, block)
                vacant = _vacant(own, wanted, params, block)
                if due or vacant > self._vacant.get(i, 0):
                    wrong = not _confirmed(wanted, params, block, own.eps, calls)
                    self._vacant[i] = max(vacant, self._vacant.get(i, 0))
            if not wrong:
                objective.sample_gradients += PROBE * wanted.samples * passes  # not for judging, which is repeated
                return wanted.rows if wanted.apart else 0
            if (due or i not in self.refuted) and moved():
                raise MovedError
            self.refuted.add(i)
        s = len(wanted.S)
        for k, u in enumerate(wanted.u):
            write_rows_one_by_one(wanted.z, wanted.S, u, params, _columns(block[k * s : (k + 1) * s], params))
        objective.sample_gradients += PROBE * wanted.samples * wanted.rows
        return wanted.rows


def _write_together(own: OwnWeights, wanted: Wanted, place: Place, params: Sequence[Tensor], block: Tensor) -> int:
    s = len(wanted.S)
    return sum(
        write_rows(own, wanted.z, place, wanted.S, u, _columns(block[k * s : (k + 1) * s], params))
        for k, u in enumerate(wanted.u)
    )


def _columns(block: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Views [s, …] of a block's columns, in the parameters' shapes."""
    views, at = [], 0
    for p in params:
        views.append(block[:, at : at + p.numel()].view(len(block), *p.shape))
        at += p.numel()
    return views


def _vacant(own: OwnWeights, wanted: Wanted, params: Sequence[Tensor], block: Tensor) -> int:
    """How many rows are zero in the columns of linear layers: all, where rows no longer come from their place."""
    views = _columns(block, params)
    sizes = [torch.linalg.vector_norm(views[i].reshape(len(block), -1), dim=1) for i in own.inside]
    asked = (wanted.u != 0).reshape(wanted.rows, -1).any(1)
    return int(((torch.stack(sizes).amax(0) == 0) & asked).sum()) if sizes else 0


def _confirmed(wanted: Wanted, params: Sequence[Tensor], block: Tensor, coarsest: float, seed: int) -> bool:
    """Whether a random combination of the rows is what a backward pass gives, column by column."""
    u = wanted.u
    random = torch.Generator("cpu").manual_seed(seed)
    w = torch.rand(wanted.rows, generator=random, dtype=torch.float64, device="cpu") + 0.5
    w[torch.rand(wanted.rows, generator=random, device="cpu") < 0.5] *= -1
    w = w.to(block)
    wu = (u * w.reshape(*u.shape[:2], *(1,) * (u.ndim - 2)).to(u.dtype)).sum(0)
    slopes = along(wanted.z, wanted.S, wu, params)
    expected = torch.cat(
        [p.new_zeros(p.numel()) if g is None else g.reshape(-1) for g, p in zip(slopes, params, strict=True)]
    ).to(block)
    if not bool(expected.isfinite().all()):
        return True  # says nothing of the closure
    error = w @ block - expected
    eps = max(coarsest, *(torch.finfo(x.dtype).eps for x in (block, u, *params)))
    if eps > _COARSE:  # columns of half precision are too noisy to tell; a parameter that is left out shows
        size = torch.maximum(expected.abs(), (w.square() @ block.square()).sqrt())
        parts = ([part.norm() for part in torch.split(x, [p.numel() for p in params])] for x in (error, size))
        return all(bool(off <= _ROUGHLY * whole) for off, whole in zip(*parts, strict=True))
    # Rows of neighbouring points may cancel in the sum: what rounds is as large as they are, not as it is.
    size = torch.maximum(expected.abs(), w.abs() @ block.abs())
    return bool((error.abs() <= eps**0.5 * size + _ROUNDING * eps * size.max()).all())
