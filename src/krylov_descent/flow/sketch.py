"""A sketch of the Gauss–Newton matrix: sampled rows of H_L^½ J on B, rescaled so that JᵀJ estimates the full matrix.

Letters: J [m, P] rows of the sketch, ρ [m] with Jᵀρ an estimate of the gradient; a row of J is uᵀ∂z/∂θ for some outputs
z of one sample. Every output (every term of a multi-term loss) has rows in the sketch, weighted by 1/π if drawn with
chance π (flow/row_sampling.py). The memory of a sketch is known before it is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.distributed import Comm, added, defer_error, part_length
from krylov_descent.flow.row_sampling import BatchRows, Part, TappedGraph, room
from krylov_descent.objective.closure import Evaluation, require_weight
from krylov_descent.objective.objective import Objective
from krylov_descent.safety.budget import at_hand, share
from krylov_descent.samples.subsets import Microbatch

ROWS = 400  # default of m

_MARGIN = 1.65  # many small terms may add rows beyond m, and some layers' rows take copies
_TOGETHER = 2**17  # numbers of rows that are sent to other ranks at once
_TIMED = 100_000  # most parameters with which steps were timed (docs/appendix/speed.md)


def expected_bytes(rows: int, numel: int, dtype: torch.dtype) -> int:
    """Return the memory of J with this number of rows and of its QR in float64, on all ranks together.

    Example:
        >>> [expected_bytes(400, 1000, dtype) for dtype in (torch.float64, torch.float32)]
        [6400000, 8000000]
    """
    copies = 1 if dtype == torch.float64 else 2  # the one that the QR overwrites, and J converted
    return rows * numel * (dtype.itemsize + 8 * copies)


def sketch_bytes(rows: int, numel: int, dtype: torch.dtype) -> int:
    """Return an upper bound of the memory of a sketch with this number of rows."""
    return int(_MARGIN * expected_bytes(rows, numel, dtype))


def refusal(
    rows: int, numel: int, dtype: torch.dtype, device: torch.device, budget: int | None, ranks: int
) -> str | None:
    """Return an error message if a sketch exceeds the budget or, without one, the free memory on all ranks."""
    taken, remedy = sketch_bytes(rows, numel, dtype), "Use KSD, GaussNewtonFlow(rows=...) with fewer rows, or"
    said = f"The sketch of GaussNewtonFlow takes {taken:,} bytes ({rows} rows of {numel:,} parameters)"
    if budget is not None:
        return f"{said}, more than memory_budget={budget:,}. {remedy} a larger one." if taken > budget else None
    free = at_hand(device)
    if free is None or taken <= ranks * share(free):
        return None
    remedy = f"{remedy} memory_budget={taken} to take it anyway."
    return f"{said}, more than may be taken of the {free:,} bytes of free memory. {remedy}"


def against_flow(numel: int, dtype: torch.dtype, room: int | None) -> str | None:
    """Return the reason against the flow for this number of parameters and ``room`` bytes, or None."""
    if dtype != torch.float64:  # docs/howto/integrations.md has figures
        return "GaussNewtonFlow was ahead in float64, and in float32 neither method was"
    if numel > _TIMED:
        return f"GaussNewtonFlow was timed up to {_TIMED:,} parameters, and the model has {numel:,}"
    taken = sketch_bytes(ROWS, numel, dtype)
    if room is not None and taken > room:
        return f"the sketch of GaussNewtonFlow takes {taken:,} bytes ({ROWS} rows), and {max(0, room):,} may be taken"
    return None


def why_not_flow(params: Iterable[Tensor], budget: int | None = None) -> str | None:
    """Return the reason to prefer KSD for squared residuals, in a budget or the free memory; None for the flow."""
    trained = [p for p in params if p.requires_grad]
    if not trained:
        return "no parameter requires a gradient"
    if budget is None and (free := at_hand(trained[0].device)) is not None:
        budget = share(free)
    return against_flow(sum(p.numel() for p in trained), trained[0].dtype, budget)


_SLOW = "The Jacobian rows of some output take a backward pass each, which is slow: {}."
_USED = "parameters are used by {}, and only linear layers and convolutions without groups are fast"
_OTHERWISE = (
    "layers are checkpointed or differentiated by torch.func, or most of its rows depend on the same points (its first "
    "dimension is that of samples or points)"
)

_FEW = (
    "The sketch has {:,} rows in place of {:,}, because outputs have few rows of many entries each; the first "
    "dimension of an output is that of samples or points."
)

_MANY = (
    "The sketch has {:,} rows in place of {:,}, because every output of every micro-batch has at least one; larger "
    "micro-batches need less memory and time."
)


@dataclass(frozen=True, eq=False)
class Sketch:
    """The sampled rows of all micro-batches.

    Attributes:
        J: this rank's columns [m, P_local] of the rows of all ranks.
        rho: ρ [m].
        whole: whether no row was left out, so that JᵀJ and Jᵀρ are exact.
        look: returns f on B and uᵀ(z − z₀) [m], the change of the outputs from the sketch to the current parameters.
        note: a note for the report, or "".
        slow: the fraction of this rank's rows that took a backward pass each.
        why: the reason why they did.
    """

    J: Tensor
    rho: Tensor
    whole: bool
    look: Callable[[], tuple[float, Tensor]]
    note: str = ""
    slow: float = 0.0
    why: str = ""


class Sketcher:
    """Draws sketches.

    Attributes:
        rows: m, the wanted number of rows; each output of each micro-batch has at least one.
    """

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def draw(
        self, objective: Objective, batches: Sequence[Microbatch], key: Sequence[int], graph: TappedGraph | None = None
    ) -> Sketch:
        """Draw a sketch on these micro-batches; ``key`` seeds the sampling, ``graph`` is that of a full batch.

        Raises:
            ValueError: the loss has no square root row by row, or the rows do not fit in memory.
        """
        comm = objective.comm
        of_batches = objective.workspace.of(BatchRows)
        known = of_batches.refuted
        count = added(comm, float(len(batches)))
        wanted = max(1, round(self.rows / max(1.0, count)))
        parts: list[Part] = []

        def work() -> None:
            parts.extend(of_batches.part(objective, b, wanted, _seed((*key, b.position)), graph) for b in batches)

        failure = defer_error(comm, work)
        W = added(comm, sum((part.weight for part in parts), 0.0), failure)
        require_weight(W)
        for part in parts:
            part.weigh((part.weight / W) ** 0.5)
        whole = not added(comm, float(not all(part.whole for part in parts)))
        one_by_one = sum(part.slow for part in parts) / max(1, sum(len(part.rho) for part in parts))
        mostly = one_by_one > 0.5 and not of_batches.told_slow
        slow = bool(added(comm, float(of_batches.refuted > known or mostly)))
        of_batches.told_slow |= slow
        none = room(1, objective)[0].zero_()  # a rank may have no rows
        rho = torch.cat([none[:0], *(part.rho for part in parts)])
        start, m = _where(comm, len(rho))

        def gathered(x: Tensor) -> Tensor:
            """Return the values [m] for the rows of all ranks."""
            placed = x.new_zeros(m)
            placed[start : start + len(x)] = x
            return comm.total(placed)

        def look() -> tuple[float, Tensor]:
            found: list[Tensor] = []

            def see(batch: Microbatch, evaluation: Evaluation) -> None:
                found.append(of_batches.change(objective, batch, parts[len(found)], evaluation))

            f = objective.value(batches, see).mean
            return f, gathered(torch.cat([none[:0], *found]))

        if comm.ranks == 1 and len(parts) == 1:
            J = parts[0].J
        else:
            J = _scattered(comm, [row for part in parts for row in part.J], start, m, none)
        for part in parts:
            part.J = none[None][:0]  # free the rows
        operations = ", ".join(sorted(of_batches.operations))
        why = _USED.format(operations) if operations else _OTHERWISE
        note = _SLOW.format(why) if slow else ""
        few = m < self.rows / 4 and not whole
        if (few or m > 2 * self.rows) and not of_batches.told_size:
            of_batches.told_size = True
            note = f"{note} {(_FEW if few else _MANY).format(m, self.rows)}".strip()
        return Sketch(J, gathered(rho), whole, look, note, one_by_one, why)


def finite_rows(sketch: Sketch, comm: Comm) -> Sketch:
    """Return the sketch without rows that are not finite."""
    J, rho = sketch.J, sketch.rho
    sizes = comm.sum(J.square().sum(1))
    keep = sizes.isfinite() & rho.isfinite()
    if bool(keep.all()):
        return sketch

    def look() -> tuple[float, Tensor]:
        f, change = sketch.look()
        return f, change[keep]

    return Sketch(J[keep], rho[keep], False, look, sketch.note)


def _where(comm: Comm, rows: int) -> tuple[int, int]:
    """Return the start of this rank's rows among those of all ranks, and the number of all rows."""
    counts = torch.zeros(comm.ranks, dtype=torch.float64, device="cpu")
    counts[comm.rank] = rows
    counts = comm.total(counts)
    return int(counts[: comm.rank].sum()), int(counts.sum())


def _scattered(comm: Comm, rows: Sequence[Tensor], start: int, m: int, none: Tensor) -> Tensor:
    """Return this rank's columns of the rows of all ranks.

    A reduce-scatter with zeros from all ranks but one sends that rank's rows to their owners; short rows go together.
    """
    n, part = len(none), part_length(comm, len(none))
    J = none.new_empty(m, part)
    together = max(1, _TOGETHER // max(1, n))
    for i in range(0, m, together):
        block = none.new_zeros(min(together, m - i), comm.ranks * part)
        for j in range(max(i, start), min(i + len(block), start + len(rows))):
            block[j - i, :n] = rows[j - start]
        by_rank = block.view(len(block), comm.ranks, part).transpose(0, 1).reshape(-1)
        own = comm.reduce_scatter(by_rank, exact=True, sizes=[len(block) * part] * comm.ranks)
        J[i : i + together] = own.view(-1, part)
    return J


def _seed(key: Sequence[int]) -> int:
    digest = hashlib.blake2b(repr(tuple(key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2
