"""A sketch of the Gauss–Newton matrix: some rows of H_L^½ J on B, rescaled so that JᵀJ stands for all of them.

Letters: J [m, P] rows of the sketch, ρ [m] with Jᵀρ an estimate of the gradient; m rows wanted in all; a row of J is
uᵀ∂z/∂θ for some outputs z of one sample.
Every output (every term of a multi-term loss) has rows in the sketch, 1/π times as heavy where they were drawn with
chance π (flow/rows.py). Its memory is known before it is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from krylov_descent.distributed import Comm, added, attempt
from krylov_descent.flow.rows import BatchRows, Part, room
from krylov_descent.objective.closure import require_weight
from krylov_descent.objective.objective import Objective
from krylov_descent.safety.budget import at_hand, share
from krylov_descent.samples.subsets import Microbatch

ROWS = 400  # m, unless asked for otherwise

# Of m·n numbers while rows are drawn: J, the weights of their own, their gradients (measured: 4.3 to 4.7), and a third
# more, since many small terms may have so many rows beyond m.
_COPIES = 6.25
_TIMED = 100_000  # parameters that steps were timed with (docs/performance.md); of more, nothing is known


def sketch_bytes(rows: int, numel: int, dtype: torch.dtype) -> int:
    """What a sketch of that many rows takes at its peak."""
    return int(_COPIES * rows * numel * dtype.itemsize)


def refusal(
    rows: int, numel: int, dtype: torch.dtype, device: torch.device, budget: int | None, ranks: int
) -> str | None:
    """What to say if a sketch fits neither the budget nor, without one, the memory at hand on all ranks."""
    taken, remedy = sketch_bytes(rows, numel, dtype), "Use basis='krylov', Rational(rows=...) with fewer rows, or"
    said = f"The sketch of basis='rational' takes {taken:,} bytes ({rows} rows of {numel:,} parameters)"
    if budget is not None:
        return f"{said}, more than memory_budget={budget:,}. {remedy} a larger one." if taken > budget else None
    free = at_hand(device)
    if free is None or taken <= ranks * share(free):
        return None
    remedy = f"{remedy} memory_budget={taken} to take it all the same."
    return f"{said}, more than what may be taken of the {free:,} at hand. {remedy}"


def against_rational(numel: int, dtype: torch.dtype, room: int | None) -> str | None:
    """Why not to begin with the rational basis for so many parameters, if only so many bytes may be taken."""
    if dtype != torch.float64:  # docs/integrations.md has figures
        return "basis='rational' was ahead in float64, and in float32 neither basis was"
    if numel > _TIMED:
        return f"basis='rational' was timed up to {_TIMED:,} parameters, and these are {numel:,}"
    taken = sketch_bytes(ROWS, numel, dtype)
    if room is not None and taken > room:
        return f"the sketch of basis='rational' takes {taken:,} bytes ({ROWS} rows), and {max(0, room):,} may be taken"
    return None


def fitting_basis(params: Iterable[Tensor], budget: int | None = None) -> tuple[Literal["krylov", "rational"], str]:
    """Which to begin with where residuals are squared, in a budget or in the memory at hand; if krylov, and why."""
    trained = [p for p in params if p.requires_grad]
    if not trained:
        return "krylov", "no parameter requires a gradient"
    if budget is None and (free := at_hand(trained[0].device)) is not None:
        budget = share(free)
    why_not = against_rational(sum(p.numel() for p in trained), trained[0].dtype, budget)
    return ("rational", "") if why_not is None else ("krylov", why_not)


_SLOW = (
    "Rows of some output take a backward pass each, which is slow: it has parameters outside of linear layers (x @ W "
    "in place of F.linear), or weights that are computed (weight_norm), it is differentiated by torch.func, a row of "
    "it depends on many points (its first dimension is that of samples or points), or its layers are checkpointed."
)

_FEW = (
    "The sketch has {:,} rows in place of {:,}, since outputs have few rows of many entries each: their first "
    "dimension is that of samples or points."
)

_MANY = (
    "The sketch has {:,} rows in place of {:,}, since every output of every micro-batch has one at least: larger "
    "micro-batches need less room and time."
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
        slow: the share of this rank's rows that took a backward pass each.
    """

    J: Tensor
    rho: Tensor
    whole: bool
    change: Callable[[], Tensor]
    note: str = ""
    slow: float = 0.0


