"""Rows of the outputs' Jacobian, hundreds at the cost of a few gradients.

Letters: z outputs [N, c], J = ∂z/∂θ, S ⊂ {1 … N} chosen rows, s of them, u [s, c] a cotangent for each.

Row i of the outputs usually depends on one row of a layer's inputs: row i, or row o + i if several sets of points pass
the network together; or on one row of each of several sets, rows o₁ + i, o₂ + i, … (both ends of a periodic boundary).
So each chosen input row gets per-row weights W + Δᵢ with Δ = 0 [s, out, in], and one backward pass from Σ_{i∈S} uᵢ·zᵢ
yields ∂/∂Δᵢ = uᵢᵀ∂zᵢ/∂W for all of S at once, instead of one pass for each row. This also holds if the closure
differentiates the network, as physics-informed networks do, because Δ is part of the differentiated function.

Parameters outside linear layers (unknown coefficients of an equation), if they have few entries, are handled by
columns: the backward pass is linear in its cotangent, and the derivative of one entry of its result by the weight of
each uᵢ is a column.

The method is silently wrong if a parameter is used both in a linear layer and elsewhere, if one with many entries is in
no linear layer, or if output rows share input rows. ``along`` detects this: Σᵢ wᵢ(uᵢᵀJᵢ) must equal the ordinary
backward pass from the cotangent w∘u. ``RowWriter`` uses the method only where this check confirms it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from krylov_descent.curvature.output_roots import cotangents
from krylov_descent.layers.calls import LayerCall, linear_call
from krylov_descent.layers.verify import COARSE, Found, Trust, due, tolerance
from krylov_descent.objective.objective import PROBE, Objective

_CHUNK = 64  # batched backward passes, one for each row
_SETS = 8  # most input rows that an output row may depend on
_FEW = 32  # most parameter entries outside linear layers, each of which takes a derivative of a backward pass


@dataclass(frozen=True)
class Place:
    """The input rows that an output depends on: row i on rows o + i of inputs with ``rows`` rows, for each offset o."""

    rows: int
    offset: int
    further: tuple[int, ...] = ()

    def of(self, S: Tensor) -> Tensor:
        """Return the input rows [offsets, s] that the output rows S depend on."""
        return S + torch.tensor((self.offset, *self.further), device=S.device)[:, None]


def place_of(z: Tensor, calls: Sequence[LayerCall]) -> Place | None:
    """Return the place of z's rows, found from one of its first and one of its last; None if they depend on many."""
    n, dense = z.shape[0], [call for call in calls if call.dense]
    for rows in sorted({len(call.a) for call in dense if len(call.a) >= n > 0}):
        ys = [call.edge for call in dense if len(call.a) == rows]
        i, first = _telling(z, ys, (0, 1, n // 4, n // 2))
        j, last = _telling(z, ys, (n - 1, n - 2, n - 1 - n // 4, n // 2))
        offsets = [o - i for o in first]
        apart = all(after - before >= n for before, after in itertools.pairwise(offsets))
        inside = bool(first) and offsets[0] >= 0 and offsets[-1] + n <= rows
        if inside and apart and last == [o + j for o in offsets]:
            if len(offsets) > _SETS:  # an integral: all points would need per-row weights for a row or two
                return None
            return Place(rows, offsets[0], tuple(offsets[1:]))
    return Place(n, 0)  # unknown: the check will refute it, and rows are computed one by one


def _telling(z: Tensor, ys: Sequence[GradientEdge], candidates: Sequence[int]) -> tuple[int, list[int]]:
    """Return the first candidate that depends on input rows, and these; hard constraints make some rows constant."""
    i, found = candidates[0], list[int]()
    for i in dict.fromkeys(i for i in candidates if 0 <= i < len(z)):
        if found := _touched(z[i], ys):
            break
    return i, found


def _touched(e: Tensor, ys: Sequence[GradientEdge]) -> list[int]:
    grads = torch.autograd.grad(e.sum(), ys, retain_graph=True, allow_unused=True)
    found = [g.reshape(len(g), -1).abs().sum(1).nonzero()[:, 0].tolist() for g in grads if g is not None]
    return sorted(set().union(*found))


class OwnWeights(TorchFunctionMode):
    """While active, linear layers use per-row weights W + Δᵢ for the chosen rows of their inputs.

    Args:
        params: the parameters, by position.
        chosen: the chosen rows, ascending, by the number of input rows; other inputs are left alone.

    Attributes:
        eps: ε of the coarsest output dtype of such a layer, which an autocast makes coarser than the parameters'.
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
        x, W, b, _ = linear_call(*args, **(kwargs or {}))
        trained = id(W) in self._index or id(b) in self._index
        if not trained or x.ndim < 2 or x.shape[0] not in self._chosen:
            return y
        S = self._chosen[x.shape[0]]
        self.eps = max(self.eps, torch.finfo(y.dtype).eps)
        # [s, positions, in], for vectors and sequences alike
        xs = x[S].reshape(len(S), -1, x.shape[-1])
        added = xs.new_zeros(())
        if id(W) in self._index:
            added = xs @ self._of(W, x.shape[0], len(S)).transpose(1, 2)
        if b is not None and id(b) in self._index:
            added = added + self._of(b, x.shape[0], len(S))[:, None]
        added = added.expand(len(S), xs.shape[1], y.shape[-1]).reshape(len(S), *y.shape[1:])
        return y.index_add(0, S, added.to(y.dtype))  # an autocast changes the dtype of y

    def _of(self, p: Tensor, rows: int, s: int) -> Tensor:
        key = self._index[id(p)], rows
        if key not in self._own:
            self._own[key] = torch.zeros(s, *p.shape, dtype=p.dtype, device=p.device, requires_grad=True)
        return self._own[key]

    def of(self, place: Place, S: Tensor) -> tuple[list[tuple[int, Tensor]], Tensor]:
        """Return (position of the parameter, Δ) of the layers at an output's place, and the row indices in Δ."""
        pairs = [(i, own) for (i, rows), own in self._own.items() if rows == place.rows]
        return pairs, torch.searchsorted(self._chosen[place.rows], place.of(S))

    @property
    def inside(self) -> set[int]:
        """The positions of the parameters with per-row weights."""
        return {i for i, _ in self._own}

    def outside(self, zs: Tensor) -> dict[int, Tensor]:
        """Return the parameters outside linear layers that these outputs depend on; none if they have many entries."""
        found = {i: p for i, p in enumerate(self._params) if i not in self.inside}
        if sum(p.numel() for p in found.values()) > _FEW:
            slopes = torch.autograd.grad(zs.sum(), list(found.values()), retain_graph=True, allow_unused=True)
            found = {i: p for (i, p), slope in zip(found.items(), slopes, strict=True) if slope is not None}
        return found if sum(p.numel() for p in found.values()) <= _FEW else {}


def write_rows(own: OwnWeights, z: Tensor, place: Place, S: Tensor, u: Tensor, into: Sequence[Tensor]) -> int:
    """Write uᵢᵀ∂zᵢ/∂θ for all i in S into views [s, …] of the parameters' columns; return the backward passes taken."""
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
        except RuntimeError:  # no second derivative: the check refutes the zeros, and rows are computed one by one
            return 1
    return 1 + sum(p.numel() for p in outside.values())


def _write_columns(zs: Tensor, u: Tensor, params: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Write the rows column by column, for any operations that can be differentiated twice."""
    w = torch.ones(len(u), *(1,) * (u.ndim - 1), dtype=u.dtype, device=u.device, requires_grad=True)
    slopes = torch.autograd.grad(zs, params, u * w, create_graph=True, allow_unused=True)
    for view, slope in zip(into, slopes, strict=True):
        if slope is not None and slope.requires_grad:
            columns = [torch.autograd.grad(e, w, retain_graph=True)[0].reshape(-1) for e in slope.reshape(-1)]
            view.copy_(torch.stack(columns, 1).view_as(view))


def along(z: Tensor, S: Tensor, wu: Tensor, params: Sequence[Tensor]) -> Iterator[Tensor | None]:
    """Yield Jᵀ times the cotangent that is wu on the chosen rows and zero elsewhere, by an ordinary backward pass."""
    cotangent = torch.zeros_like(z).index_copy(0, S, wu)
    yield from torch.autograd.grad(z, params, cotangent, retain_graph=True, allow_unused=True)


def write_rows_one_by_one(z: Tensor, S: Tensor, u: Tensor, params: Sequence[Tensor], into: Sequence[Tensor]) -> None:
    """Write the rows by a backward pass for each: correct for any operations, and slow."""
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


_HARDLY = 16  # rows, up to which one backward pass for all saves little
_ROUGHLY = 0.3  # relative tolerance for whole parameters, compared in place of columns if rounding is coarse


class MovedError(Exception):
    """The places of rows have changed."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """The rows to compute of one output, with its place, S and u; ``samples`` is the cost of a closure call."""

    output: int
    z: Tensor
    place: Place | None
    S: Tensor
    u: Tensor
    samples: int

    @property
    def rows(self) -> int:
        """The number of rows, k·s."""
        return self.u.shape[0] * self.u.shape[1]

    @property
    def apart(self) -> bool:
        """Whether the rows combine few output rows of many entries, for which a joint backward pass saves little."""
        k, s, *entries = self.u.shape
        return k > 1 and s <= _HARDLY and cotangents(math.prod(entries)) == 1


class RowWriter:
    """Writes Jacobian rows, and learns for one closure and batch size which outputs allow one pass for all rows."""

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}
        self._vacant: dict[int, int] = {}  # most zero rows that were confirmed: hard constraints have some
        self.trust = Trust()

    def write(
        self, objective: Objective, own: OwnWeights, wanted: Wanted, block: Tensor, moved: Callable[[], bool]
    ) -> int:
        """Write rows into ``block`` [k·s, P], one by one if their place is unknown or refuted.

        Args:
            objective: counts the cost.
            own: the per-row weights with which the closure was called.
            wanted: the rows to compute.
            block: the output.
            moved: looks up the places of rows again and returns whether they have changed.

        Returns:
            The number of rows that took a backward pass each.

        Raises:
            MovedError: the places have changed; all rows must be computed anew.
        """
        params, i = objective.parameters.params, wanted.output
        calls = self._calls[i] = self._calls.get(i, 0) + 1
        if wanted.place is not None:
            look = due(calls)
            if i not in self.trust.refuted:
                passes = _write_together(own, wanted, wanted.place, params, block)
                vacant = _vacant(own, wanted, params, block)
                if look or vacant > self._vacant.get(i, 0):
                    look = True
                    self.trust.learn(_compared(wanted, params, block, own.eps, calls))
                    self._vacant[i] = max(vacant, self._vacant.get(i, 0))
            if i not in self.trust.refuted:
                objective.sample_gradients += PROBE * wanted.samples * passes  # the checks are not counted
                return wanted.rows if wanted.apart else 0
            if look and moved():
                raise MovedError
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
    """Return views [s, …] of a block's columns, in the parameters' shapes."""
    views, at = [], 0
    for p in params:
        views.append(block[:, at : at + p.numel()].view(len(block), *p.shape))
        at += p.numel()
    return views


def _vacant(own: OwnWeights, wanted: Wanted, params: Sequence[Tensor], block: Tensor) -> int:
    """Return the number of rows that are zero in the columns of linear layers: all, if their place has changed."""
    views = _columns(block, params)
    sizes = [torch.linalg.vector_norm(views[i].reshape(len(block), -1), dim=1) for i in own.inside]
    asked = (wanted.u != 0).reshape(wanted.rows, -1).any(1)
    return int(((torch.stack(sizes).amax(0) == 0) & asked).sum()) if sizes else 0


def _compared(wanted: Wanted, params: Sequence[Tensor], block: Tensor, coarsest: float, seed: int) -> Found:
    """Compare a random combination of an output's rows with a backward pass, column by column."""
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
        return Found(set(), set())  # no evidence
    error = w @ block - expected
    eps = max(coarsest, *(torch.finfo(x.dtype).eps for x in (block, u, *params)))
    if eps > COARSE:  # columns of half precision are too noisy; a missing parameter still shows in its norm
        size = torch.maximum(expected.abs(), (w.square() @ block.square()).sqrt())
        parts = ([part.norm() for part in torch.split(x, [p.numel() for p in params])] for x in (error, size))
        right = all(bool(off <= _ROUGHLY * whole) for off, whole in zip(*parts, strict=True))
    else:
        # Rows of neighbouring points may cancel in the sum, so rounding is relative to the rows, not to the sum.
        size = torch.maximum(expected.abs(), w.abs() @ block.abs())
        right = bool((error.abs() <= eps**0.5 * size + tolerance(eps) * size.max()).all())
    return Found({wanted.output}, set()) if right else Found(set(), {wanted.output})
