"""The sampled Jacobian rows of one micro-batch: their choice, and their part of J and ρ.

Letters: J [m, P] rows, uᵀ∂z/∂θ for some outputs z of one sample each; ρ [m] with Jᵀρ an estimate of the gradient.
A row z of an output is its part for one sample or point (an index of its first dimension).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from krylov_descent.curvature.errors import explain_missing_second_derivative
from krylov_descent.curvature.gauss_newton import require_influence
from krylov_descent.curvature.output_roots import Roots, cotangents, coupled, output_roots
from krylov_descent.flow.jacobian_rows import RowWriter, Wanted
from krylov_descent.flow.taps import Taps
from krylov_descent.objective.closure import Evaluation, require_attached, require_outputs
from krylov_descent.objective.objective import FORWARD, Objective
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.vectors.devices import sent, wide

_LARGE = 4  # size relative to the mean, above which a row is drawn more often than others


Shapes = tuple[tuple[int, ...], ...]


def shapes_of(evaluation: Evaluation) -> Shapes:
    """Return the shapes of the outputs."""
    return tuple(tuple(z.shape) for z in evaluation.outputs)


@dataclass(frozen=True, eq=False)
class Chosen:
    """The sampled rows of one output.

    Attributes:
        rows: S [s], their indices, ascending, on the outputs' device.
        known: S in host memory.
        chance: π [s], their inclusion probabilities, in host memory.
    """

    rows: Tensor
    known: Tensor
    chance: Tensor


def sizes_of(evaluation: Evaluation) -> list[Tensor]:
    """Return ‖∂f/∂z‖² [n] of the rows z of every output: their influence on the loss."""
    outputs = evaluation.outputs
    deltas: Sequence[Tensor | None] = [None] * len(outputs)
    if evaluation.loss.requires_grad:
        require_attached(evaluation)
        deltas = torch.autograd.grad(evaluation.loss, outputs, retain_graph=True, allow_unused=True)
    found = []
    for z, delta in zip(outputs, deltas, strict=True):
        n = z.shape[0] if z.ndim else 1
        size = (torch.zeros_like(z) if delta is None else delta).detach().reshape(n, z.numel() // max(1, n))
        found.append(wide(size).square().sum(1).nan_to_num(0.0, 0.0, 0.0))
    return list(torch.split(torch.cat(found).cpu(), [len(size) for size in found])) if found else []


def counts(shapes: Shapes, wanted: int) -> list[int]:
    """Return the number of rows to draw of each output: proportional to its rows, at least a third of an even share."""
    return [
        min(shape[0] if shape else 1, max(1, round(s)))
        for shape, s in zip(shapes, _shares(shapes, wanted), strict=True)
    ]


def widths(shapes: Shapes, wanted: int, numel: int) -> list[int]:
    """Return the number of cotangents for each row of an output: several if it has few rows of many entries.

    The cotangents are then no larger than the rows of J, which have ``numel`` entries.
    """
    found = []
    for shape, share in zip(shapes, _shares(shapes, wanted), strict=True):
        c = math.prod(shape[1:])
        found.append(cotangents(c, share / max(1, shape[0] if shape else 1) * min(1.0, numel / max(1, c))))
    return found


def _shares(shapes: Shapes, wanted: int) -> list[float]:
    """Return each output's share of the wanted rows, not limited by its number of rows."""
    numbers = [shape[0] if shape else 1 for shape in shapes]
    least = [max(1, cotangents(math.prod(shape[1:]))) for shape in shapes]
    total = max(1, sum(n * k for n, k in zip(numbers, least, strict=True)))
    return [wanted * max(n / total, 1 / (3 * k * len(numbers))) for n, k in zip(numbers, least, strict=True)]


def everything(shapes: Shapes, wanted: int) -> bool:
    """Return whether all rows are drawn."""
    return all(s == (shape[0] if shape else 1) for s, shape in zip(counts(shapes, wanted), shapes, strict=True))


