"""A sketch of the Gauss–Newton matrix: some rows of H_L^½ J on B, rescaled so that JᵀJ stands for all of them.

Letters: J [m, P] rows of the sketch, ρ [m] with Jᵀρ an estimate of the gradient; m rows wanted in all; a row of J is
uᵀ∂z/∂θ for some outputs z of one sample.
Every output (every term of a multi-term loss) has rows in the sketch, 1/π times as heavy where they were drawn with
chance π (row_choice.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.closure import Evaluation, require_attached, require_weight
from krylov_descent.curvature.gauss_newton import require_influence
from krylov_descent.data import Microbatch
from krylov_descent.distributed import Comm, added, attempt, inner
from krylov_descent.jacobian import OwnWeights
from krylov_descent.objective import FORWARD, Objective
from krylov_descent.output_hessian import output_roots
from krylov_descent.row_choice import Chosen, Seen, choose, everything, look, samples_of, shapes_of, sizes_of
from krylov_descent.row_writing import RowWriter

_ATTEMPTS = 3  # to see which outputs there are
_SLOW = (
    "Rows of some output take a backward pass each, which is slow: it has parameters outside of linear layers (x @ W "
    "in place of F.linear), or a row of it depends on many points."
)


@dataclass(frozen=True, eq=False)
class Sketch:
    """Rows that were drawn.

    Attributes:
        J: this rank's columns [m, P_local] of the rows of all ranks.
        rho: ρ [m].
        whole: whether no row was left out, so that JᵀJ and Jᵀρ are exact.
        change: → uᵀ(z − z₀) [m]: how far the outputs are, where the parameters are now, from where they were.
        note: what was found just now, and is worth a word.
    """

    J: Tensor
    rho: Tensor
    whole: bool
    change: Callable[[], Tensor]
    note: str = ""


class Sketcher:
    """Draws sketches.

    Attributes:
        rows: m, how many are wanted; at least one of each output of each micro-batch is drawn.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._judged: tuple[object, ...] = ()
        self._writer = RowWriter()
        self._seen: dict[int | None, Seen] = {}
        self._plainly = True  # the closure returns all outputs in a pass without a graph, too

    def draw(self, objective: Objective, batches: Sequence[Microbatch], key: Sequence[int]) -> Sketch:
        """Rows of this closure on these micro-batches; ``key`` seeds which are drawn.

        Raises:
            ValueError: the loss has no square root row by row, or the rows do not fit, with the remedy.
        """
        comm = objective.comm
        judged = (objective.identity, *map(id, objective.parameters.params))
        if judged != self._judged:
            self._judged, self._writer, self._seen, self._plainly = judged, RowWriter(), {}, True
        known = len(self._writer.refuted)
        count = float(added(comm, float(len(batches))))
        wanted = max(1, round(self.rows / max(1.0, count)))
        parts: list[_Part] = []

        def work() -> None:
            parts.extend(self._part(objective, b, wanted, _seed((*key, b.position))) for b in batches)

        failure = attempt(comm, work)
        W = float(added(comm, sum((part.weight for part in parts), 0.0), failure))
        require_weight(W)
        for part in parts:
            part.weigh((part.weight / W) ** 0.5)
        whole = not float(added(comm, float(not all(part.whole for part in parts))))
        slow = bool(float(added(comm, float(len(self._writer.refuted) - known))))
        none = _room(1, objective)[0].zero_()  # a rank may have no rows
        rho = torch.cat([none[:0], *(part.rho for part in parts)])
        start, m = _where(comm, len(rho))

        def gathered(x: Tensor) -> Tensor:
            """[m], of what each rank has for its rows."""
            placed = x.new_zeros(m)
            placed[start : start + len(x)] = x
            return added(comm, placed)

        def change() -> Tensor:
            found: list[Tensor] = []

            def work() -> None:
                found.extend(self._change(objective, batch, part) for batch, part in zip(batches, parts, strict=True))

            failure = attempt(comm, work)
            added(comm, 0.0, failure)
            return gathered(torch.cat([none[:0], *found]))

        if comm.ranks == 1 and len(parts) == 1:
            J = parts[0].J
        else:
            J = _scattered(comm, [row for part in parts for row in part.J], start, m, none)
        for part in parts:
            part.J = none[None][:0]  # the rows are large, and needed once
        return Sketch(J, gathered(rho), whole, change, _SLOW if slow else "")

    @property
    def together(self) -> bool:
        """Whether rows of this closure may be had all at once, as far as is known."""
        return not self._writer.refuted

    def _change(self, objective: Objective, batch: Microbatch, part: _Part) -> Tensor:
        """Of the outputs of one micro-batch; closures that return only what depends on parameters need a graph."""
        if self._plainly:
            evaluation = objective.forward(batch)
            if shapes_of(evaluation) == part.shapes:
                return part.change(evaluation)
            self._plainly = False
        return part.change(_evaluated(objective, batch))

    def _part(self, objective: Objective, batch: Microbatch, wanted: int, seed: int) -> _Part:
        """Rows of one micro-batch."""
        evaluation, own, seen, chosen = self._evaluate(objective, batch, wanted, seed)
        if evaluation.weight == 0:  # every term is masked
            nothing = objective.parameters.zeros()[:0]
            return _Part(_room(0, objective), nothing, nothing, 0.0, [], True, shapes_of(evaluation))
        require_attached(evaluation)
        signs = torch.Generator("cpu").manual_seed(seed + 1)
        deltas = torch.autograd.grad(evaluation.loss, evaluation.outputs, create_graph=True, allow_unused=True)
        require_influence(deltas)
        found = []
        whole = True
        for i, (z, delta, place, drawn) in enumerate(zip(evaluation.outputs, deltas, seen.places, chosen, strict=True)):
            if z.numel() == 0:
                continue
            S = drawn.rows
            roots = output_roots(z, delta, S, signs)
            z = z.reshape(1) if z.ndim == 0 else z
            if isinstance(roots, str):
                raise ValueError(f"basis='rational' cannot be used with this loss: {roots}. Use basis='krylov'.")
            whole &= len(S) == z.shape[0] and len(roots.u) in (0, math.prod(z.shape[1:]))
            for u, rho in zip(roots.u, roots.rho, strict=True):
                scale = drawn.chance.rsqrt().to(rho)
                found.append((i, z, place, S, u * scale.reshape(-1, *(1,) * (u.ndim - 1)).to(u.dtype), rho * scale))
        J = _room(sum(len(S) for _, _, _, S, _, _ in found), objective)
        at = 0
        for i, z, place, S, u, _ in found:
            self._writer.write(objective, evaluation.samples, own, i, z, place, S, u, J[at : at + len(S)])
            at += len(S)
        rho = torch.cat([rho.detach() for *_, rho in found]) if found else J.new_zeros(0)
        reads = [(i, S, u.detach()) for i, _, _, S, u, _ in found]
        return _Part(J, rho, _read(evaluation, reads).to(rho), evaluation.weight, reads, whole, seen.shapes)

    def _evaluate(
        self, objective: Objective, batch: Microbatch, wanted: int, seed: int
    ) -> tuple[Evaluation, OwnWeights, Seen, list[Chosen]]:
        """The closure with weights of their own for the rows that are drawn.

        Which rows there are is known from the last call with so many samples, and at the first from a call without.
        """
        params = objective.parameters.params
        for _ in range(_ATTEMPTS):
            seen = self._seen.get(batch.samples)
            sizes = None if seen is None else _sizes(objective, batch, seen, wanted)
            if seen is not None and sizes is not None:
                # Seeded at each attempt: what is drawn does not depend on what was known before.
                chosen = choose(seen, sizes, wanted, torch.Generator("cpu").manual_seed(seed))
                own = OwnWeights(params, samples_of(seen, chosen))
                with own:
                    evaluation = _evaluated(objective, batch)
                if seen.shapes == shapes_of(evaluation):
                    return evaluation, own, seen, chosen
            self._seen[batch.samples] = look(objective, batch)
        raise ValueError(
            "The closure returned outputs of other shapes at every call: it must return the same ones whenever it is "
            "called with the same batch. Draw new points between steps, not in the closure."
        )


