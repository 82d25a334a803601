"""A sketch of the Gauss–Newton matrix: some rows of H_L^½ J on B, rescaled so that JᵀJ stands for all of them.

Letters: J [m, P] rows of the sketch, ρ [m] with Jᵀρ an estimate of the gradient; m rows wanted in all.
Every output (every term of a multi-term loss) has rows in the sketch, N/s times as heavy where s of its N were drawn.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.closure import Evaluation, require_outputs
from krylov_descent.data import Microbatch
from krylov_descent.distributed import Comm, added, attempt
from krylov_descent.jacobian import (
    Calls,
    OwnWeights,
    Place,
    along,
    place_of,
    write_rows,
    write_rows_one_by_one,
)
from krylov_descent.objective import Objective
from krylov_descent.output_hessian import cotangents, output_roots


class Sketcher:
    """Draws sketches.

    Attributes:
        together: whether rows of this closure may be had all at once, as far as is known.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._judged: tuple[object, ...] = ()
        self.together = True
        self._checks = 0
        self._seen: dict[int | None, _Seen] = {}

    def draw(self, objective: Objective, batches: Sequence[Microbatch], key: Sequence[int]) -> tuple[Tensor, Tensor]:
        """J, this rank's columns [m, P_local] of the rows of all ranks, and ρ [m]; ``key`` seeds which are drawn.

        Raises:
            ValueError: the loss has no square root row by row, or the rows do not fit, with the remedy.
        """
        comm = objective.comm
        judged = (objective.identity, *map(id, objective.parameters.params))
        if judged != self._judged:
            self._judged, self.together, self._checks, self._seen = judged, True, 0, {}
        count = float(added(comm, float(len(batches))))
        wanted = max(1, round(self._rows / max(1.0, count)))
        parts: list[tuple[Tensor, Tensor, float]] = []

        def work() -> None:
            parts.extend(self._part(objective, b, wanted, _seed((*key, b.position))) for b in batches)

        failure = attempt(comm, work)
        W = float(added(comm, sum((w for _, _, w in parts), 0.0), failure))
        for J, rho, weight in parts:
            if weight != W:
                J *= (weight / W) ** 0.5
                rho *= (weight / W) ** 0.5
        if comm.ranks == 1 and len(parts) == 1:
            return parts[0][:2]
        none = _room(1, objective)[0].zero_()  # a rank may have no rows
        return _gathered(
            comm, [row for J, _, _ in parts for row in J], torch.cat([none[:0], *(p[1] for p in parts)]), none
        )

    def _part(self, objective: Objective, batch: Microbatch, wanted: int, seed: int) -> tuple[Tensor, Tensor, float]:
        """Rows of one micro-batch, their ρ, and the weight of the micro-batch."""
        evaluation, own, seen, chosen = self._evaluate(objective, batch, wanted, seed)
        signs = torch.Generator("cpu").manual_seed(seed + 1)
        deltas = torch.autograd.grad(evaluation.loss, evaluation.outputs, create_graph=True, allow_unused=True)
        found = []
        for z, delta, place, S in zip(evaluation.outputs, deltas, seen.places, chosen, strict=True):
            z = z.reshape(1) if z.ndim == 0 else z
            roots = output_roots(z, delta, S, signs)
            if isinstance(roots, str):
                raise ValueError(f"basis='rational' cannot be used with this loss: {roots}. Use basis='krylov'.")
            scale = (z.shape[0] / len(S)) ** 0.5
            found += [(z, place, S, u * scale, rho * scale) for u, rho in zip(roots.u, roots.rho, strict=True)]
        J = _room(sum(len(S) for _, _, S, _, _ in found), objective)
        at = 0
        for z, place, S, u, _ in found:
            self._write(objective, own, z, place, S, u, J[at : at + len(S)])
            at += len(S)
        rho = torch.cat([rho for *_, rho in found]) if found else J.new_zeros(0)
        return J, rho.detach(), evaluation.weight

    def _evaluate(
        self, objective: Objective, batch: Microbatch, wanted: int, seed: int
    ) -> tuple[Evaluation, OwnWeights, _Seen, list[Tensor]]:
        """The closure with weights of their own for the rows that are drawn.

        Which rows there are is known from the last call with so many samples, and at the first from a call without.
        """
        params = objective.parameters.params
        while True:
            seen = self._seen.get(batch.samples)
            if seen is not None:
                # Seeded at each attempt: what is drawn does not depend on what was known before.
                chosen = _choose(seen, wanted, torch.Generator("cpu").manual_seed(seed))
                own = OwnWeights(params, _together(seen, chosen))
                with own:
                    evaluation = objective.evaluate(batch)
                if seen.shapes == _shapes(evaluation):
                    return evaluation, own, seen, chosen
            self._seen[batch.samples] = _look(objective, batch)

    def _write(
        self, objective: Objective, own: OwnWeights, z: Tensor, place: Place, S: Tensor, u: Tensor, block: Tensor
    ) -> None:
        params = objective.parameters.params
        views = _columns(block, params)
        if self.together:
            write_rows(own, z, place, S, u, views)
            if self._due() and not _confirmed(z, S, u, params, block):
                self.together = False
        if not self.together:
            write_rows_one_by_one(z, S, u, params, views)

    def _due(self) -> bool:
        """At calls 1, 2, 4, 8, …: a closure changes its path rarely, if at all."""
        self._checks += 1
        return self._checks & (self._checks - 1) == 0


