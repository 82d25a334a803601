"""The sampled Jacobian rows of one micro-batch: their choice, and their part of J and ρ.

Letters: J [m, P] rows, uᵀ∂z/∂θ for some outputs z of one sample each; ρ [m] with Jᵀρ an estimate of the gradient.
A row z of an output is its part for one sample or point (an index of its first dimension).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from krylov_descent.curvature.errors import explain_missing_second_derivative
from krylov_descent.curvature.gauss_newton import require_influence
from krylov_descent.curvature.output_roots import Roots, cotangents, coupled, output_roots
from krylov_descent.flow.jacobian_rows import MovedError, OwnWeights, Place, RowWriter, Wanted, place_of
from krylov_descent.layers.calls import Recorder
from krylov_descent.objective.closure import Evaluation, require_attached, require_outputs
from krylov_descent.objective.objective import FORWARD, Objective
from krylov_descent.samples.subsets import Microbatch

_LARGE = 4  # size relative to the mean, above which a row is drawn more often than others


@dataclass(frozen=True)
class OutputLayout:
    """The shapes of a closure's outputs, and the places of their rows in the layers' inputs, None if unknown."""

    shapes: tuple[tuple[int, ...], ...]
    places: tuple[Place | None, ...]


def look(objective: Objective, batch: Microbatch) -> OutputLayout:
    """Call the closure and return the layout of its outputs."""
    recorder = Recorder(objective.parameters.params)
    evaluation = objective.evaluate(batch, lambda: recorder)
    require_outputs(evaluation, "GaussNewtonFlow")
    rows = (z.reshape(1) if z.ndim == 0 else z for z in evaluation.outputs)
    return OutputLayout(shapes_of(evaluation), tuple(place_of(z, recorder.calls) for z in rows))


def shapes_of(evaluation: Evaluation) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the outputs."""
    return tuple(tuple(z.shape) for z in evaluation.outputs)


@dataclass(frozen=True, eq=False)
class Chosen:
    """The sampled rows of one output.

    Attributes:
        rows: S [s], their indices, ascending.
        chance: π [s], their inclusion probabilities.
    """

    rows: Tensor
    chance: Tensor