class Sketcher:
    """Draws sketches.

    Attributes:
        rows: m, how many are wanted; at least one of each output of each micro-batch is drawn.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._judged: tuple[object, ...] = ()
        self._of_batches = BatchRows()
        self._told = False  # that sketches are larger or smaller than they were meant to be
        self._told_slow = False  # that rows take a backward pass each

    def draw(self, objective: Objective, batches: Sequence[Microbatch], key: Sequence[int]) -> Sketch:
        """Rows of this closure on these micro-batches; ``key`` seeds which are drawn.

        Raises:
            ValueError: the loss has no square root row by row, or the rows do not fit, with the remedy.
        """
        comm = objective.comm
        judged = (objective.identity, *map(id, objective.parameters.params))
        if judged != self._judged:
            self._judged, self._of_batches, self._told, self._told_slow = judged, BatchRows(), False, False
        known = self._of_batches.refuted
        count = added(comm, float(len(batches)))
        wanted = max(1, round(self.rows / max(1.0, count)))
        parts: list[Part] = []

        def work() -> None:
            parts.extend(self._of_batches.part(objective, b, wanted, _seed((*key, b.position))) for b in batches)

        failure = attempt(comm, work)
        W = added(comm, sum((part.weight for part in parts), 0.0), failure)
        require_weight(W)
        for part in parts:
            part.weigh((part.weight / W) ** 0.5)
        whole = not added(comm, float(not all(part.whole for part in parts)))
        one_by_one = sum(part.slow for part in parts) / max(1, sum(len(part.rho) for part in parts))
        mostly = one_by_one > 0.5 and not self._told_slow
        slow = bool(added(comm, float(self._of_batches.refuted > known or mostly)))
        self._told_slow |= slow
        none = room(1, objective)[0].zero_()  # a rank may have no rows
        rho = torch.cat([none[:0], *(part.rho for part in parts)])
        start, m = _where(comm, len(rho))

        def gathered(x: Tensor) -> Tensor:
            """[m], of what each rank has for its rows."""
            placed = x.new_zeros(m)
            placed[start : start + len(x)] = x
            return comm.total(placed)

        def change() -> Tensor:
            found: list[Tensor] = []

            def work() -> None:
                found.extend(
                    self._of_batches.change(objective, batch, part) for batch, part in zip(batches, parts, strict=True)
                )

            failure = attempt(comm, work)
            added(comm, 0.0, failure)
            return gathered(torch.cat([none[:0], *found]))

        if comm.ranks == 1 and len(parts) == 1:
            J = parts[0].J
        else:
            J = _scattered(comm, [row for part in parts for row in part.J], start, m, none)
        for part in parts:
            part.J = none[None][:0]  # the rows are large, and needed once
        note = _SLOW if slow else ""
        few = m < self.rows / 4 and not whole
        if (few or m > 2 * self.rows) and not self._told:
            self._told = True
            note = f"{note} {(_FEW if few else _MANY).format(m, self.rows)}".strip()
        return Sketch(J, gathered(rho), whole, change, note, one_by_one)

    @property
    def together(self) -> bool:
        """Whether rows of this closure may be had all at once, as far as is known."""
        return not self._of_batches.refuted


def require_plain(comm: Comm, numel: int) -> None:
    """Refuse parameters that are spread over a mesh.

    Raises:
        ValueError: they are.
    """
    if comm.bounds(numel) is None:
        raise ValueError(
            "basis='rational' cannot be used with parameters on a mesh (DTensor): its rows are those of whole layers. "
            "Use basis='krylov', or plain parameters with process_group=..., of which each rank keeps a copy."
        )


def finite_rows(sketch: Sketch, comm: Comm) -> Sketch:
    """Those whose size is finite, on every rank."""
    J, rho = sketch.J, sketch.rho
    sizes = comm.sum(J.square().sum(1))
    keep = sizes.isfinite() & rho.isfinite()
    if bool(keep.all()):
        return sketch
    return Sketch(J[keep], rho[keep], False, lambda: sketch.change()[keep], sketch.note)


def _where(comm: Comm, rows: int) -> tuple[int, int]:
    """Where this rank's rows begin among those of all ranks, and how many those are."""
    counts = torch.zeros(comm.ranks, dtype=torch.float64, device="cpu")
    counts[comm.rank] = rows
    counts = comm.total(counts)
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