def _gathered(comm: Comm, rows: Sequence[Tensor], rho: Tensor, none: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of all ranks, one after the other, each cut into the ranks' parts; and ρ of all of them.

    Reduce-scattering zeros (``none``) from all ranks but one sends what that one has to its owners.
    """
    counts = torch.zeros(comm.ranks, dtype=torch.float64, device="cpu")
    counts[comm.rank] = len(rows)
    counts = added(comm, counts)
    start, m = int(counts[: comm.rank].sum()), int(counts.sum())
    placed = rho.new_zeros(m)
    placed[start : start + len(rows)] = rho
    parts = [comm.reduce_scatter(rows[i - start] if start <= i < start + len(rows) else none) for i in range(m)]
    return torch.stack(parts), added(comm, placed)


def _seed(key: Sequence[int]) -> int:
    digest = hashlib.blake2b(repr(tuple(key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def _room(rows: int, objective: Objective) -> Tensor:
    parameters = objective.parameters
    try:
        return torch.empty(rows, parameters.numel, dtype=parameters.dtype, device=parameters.device)
    except (RuntimeError, MemoryError):
        taken = rows * parameters.numel * parameters.dtype.itemsize
        raise ValueError(
            f"The sketch of basis='rational' takes {taken:,} bytes ({rows} rows of {parameters.numel:,} parameters), "
            "which cannot be had. Use basis='krylov', or Rational(rows=...) with fewer rows."
        ) from None


@dataclass(frozen=True)
class _Seen:
    """What is known of a closure's outputs: shapes, and where their rows come from."""

    shapes: tuple[tuple[int, ...], ...]
    places: tuple[Place, ...]


def _look(objective: Objective, batch: Microbatch) -> _Seen:
    calls = Calls(objective.parameters.params)
    with calls:
        evaluation = objective.evaluate(batch)
    require_outputs(evaluation, "basis='rational'")
    rows = (z.reshape(1) if z.ndim == 0 else z for z in evaluation.outputs)
    return _Seen(_shapes(evaluation), tuple(place_of(z, calls.results) for z in rows))


def _shapes(evaluation: Evaluation) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(z.shape) for z in evaluation.outputs)


def _choose(seen: _Seen, wanted: int, generator: torch.Generator) -> list[Tensor]:
    """Which rows of each output are drawn; the same of outputs that come from the same rows.

    In proportion to their number, but no output gets less than a third of an even share.
    """
    numbers = [shape[0] if shape else 1 for shape in seen.shapes]
    widths = [cotangents(math.prod(shape[1:])) for shape in seen.shapes]
    total = sum(n * k for n, k in zip(numbers, widths, strict=True))
    drawn: dict[tuple[Place, int], Tensor] = {}
    for n, k, place in zip(numbers, widths, seen.places, strict=True):
        s = min(n, max(1, round(wanted * max(n / total, 1 / (3 * k * len(numbers))))))
        if (place, n) not in drawn or s > len(drawn[place, n]):
            drawn[place, n] = torch.randperm(n, generator=generator, device="cpu")[:s].sort().values
    return [drawn[place, n] for n, place in zip(numbers, seen.places, strict=True)]


def _together(seen: _Seen, chosen: Sequence[Tensor]) -> dict[int, Tensor]:
    """For each number of rows of a layer's inputs, those that some output was chosen from."""
    rows: dict[int, list[Tensor]] = {}
    for place, S in zip(seen.places, chosen, strict=True):
        rows.setdefault(place.rows, []).append(place.of(S).reshape(-1))
    return {number: torch.unique(torch.cat(parts)) for number, parts in rows.items()}


def _columns(block: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Views [s, …] of a block's columns, in the parameters' shapes."""
    views, at = [], 0
    for p in params:
        views.append(block[:, at : at + p.numel()].view(len(block), *p.shape))
        at += p.numel()
    return views


def _confirmed(z: Tensor, S: Tensor, u: Tensor, params: Sequence[Tensor], block: Tensor) -> bool:
    """Whether a random combination of the rows is what a backward pass gives."""
    w = torch.linspace(-1, 1, len(S), dtype=block.dtype, device=block.device).cos_().add_(0.5)
    w[::2] *= -1
    wu = u * w.reshape(-1, *(1,) * (u.ndim - 1))
    expected = [
        p.new_zeros(p.numel()) if g is None else g.reshape(-1)
        for g, p in zip(along(z, S, wu, params), params, strict=True)
    ]
    whole = torch.cat(expected)
    error = (w @ block - whole).abs().max()
    return bool(error <= torch.finfo(block.dtype).eps ** 0.5 * whole.abs().max())