def sizes_of(evaluation: Evaluation) -> list[Tensor]:
    """Return ‖∂f/∂z‖² [n] of the rows z of every output: their influence on the loss."""
    outputs = evaluation.outputs
    deltas: Sequence[Tensor | None] = [None] * len(outputs)
    if evaluation.loss.requires_grad:
        require_attached(evaluation)
        deltas = torch.autograd.grad(evaluation.loss, outputs, allow_unused=True)
    found = []
    for z, delta in zip(outputs, deltas, strict=True):
        n = z.shape[0] if z.ndim else 1
        size = (torch.zeros_like(z) if delta is None else delta).detach().reshape(n, z.numel() // max(1, n))
        found.append(size.double().square().sum(1).nan_to_num(0.0, 0.0, 0.0).cpu())
    return found


def counts(seen: OutputLayout, wanted: int) -> list[int]:
    """Return the number of rows to draw of each output: proportional to its rows, at least a third of an even share."""
    return [
        min(shape[0] if shape else 1, max(1, round(s)))
        for shape, s in zip(seen.shapes, _shares(seen, wanted), strict=True)
    ]


def widths(seen: OutputLayout, wanted: int, numel: int) -> list[int]:
    """Return the number of cotangents for each row of an output: several if it has few rows of many entries.

    The cotangents are then no larger than the rows of J, which have ``numel`` entries.
    """
    found = []
    for shape, share in zip(seen.shapes, _shares(seen, wanted), strict=True):
        c = math.prod(shape[1:])
        found.append(cotangents(c, share / max(1, shape[0] if shape else 1) * min(1.0, numel / max(1, c))))
    return found


def _shares(seen: OutputLayout, wanted: int) -> list[float]:
    """Return each output's share of the wanted rows, not limited by its number of rows."""
    numbers = [shape[0] if shape else 1 for shape in seen.shapes]
    least = [max(1, cotangents(math.prod(shape[1:]))) for shape in seen.shapes]
    total = max(1, sum(n * k for n, k in zip(numbers, least, strict=True)))
    return [wanted * max(n / total, 1 / (3 * k * len(numbers))) for n, k in zip(numbers, least, strict=True)]


def everything(seen: OutputLayout, wanted: int) -> bool:
    """Return whether all rows are drawn."""
    return all(s == (shape[0] if shape else 1) for s, shape in zip(counts(seen, wanted), seen.shapes, strict=True))


def choose(
    seen: OutputLayout, sizes: Sequence[Tensor], wanted: int, generator: torch.Generator, device: torch.device
) -> list[Chosen]:
    """Draw rows of each output, the same rows for outputs that depend on the same inputs.

    The chances are even, except for rows whose ``sizes`` are far above the mean: a few, at a front, may hold most of
    the loss.
    """
    keys = [(place, len(size)) for place, size in zip(seen.places, sizes, strict=True)]
    most: dict[tuple[Place | None, int], int] = {}
    summed: dict[tuple[Place | None, int], Tensor] = {}
    for key, size, s in zip(keys, sizes, counts(seen, wanted), strict=True):
        most[key] = max(s, most.get(key, 0))
        summed[key] = size + summed.get(key, 0.0)
    drawn = {}
    for key, s in most.items():
        chance = chances(summed[key], s)
        S = systematic(chance, s, generator)
        drawn[key] = Chosen(S.to(device), chance[S])
    return [drawn[key] for key in keys]


def chances(size: Tensor, s: int) -> Tensor:
    """Return π [n] with Σπ = s and π ≤ 1: even, except proportional to the size of rows far above the mean.

    Example:
        >>> size = torch.ones(20, dtype=torch.float64)
        >>> size[0] = 181.0
        >>> chances(size, 4)[:3]
        tensor([0.7694, 0.1700, 0.1700], dtype=torch.float64)
    """
    n, whole = len(size), float(size.sum())
    share = torch.full_like(size, 1 / max(1, n))
    if 0 < whole < math.inf:
        share = torch.maximum(share, size / (_LARGE * whole))
    sure = share < 0
    while True:  # cap chances at 1 and spread the excess over the others
        left = s - int(sure.sum())
        chance = share * (left / float(share[~sure].sum()) if left else 0.0)
        chance[sure] = 1
        more = chance > 1
        if not bool(more.any()):
            return chance
        sure |= more


def systematic(chance: Tensor, s: int, generator: torch.Generator) -> Tensor:
    """Return s row indices [s], ascending, each drawn with its own chance (systematic sampling in random order)."""
    order = torch.randperm(len(chance), generator=generator, device="cpu")
    first = torch.rand(1, dtype=torch.float64, generator=generator, device="cpu")
    marks = first + torch.arange(s, dtype=torch.float64, device="cpu")
    at = torch.searchsorted(chance[order].cumsum(0), marks).clamp(max=len(chance) - 1)
    drawn: Tensor = torch.unique(order[at])
    return drawn


def samples_of(seen: OutputLayout, chosen: Sequence[Chosen]) -> dict[int, Tensor]:
    """Return, by the number of rows of a layer's inputs, the input rows that the sampled output rows depend on."""
    rows: dict[int, list[Tensor]] = {}
    for place, drawn in zip(seen.places, chosen, strict=True):
        if place is None or not len(drawn.rows):
            continue
        rows.setdefault(place.rows, []).append(place.of(drawn.rows).reshape(-1))
    return {number: torch.unique(torch.cat(parts)) for number, parts in rows.items()}


_ATTEMPTS = 3  # calls of a closure whose outputs change shape
_Moved = Callable[[Objective, Microbatch, OutputLayout], bool]


class BatchRows:
    """Computes the Jacobian rows of micro-batches, and remembers the layout of the closure's outputs."""

    def __init__(self) -> None:
        self._writers: dict[int | None, RowWriter] = {}  # by batch size, as _seen
        self._seen: dict[int | None, OutputLayout] = {}
        self._plainly = True  # the closure returns all outputs in a pass without a graph, too
        self._kept = True  # activations are kept, not recomputed by checkpointing, which would lose per-row weights
        self.told_size = False  # the note on a sketch larger or smaller than wanted was given
        self.told_slow = False  # the note on a backward pass for each row was given

    @property
    def refuted(self) -> int:
        """The number of outputs whose rows take a backward pass each."""
        return sum(len(writer.trust.refuted) for writer in self._writers.values()) + (not self._kept)

    def part(self, objective: Objective, batch: Microbatch, wanted: int, seed: int) -> Part:
        """Return about ``wanted`` rows of a micro-batch, sampled with ``seed``."""
        part = self._tried(objective, batch, wanted, seed, self._moved)
        # The retry is out here, where no reference keeps the first attempt's rows alive.
        part = part or self._tried(objective, batch, wanted, seed, _nowhere)
        return part or self._rows_of(objective, batch, wanted, seed, _nowhere)

    def _tried(self, objective: Objective, batch: Microbatch, wanted: int, seed: int, moved: _Moved) -> Part | None:
        """Return the rows; None if a discovery about the closure requires that they are computed anew."""
        try:
            return self._rows_of(objective, batch, wanted, seed, moved)
        except MovedError:
            return None
        except CheckpointError:
            if not self._kept:
                raise
            self._kept = False
            return None

    def _moved(self, objective: Objective, batch: Microbatch, seen: OutputLayout) -> bool:
        """Look at the closure again, and return whether the places of its rows have changed."""
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
    ) -> tuple[Evaluation, OwnWeights, OutputLayout, list[Chosen]]:
        """Evaluate the closure with per-row weights for the sampled rows.

        The layout of the rows is known from the last call with this batch size, or found by an extra first call.
        """
        params = objective.parameters.params
        for _ in range(_ATTEMPTS):
            seen = self._seen.get(batch.samples)
            sizes = None if seen is None else _sizes(objective, batch, seen, wanted)
            if seen is not None and sizes is not None:
                # Seeded at each attempt, so that the draw does not depend on earlier attempts.
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
        """Return the change of one micro-batch's outputs; some closures drop outputs without a graph, and get one."""
        if self._plainly:
            evaluation = objective.forward(batch)
            if shapes_of(evaluation) == part.shapes:
                return part.change(evaluation)
            self._plainly = False
        return part.change(_evaluated(objective, batch))


