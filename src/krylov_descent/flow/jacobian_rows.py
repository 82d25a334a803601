"""Jacobian rows uᵢᵀ∂zᵢ/∂θ for many rows i of an output z, from few backward passes.

A backward pass leaves δ and a at each use of a weight (flow/taps.py). Where each of their rows r belongs to one output
row i, the rows of J are Σ δᵣaᵣᵀ over the r that belong to i. To whom rows belong is learnt from a few backward passes
whose cotangents number the output rows, and every result is compared with autograd on a schedule. Rows of which this
is not true take a backward pass each.

Letters: z [n, …] an output, S [s] chosen rows of it, u [s, …] their cotangents, J [m, P].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.curvature.output_roots import cotangents
from krylov_descent.flow.owners import Colour, Owners, Slots, same_points
from krylov_descent.flow.taps import Left, Taps
from krylov_descent.layers.verify import COARSE, due, tolerance
from krylov_descent.objective.objective import PROBE, Objective
from krylov_descent.vectors.devices import sent
from krylov_descent.vectors.products import numbers_of

_CHUNK = 64  # batched backward passes, one for each row
_FEW = 32  # most parameter entries outside linear layers, each of which takes a derivative of a backward pass


class MovedError(Exception):
    """Rows belong to others than was learnt."""


def write_rows(taps: Taps, z: Tensor, colours: Sequence[Colour], S: Tensor, u: Tensor, into: Sequence[Tensor]) -> int:
    """Write uᵢᵀ∂zᵢ/∂θ for all i in S into views [s, …] of the parameters' columns; return the backward passes taken.

    S is in host memory, where its members of a colour need no read.

    Raises:
        MovedError: the closure takes another path than when the colours were learnt.
    """
    for view in into:
        view.zero_()
    computed = [into[0].new_zeros(len(S), *W.shape) for W in taps.weights[len(into) :]]
    views, passes, missed = [*into, *computed], 0, list[Tensor]()
    for colour in colours:
        member = colour.rows[S]
        if not bool(member.any()):
            continue
        cotangent = torch.zeros_like(z)
        mine = member.nonzero()[:, 0]
        at, chosen = (sent(x, z.device) for x in (S[mine], mine))
        cotangent[at] = u[chosen]
        passes += 1
        missed += _add_rows(taps, taps.record(z, cotangent), colour, S, member, views)
    if any(numbers_of(missed)):
        raise MovedError
    for W, rows in zip(taps.weights[len(into) :], computed, strict=True):
        params = taps.weights[: len(into)]
        for view, row in zip(into, _batched(W, params, rows.to(W.dtype)), strict=True):
            if row is not None:
                view += row
    zs = z[sent(S, z.device)]
    if outside := _outside(taps, zs, len(into)):
        try:
            _write_columns(zs, u, [taps.weights[i] for i in outside], [into[i] for i in outside])
        except RuntimeError:  # no second derivative: the check refutes the zeros, and rows are computed one by one
            return passes
    return passes + sum(taps.weights[i].numel() for i in outside)


def _add_rows(
    taps: Taps, left: dict[int, Left], colour: Colour, S: Tensor, member: Tensor, views: Sequence[Tensor]
) -> list[Tensor]:
    """Add what a backward pass left to the rows of its members; uses with the same owners in one product.

    Returns whether rows that belonged to none have a gradient now, 0-d tensors.
    """
    if not left.keys() <= colour.owners.keys():
        raise MovedError
    slots: dict[int, Slots] = {}
    missed: list[Tensor] = []
    terms: dict[tuple[int | None, int | None, int], tuple[list[Tensor], list[Tensor]]] = {}
    for number, found in left.items():
        use, owner = taps.uses[number], colour.owners[number]
        if len(owner) != len(found.incoming):
            raise MovedError
        key = id(owner)
        if key not in slots:
            slots[key] = Slots(owner, S, member, len(colour.rows), found.incoming.device)
        missed += slots[key].missed(found.incoming)
        if not len(slots[key].slots):
            continue
        delta, a = terms.setdefault((use.weight, use.bias, key), ([], []))
        delta.append(slots[key].of(found.delta))
        a.append(slots[key].of(found.a))
    for (weight, bias, key), (delta, a) in terms.items():
        d = torch.cat(delta, 1) if len(delta) > 1 else delta[0]
        at = slots[key].slots
        if weight is not None:
            x = torch.cat(a, 1) if len(a) > 1 else a[0]
            view = views[weight].flatten(2)  # a convolution's is that of a matrix
            d_, x_ = d.mT.to(view.dtype), x.to(view.dtype)
            if len(at) == len(view):
                view.baddbmm_(d_, x_)
            else:
                view.index_add_(0, at, torch.bmm(d_, x_))
        if bias is not None:
            views[bias].index_add_(0, at, d.sum(1).to(views[bias].dtype))
    return missed


def _outside(taps: Taps, zs: Tensor, count: int) -> list[int]:
    """Return the parameters outside of tapped uses on which these outputs depend; none if they have many entries."""
    inside = {i for use in taps.uses for i in (use.weight, use.bias) if i is not None}
    behind = taps.weights[count:]
    found = [i for i in range(count) if i not in inside]
    if found and behind:
        slopes = torch.autograd.grad(
            [W.sum() for W in behind], [taps.weights[i] for i in found], retain_graph=True, allow_unused=True
        )
        found = [i for i, slope in zip(found, slopes, strict=True) if slope is None]
    if sum(taps.weights[i].numel() for i in found) > _FEW:
        slopes = torch.autograd.grad(zs.sum(), [taps.weights[i] for i in found], retain_graph=True, allow_unused=True)
        found = [i for i, slope in zip(found, slopes, strict=True) if slope is not None]
    return found if sum(taps.weights[i].numel() for i in found) <= _FEW else []


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


@dataclass(frozen=True, eq=False)
class Wanted:
    """The rows to compute of one output z: S, also in host memory, and u [k, s, …].

    ``samples`` is the cost of a closure call.
    """

    output: int
    z: Tensor
    S: Tensor
    S_on_host: Tensor
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
    """Writes Jacobian rows, and learns for one closure and batch size which outputs allow few passes for all rows."""

    def __init__(self) -> None:
        self._owners = Owners()
        self._colours: dict[int, list[Colour]] = {}
        self._calls: dict[int, int] = {}
        self.refuted: set[int] = set()
        """The outputs whose rows take a backward pass each."""
        self.operations: set[str] = set()
        """The operations that use parameters outside of linear layers, of outputs whose rows take a pass each."""

    def drawn_like(self, i: int, taps: Taps, z: Tensor) -> int:
        """Return the first output whose rows depend on the same points as those of output i, so are drawn alike."""
        if i not in self.refuted and i not in self._colours:
            self._learn(i, taps, z)
        own = self._colours.get(i, ())
        return next((j for j in range(i) if same_points(self._colours.get(j, ()), own)), i)

    def _learn(self, i: int, taps: Taps, z: Tensor) -> None:
        colours = self._owners.learn(taps, z)
        if colours is None:
            self.refuted.add(i)
        else:
            self._colours[i] = colours

    def write(self, objective: Objective, taps: Taps | None, wanted: Wanted, block: Tensor) -> int:
        """Write rows into ``block`` [k·s, P], one by one without taps; return how many took a backward pass each."""
        params, i = objective.parameters.params, wanted.output
        calls = self._calls[i] = self._calls.get(i, 0) + 1
        for again in (False, True):  # a closure that takes another path is learnt anew, once
            if taps is not None and again:
                self._learn(i, taps, wanted.z)
            if taps is None or i in self.refuted:
                break
            try:
                passes = self._together(taps, wanted, params, block)
            except MovedError:
                continue
            if not (due(calls) or again) or _agree(wanted, params, block, taps.eps, calls):
                objective.sample_gradients += PROBE * wanted.samples * passes  # the checks are not counted
                return wanted.rows if wanted.apart else 0
        if taps is not None:
            self.refuted.add(i)
            self.operations |= taps.elsewhere(wanted.z)
        s = len(wanted.S)
        for k, u in enumerate(wanted.u):
            write_rows_one_by_one(wanted.z, wanted.S, u, params, _columns(block[k * s : (k + 1) * s], params))
        objective.sample_gradients += PROBE * wanted.samples * wanted.rows
        return wanted.rows

    def _together(self, taps: Taps, wanted: Wanted, params: Sequence[Tensor], block: Tensor) -> int:
        s, colours = len(wanted.S), self._colours[wanted.output]
        return sum(
            write_rows(taps, wanted.z, colours, wanted.S_on_host, u, _columns(block[k * s : (k + 1) * s], params))
            for k, u in enumerate(wanted.u)
        )


def _columns(block: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Return views [s, …] of a block's columns, in the parameters' shapes."""
    views, at = [], 0
    for p in params:
        views.append(block[:, at : at + p.numel()].view(len(block), *p.shape))
        at += p.numel()
    return views


def _agree(wanted: Wanted, params: Sequence[Tensor], block: Tensor, coarsest: float, seed: int) -> bool:
    """Whether a random combination of an output's rows is that of a backward pass, column by column."""
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
        return True  # no evidence
    error = w @ block - expected
    eps = max(coarsest, *(torch.finfo(x.dtype).eps for x in (block, u, *params)))
    if eps > COARSE:  # columns of half precision are too noisy; a missing parameter still shows in its norm
        size = torch.maximum(expected.abs(), (w.square() @ block.square()).sqrt())
        parts = ([part.norm() for part in torch.split(x, [p.numel() for p in params])] for x in (error, size))
        return all(bool(off <= _ROUGHLY * whole) for off, whole in zip(*parts, strict=True))
    # Rows of neighbouring points may cancel in the sum, so rounding is relative to the rows, not to the sum.
    size = torch.maximum(expected.abs(), w.abs() @ block.abs())
    return bool((error.abs() <= eps**0.5 * size + tolerance(eps) * size.max()).all())
