"""Rows of one micro-batch of a closure, for a sketch (sketch.py).

Letters: J [m, P] rows, uᵀ∂z/∂θ for some outputs z of one sample each; ρ [m] with Jᵀρ an estimate of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from krylov_descent.closure import Evaluation, require_attached
from krylov_descent.curvature.gauss_newton import require_influence
from krylov_descent.data import Microbatch
from krylov_descent.jacobian import OwnWeights
from krylov_descent.objective import FORWARD, Objective
from krylov_descent.output_hessian import Roots, coupled, output_roots
from krylov_descent.row_choice import Chosen, Seen, choose, everything, look, samples_of, shapes_of, sizes_of, widths
from krylov_descent.row_writing import MovedError, RowWriter, Wanted
from krylov_descent.twice import explained

_ATTEMPTS = 3  # to see which outputs there are
_Moved = Callable[[Objective, Microbatch, Seen], bool]


class BatchRows:
    """Rows of micro-batches of one closure, and what has been found of it so far."""

    def __init__(self) -> None:
        self._writers: dict[int | None, RowWriter] = {}  # and what was seen, by the size of the batch
        self._seen: dict[int | None, Seen] = {}
        self._plainly = True  # the closure returns all outputs in a pass without a graph, too
        self._kept = True  # what a backward pass needs is kept, and not computed again, without weights of their own

    @property
    def refuted(self) -> int:
        """Of how many outputs rows take a backward pass each."""
        return sum(len(writer.refuted) for writer in self._writers.values()) + (not self._kept)

    def part(self, objective: Objective, batch: Microbatch, wanted: int, seed: int) -> Part:
        """Some rows, about ``wanted`` of them; ``seed`` tells which."""
        part = self._tried(objective, batch, wanted, seed, self._moved)
        # Tried again out here, where nothing holds on to the rows of before.
        part = part or self._tried(objective, batch, wanted, seed, _nowhere)
        return part or self._rows_of(objective, batch, wanted, seed, _nowhere)

    def _tried(self, objective: Objective, batch: Microbatch, wanted: int, seed: int, moved: _Moved) -> Part | None:
        """None where something was found that rows have to be written anew for."""
        try:
            return self._rows_of(objective, batch, wanted, seed, moved)
        except MovedError:
            return None
        except CheckpointError:
            if not self._kept:
                raise
            self._kept = False
            return None

    def _moved(self, objective: Objective, batch: Microbatch, seen: Seen) -> bool:
        """Whether rows come from elsewhere, seen by looking again."""
        now = look(objective, batch)
        if now.shapes != seen.shapes or now.places == seen.places:
            return False
        self._seen[batch.samples], self._writers[batch.samples] = now, RowWriter()
        return True

    def _rows_of(
        self,
        objective: Objective,
        batch: Microbatch,
        wanted: int,
        seed: int,
        moved: _Moved,
    ) -> Part:
        evaluation, own, seen, chosen = self._evaluate(objective, batch, wanted, seed)
        if evaluation.weight == 0:  # every term is masked
            nothing = objective.parameters.zeros()[:0]
            return Part(room(0, objective), nothing, nothing, 0.0, [], True, shapes_of(evaluation))
        require_attached(evaluation)
        signs = torch.Generator("cpu").manual_seed(seed + 1)
        all_roots = _roots(evaluation, chosen, widths(seen, wanted, objective.parameters.numel), signs)
        found = []
        whole = True
        for i, (z, roots, place, drawn) in enumerate(
            zip(evaluation.outputs, all_roots, seen.places, chosen, strict=True)
        ):
            if roots is None:
                continue
            S = drawn.rows
            z = z.reshape(1) if z.ndim == 0 else z
            whole &= len(S) == z.shape[0] and len(roots.u) in (0, math.prod(z.shape[1:]))
            scale = drawn.chance.rsqrt().to(roots.rho)
            u = roots.u * scale.reshape(1, -1, *(1,) * (roots.u.ndim - 2)).to(roots.u.dtype)
            if len(u):
                place = place if self._kept else None
                found.append((Wanted(i, z, place, S, u, evaluation.samples), roots.rho * scale))
        J = room(sum(rows.rows for rows, _ in found), objective)
        writer = self._writers.setdefault(batch.samples, RowWriter())
        at = slow = 0
        for rows, _ in found:
            slow += writer.write(objective, own, rows, J[at : at + rows.rows], lambda: moved(objective, batch, seen))
            at += rows.rows
        rho = torch.cat([rho.detach().reshape(-1) for _, rho in found]) if found else J.new_zeros(0)
        reads = [(rows.output, rows.S, u.detach()) for rows, _ in found for u in rows.u]
        return Part(J, rho, _read(evaluation, reads).to(rho), evaluation.weight, reads, whole, seen.shapes, slow)

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
                drawing = torch.Generator("cpu").manual_seed(seed)
                chosen = choose(seen, sizes, wanted, drawing, params[0].device)
                own = OwnWeights(params, samples_of(seen, chosen) if self._kept else {})
                with own:
                    evaluation = _evaluated(objective, batch)
                if seen.shapes == shapes_of(evaluation):
                    return evaluation, own, seen, chosen
            self._seen[batch.samples], self._writers[batch.samples] = look(objective, batch), RowWriter()
        raise ValueError(
            "The closure returned outputs of other shapes at every call: it must return the same ones whenever it is "
            "called with the same batch. Draw new points between steps, not in the closure."
        )

    def change(self, objective: Objective, batch: Microbatch, part: Part) -> Tensor:
        """Of the outputs of one micro-batch; closures that return only what depends on parameters need a graph."""
        if self._plainly:
            evaluation = objective.forward(batch)
            if shapes_of(evaluation) == part.shapes:
                return part.change(evaluation)
            self._plainly = False
        return part.change(_evaluated(objective, batch))


@dataclass(eq=False)
class Part:
    """Rows of one micro-batch, and how to read the outputs that they belong to: (which, rows S, u).

    ``slow`` is how many rows took a backward pass each.
    """

    J: Tensor
    rho: Tensor
    z: Tensor
    weight: float
    reads: list[tuple[int, Tensor, Tensor]]
    whole: bool
    shapes: tuple[tuple[int, ...], ...]
    slow: int = 0

    def weigh(self, factor: float) -> None:
        """Make all of it so many times as large."""
        if factor != 1:
            for x in (self.J, self.rho, self.z, *(u for _, _, u in self.reads)):
                x *= factor

    def change(self, evaluation: Evaluation) -> Tensor:
        """Of uᵀz of each row, to what it is in this evaluation."""
        if (shapes := shapes_of(evaluation)) != self.shapes:
            raise ValueError(
                f"The closure returned outputs of shapes {list(shapes)}, and before in this step {list(self.shapes)}: "
                "it must return the same outputs whenever it is called with the same batch."
            )
        return _read(evaluation, self.reads) - self.z


def _nowhere(objective: Objective, batch: Microbatch, seen: Seen) -> bool:
    """Rows move once in a step at most."""
    return False


def _evaluated(objective: Objective, batch: Microbatch) -> Evaluation:
    evaluation = objective.evaluate(batch)
    objective.sample_gradients += FORWARD * evaluation.samples
    return evaluation


def _roots(
    evaluation: Evaluation, chosen: Sequence[Chosen], numbers: Sequence[int], signs: torch.Generator
) -> list[Roots | None]:
    """For the chosen rows of every output, with so many cotangents each; None of an output without entries.

    Raises:
        ValueError: the loss has none, with the remedy.
    """
    outputs, found = evaluation.outputs, list[Roots | None]()
    with explained():
        deltas = torch.autograd.grad(evaluation.loss, outputs, create_graph=True, allow_unused=True)
        require_influence(deltas)
        if (pair := coupled(outputs, deltas)) is not None:
            raise ValueError(
                f"basis='rational' cannot be used with this loss: it couples outputs {pair[0]} and {pair[1]}. Use "
                "basis='krylov', or return what is squared, such as their difference, as one output."
            )
        for z, delta, drawn, k in zip(outputs, deltas, chosen, numbers, strict=True):
            roots = output_roots(z, delta, drawn.rows, signs, k) if z.numel() else None
            if isinstance(roots, str):
                raise ValueError(f"basis='rational' cannot be used with this loss: {roots}. Use basis='krylov'.")
            found.append(roots)
    return found


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


def room(rows: int, objective: Objective) -> Tensor:
    """For so many rows [rows, P]; ValueError, with a remedy, if there is none."""
    parameters = objective.parameters
    try:
        return torch.empty(rows, parameters.numel, dtype=parameters.dtype, device=parameters.device)
    except (RuntimeError, MemoryError):
        taken = rows * parameters.numel * parameters.dtype.itemsize
        raise ValueError(
            f"The sketch of basis='rational' takes {taken:,} bytes ({rows} rows of {parameters.numel:,} parameters), "
            "which cannot be had. Use basis='krylov', or Rational(rows=...) with fewer rows."
        ) from None