@dataclass(eq=False)
class _Part:
    """Rows of one micro-batch, and how to read the outputs that they belong to: (which, rows S, u)."""

    J: Tensor
    rho: Tensor
    z: Tensor
    weight: float
    reads: list[tuple[int, Tensor, Tensor]]
    whole: bool
    shapes: tuple[tuple[int, ...], ...]

    def weigh(self, factor: float) -> None:
        if factor != 1:
            for x in (self.J, self.rho, self.z, *(u for _, _, u in self.reads)):
                x *= factor

    def change(self, evaluation: Evaluation) -> Tensor:
        if (shapes := shapes_of(evaluation)) != self.shapes:
            raise ValueError(
                f"The closure returned outputs of shapes {list(shapes)}, and before in this step {list(self.shapes)}: "
                "it must return the same outputs whenever it is called with the same batch."
            )
        return _read(evaluation, self.reads) - self.z


def finite_rows(sketch: Sketch, comm: Comm) -> Sketch:
    """Those whose size is finite, on every rank."""
    J, rho = sketch.J, sketch.rho
    sizes = inner(comm, J.shape[1], lambda piece: J[:, piece].square().sum(1))
    keep = sizes.isfinite() & rho.isfinite()
    if bool(keep.all()):
        return sketch
    return Sketch(J[keep], rho[keep], False, lambda: sketch.change()[keep], sketch.note)