def choose(
    shapes: Shapes, alike: Sequence[int], sizes: Sequence[Tensor], wanted: int, seed: int, device: torch.device
) -> list[Chosen]:
    """Draw rows of each output, those of output ``alike[i]`` for output i.

    The chances are even, except for rows whose ``sizes`` are far above the mean: a few, at a front, may hold most of
    the loss.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    most: dict[int, int] = {}
    summed: dict[int, Tensor] = {}
    for key, size, s in zip(alike, sizes, counts(shapes, wanted), strict=True):
        most[key] = max(s, most.get(key, 0))
        summed[key] = size + summed.get(key, 0.0)
    drawn = {}
    for key, s in most.items():
        chance = chances(summed[key], s)
        S = systematic(chance, s, generator)
        drawn[key] = Chosen(sent(S, device), S, chance[S])
    return [drawn[key] for key in alike]


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


class TappedGraph:
    """The graph of a full batch with its taps, kept from the pass for the gradient: a sketch needs no other."""

    def __init__(self, objective: Objective) -> None:
        self._params = objective.parameters.params
        self._taps = Taps(self._params)
        self._kept: tuple[Evaluation, tuple[int, ...]] | None = None
        self._of_set = False

    def watch(self) -> AbstractContextManager[Any]:
        """Return new taps for each call of the closure, until one was given samples of a set."""
        if self._of_set:
            return nullcontext()
        self._taps = Taps(self._params)
        return self._taps

    def wanted(self, evaluation: Evaluation) -> Sequence[Tensor]:
        """Return the outputs of a full batch, which keeps the graph."""
        self._of_set = evaluation.aligned
        return evaluation.outputs if evaluation.loss.requires_grad and not self._of_set else ()

    def collect(self, evaluation: Evaluation, gradient: object, wanted: object) -> float:
        """Keep the graph of a full batch."""
        self._kept = None if self._of_set else (evaluation, self._version)
        return 0.0

    @property
    def _version(self) -> tuple[int, ...]:
        return tuple(p._version for p in self._params)

    def take(self) -> tuple[Evaluation, Taps] | None:
        """Return the graph and its taps, unless the parameters have moved since."""
        kept, self._kept = self._kept, None
        return (kept[0], self._taps) if kept is not None and kept[1] == self._version else None


class BatchRows:
    """Computes the Jacobian rows of micro-batches, and remembers what was learnt of the closure."""

    def __init__(self) -> None:
        self._writers: dict[tuple[int | None, Shapes], RowWriter] = {}
        self._kept = True  # activations are kept, not recomputed by checkpointing, which would lose the taps
        self.told_size = False  # the note on a sketch larger or smaller than wanted was given
        self.told_slow = False  # the note on a backward pass for each row was given

    @property
    def refuted(self) -> int:
        """The number of outputs whose rows take a backward pass each."""
        return sum(len(writer.refuted) for writer in self._writers.values()) + (not self._kept)

    @property
    def operations(self) -> set[str]:
        """The operations by which parameters are used outside of linear layers, of outputs whose rows are slow."""
        return set().union(*(writer.operations for writer in self._writers.values()))

    def part(
        self, objective: Objective, batch: Microbatch, wanted: int, seed: int, graph: TappedGraph | None = None
    ) -> Part:
        """Return about ``wanted`` rows of a micro-batch, sampled with ``seed``; ``graph`` is that of a full batch."""
        try:
            return self._rows_of(objective, batch, wanted, seed, graph)
        except CheckpointError:
            if not self._kept:
                raise
            self._kept = False
        # The retry is out here, where no reference keeps the first attempt's rows alive.
        return self._rows_of(objective, batch, wanted, seed, None)

    def _rows_of(
        self, objective: Objective, batch: Microbatch, wanted: int, seed: int, graph: TappedGraph | None
    ) -> Part:
        evaluation, taps = (graph.take() if graph else None) or self._tapped(objective, batch)
        shapes = shapes_of(evaluation)
        if evaluation.weight == 0:  # every term is masked
            nothing = objective.parameters.zeros()[:0]
            return Part(room(0, objective), nothing, nothing, 0.0, [], True, shapes)
        require_outputs(evaluation, "GaussNewtonFlow")
        _require_beside(objective.parameters.device, evaluation.outputs)
        writer = self._writers.setdefault((batch.samples, shapes), RowWriter())
        outputs = [z.reshape(1) if z.ndim == 0 else z for z in evaluation.outputs]
        alike = [writer.drawn_like(i, taps, z) if self._kept else i for i, z in enumerate(outputs)]
        sizes = _sizes(evaluation, shapes, wanted)
        chosen = choose(shapes, alike, sizes, wanted, seed, objective.parameters.params[0].device)
        signs = torch.Generator("cpu").manual_seed(seed + 1)
        all_roots = _roots(evaluation, chosen, widths(shapes, wanted, objective.parameters.numel), signs)
        found = []
        whole = True
        for i, (z, roots, drawn) in enumerate(zip(outputs, all_roots, chosen, strict=True)):
            if roots is None:
                continue
            S = drawn.rows
            whole &= len(S) == z.shape[0] and len(roots.u) in (0, math.prod(z.shape[1:]))
            scale = sent(drawn.chance.rsqrt(), roots.rho.device, roots.rho.dtype)
            u = roots.u * scale.reshape(1, -1, *(1,) * (roots.u.ndim - 2)).to(roots.u.dtype)
            if len(u):
                found.append((Wanted(i, z, S, drawn.known, u, evaluation.samples), roots.rho * scale))
        J = room(sum(rows.rows for rows, _ in found), objective)
        at = slow = 0
        for rows, _ in found:
            slow += writer.write(objective, taps if self._kept else None, rows, J[at : at + rows.rows])
            at += rows.rows
        rho = torch.cat([rho.detach().reshape(-1) for _, rho in found]) if found else J.new_zeros(0)
        reads = [(rows.output, rows.S, u.detach()) for rows, _ in found for u in rows.u]
        return Part(J, rho, _read(evaluation, reads).to(rho), evaluation.weight, reads, whole, shapes, slow)

    def _tapped(self, objective: Objective, batch: Microbatch) -> tuple[Evaluation, Taps]:
        taps = Taps(objective.parameters.params)
        return _evaluated(objective, batch, taps if self._kept else nullcontext()), taps

    def change(self, objective: Objective, batch: Microbatch, part: Part, evaluation: Evaluation) -> Tensor:
        """Return the change of one micro-batch's outputs; some closures drop outputs without a graph, and get one."""
        if shapes_of(evaluation) == part.shapes:
            return part.change(evaluation)
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
    shapes: Shapes
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


def _evaluated(
    objective: Objective,
    batch: Microbatch,
    inside: AbstractContextManager[Any] = nullcontext(),  # noqa: B008
) -> Evaluation:
    evaluation = objective.evaluate(batch, lambda: inside)
    objective.sample_gradients += FORWARD * evaluation.samples
    return evaluation


def _require_beside(device: torch.device, outputs: Sequence[Tensor]) -> None:
    """Refuse outputs on another device than the parameters."""
    for i, z in enumerate(outputs):
        if z.device != device:
            raise ValueError(
                f"GaussNewtonFlow needs residuals on the device of the parameters, {device}; output {i} of the closure "
                f"is on {z.device}. Compute them there, with the samples moved to {device}, or use KSD."
            )


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


def _sizes(evaluation: Evaluation, shapes: Shapes, wanted: int) -> list[Tensor]:
    """Return the sizes of all rows, or zeros if all rows are drawn."""
    if everything(shapes, wanted):
        return [torch.zeros(shape[0] if shape else 1, dtype=torch.float64, device="cpu") for shape in shapes]
    return sizes_of(evaluation)


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