@dataclass(eq=False)
class Part:
    """The sampled rows of one micro-batch; ``reads`` holds (output, rows S, u) of each block of rows.

    ``slow`` is the number of rows that took a backward pass each.
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
        """Multiply the rows, ρ, outputs and cotangents by ``factor``."""
        if factor != 1:
            for x in (self.J, self.rho, self.z, *(u for _, _, u in self.reads)):
                x *= factor

    def change(self, evaluation: Evaluation) -> Tensor:
        """Return the change of uᵀz of each row up to this evaluation."""
        if (shapes := shapes_of(evaluation)) != self.shapes:
            raise ValueError(
                f"The closure returned outputs of shapes {list(shapes)}, and before in this step {list(self.shapes)}: "
                "it must return the same outputs whenever it is called with the same batch."
            )
        return _read(evaluation, self.reads) - self.z


def _nowhere(objective: Objective, batch: Microbatch, seen: OutputLayout) -> bool:
    """Return False: places of rows are looked up again at most once in a step."""
    return False


def _evaluated(objective: Objective, batch: Microbatch) -> Evaluation:
    evaluation = objective.evaluate(batch)
    objective.sample_gradients += FORWARD * evaluation.samples
    return evaluation


def _roots(
    evaluation: Evaluation, chosen: Sequence[Chosen], numbers: Sequence[int], signs: torch.Generator
) -> list[Roots | None]:
    """Return the roots of each output's Hessian at its sampled rows, with ``numbers`` of cotangents; None if empty.

    Raises:
        ValueError: the loss has no such roots; the message has the remedy.
    """
    outputs, found = evaluation.outputs, list[Roots | None]()
    with explain_missing_second_derivative():
        deltas = torch.autograd.grad(evaluation.loss, outputs, create_graph=True, allow_unused=True)
        require_influence(deltas)
        if (pair := coupled(outputs, deltas)) is not None:
            raise ValueError(
                f"GaussNewtonFlow cannot be used with this loss: it couples outputs {pair[0]} and {pair[1]}. Use "
                "KSD, or return what is squared, such as their difference, as one output."
            )
        for z, delta, drawn, k in zip(outputs, deltas, chosen, numbers, strict=True):
            roots = output_roots(z, delta, drawn.rows, signs, k) if z.numel() else None
            if isinstance(roots, str):
                raise ValueError(f"GaussNewtonFlow cannot be used with this loss: {roots}. Use KSD.")
            found.append(roots)
    return found


def _sizes(objective: Objective, batch: Microbatch, seen: OutputLayout, wanted: int) -> list[Tensor] | None:
    """Return the sizes of all rows, or zeros if all rows are drawn; None if the output shapes have changed."""
    if everything(seen, wanted):
        return [torch.zeros(shape[0] if shape else 1, dtype=torch.float64, device="cpu") for shape in seen.shapes]
    evaluation = _evaluated(objective, batch)
    return sizes_of(evaluation) if shapes_of(evaluation) == seen.shapes else None


def _read(evaluation: Evaluation, reads: Sequence[tuple[int, Tensor, Tensor]]) -> Tensor:
    """Return uᵀz of every row."""
    z = [z.detach().reshape(1) if z.ndim == 0 else z.detach() for z in evaluation.outputs]
    values = [(u * z[i][S]).reshape(len(S), -1).sum(1) for i, S, u in reads]
    return torch.cat(values) if values else evaluation.loss.new_zeros(0)


def room(rows: int, objective: Objective) -> Tensor:
    """Return an empty tensor [rows, P].

    Raises:
        ValueError: the memory is too small; the message has the remedy.
    """
    parameters = objective.parameters
    try:
        return torch.empty(rows, parameters.numel, dtype=parameters.dtype, device=parameters.device)
    except (RuntimeError, MemoryError):
        taken = rows * parameters.numel * parameters.dtype.itemsize
        raise ValueError(
            f"The sketch of GaussNewtonFlow takes {taken:,} bytes ({rows} rows of {parameters.numel:,} parameters), "
            "which cannot be allocated. Use KSD, or GaussNewtonFlow(rows=...) with fewer rows."
        ) from None