def _evaluated(objective: Objective, batch: Microbatch) -> Evaluation:
    evaluation = objective.evaluate(batch)
    objective.sample_gradients += FORWARD * evaluation.samples
    return evaluation


def _sizes(objective: Objective, batch: Microbatch, seen: Seen, wanted: int) -> list[Tensor] | None:
    """Of all rows, where some are to be chosen; None if the outputs are not what was seen."""
    if everything(seen, wanted):
        return [torch.zeros(shape[0] if shape else 1, dtype=torch.float64, device="cpu") for shape in seen.shapes]
    evaluation = _evaluated(objective, batch)
    return sizes_of(evaluation) if shapes_of(evaluation) == seen.shapes else None


def _read(evaluation: Evaluation, reads: Sequence[tuple[int, Tensor, Tensor]]) -> Tensor:
    """uᵀz of every row."""
    z = [z.detach().reshape(1) if z.ndim == 0 else z.detach() for z in evaluation.outputs]
    values = [(u * z[i][S]).reshape(len(S), -1).sum(1) for i, S, u in reads]
    return torch.cat(values) if values else evaluation.loss.new_zeros(0)


def _where(comm: Comm, rows: int) -> tuple[int, int]:
    """Where this rank's rows begin among those of all ranks, and how many those are."""
    counts = torch.zeros(comm.ranks, dtype=torch.float64, device="cpu")
    counts[comm.rank] = rows
    counts = added(comm, counts)
    return int(counts[: comm.rank].sum()), int(counts.sum())


def _scattered(comm: Comm, rows: Sequence[Tensor], start: int, m: int, none: Tensor) -> Tensor:
    """The rows of all ranks, one after the other, each cut into the ranks' parts.

    Reduce-scattering zeros (``none``) from all ranks but one sends what that one has to its owners.
    """
    own = range(start, start + len(rows))
    parts = [comm.reduce_scatter(rows[i - start] if i in own else none, exact=True) for i in range(m)]
    # Without curvature (a loss that is linear in the outputs) there is no row.
    return torch.stack(parts) if parts else comm.shard(none)[None][:0]


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
