"""The Kronecker-factored preconditioner: D = F, a running average of the layerwise Gauss–Newton matrix.

Letters: F block-diagonal, with A ⊗ G for each layer (statistics.py) and a diagonal for other parameters;
τ the option, λ = τν tr F/P the damping; c the weight decay; n updates, e = min(memory, 1 − 1/n) the weight of the past.

Ranks: every rank has the sums over all ranks, by one reduce-scatter and one all-gather of all A and G. A rank inverts
the layers that its part of the vector overlaps. D⁻¹w gathers w.

The bound on memory follows from the parameters' shapes alone, which do not tell an embedding from a dense layer, nor
whether there is a bias. It counts every matrix as a dense layer with a bias, or beyond 4096 rows or columns as both a
diagonal and an embedding; every vector as a diagonal; and all inverses on every rank. The bound is close on one rank,
and far too high for embeddings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from krylov_descent.distributed import Comm, added, defer_error
from krylov_descent.layers.verify import Found, Trust, due
from krylov_descent.objective.closure import require_weight
from krylov_descent.objective.objective import Objective
from krylov_descent.preconditioners.interface import Preconditioner, Solve, Solved, nothing_gathered
from krylov_descent.preconditioners.kronecker_blocks import (
    AnyBlock,
    DiagonalBlock,
    DiagonalSums,
    FactoredBlock,
    FactorSums,
    LayerBlock,
    PulledBlock,
    Sums,
    inverted,
    traces,
)
from krylov_descent.preconditioners.statistics import LARGE, ParameterRole, ParameterRoles, PassOverSet, new_sums
from krylov_descent.samples.interface import Microbatch
from krylov_descent.stepping.gradient_pass import GradientPass
from krylov_descent.vectors.parameters import ParameterVector
from krylov_descent.vectors.products import numbers_of

_GATHERED = 3  # copies of the statistics while ranks are summed: the rank's own, flattened, the sums over ranks
_CHOLESKY = 3  # float64 copies of a matrix during its inversion


def kept_bytes(params: Sequence[Tensor], dtype: torch.dtype) -> int:
    """Return the bytes kept from step to step: A, G, their inverses, and diagonals.

    Example:
        >>> kept_bytes([torch.ones(3, 4), torch.ones(3)], torch.float32)  # 2 (5² + 3²) + 3 numbers
        284
    """
    return sum(sum(_numbers(p)) for p in params) * dtype.itemsize


def step_bytes(objective: Objective) -> int:
    """Return the peak bytes in a step: the old and the new state (a failed step keeps the old), and workspace."""
    params, dtype, comm = objective.parameters.params, objective.parameters.dtype, objective.comm
    kept = kept_bytes(params, dtype)
    statistics = sum(_numbers(p)[0] for p in params) * dtype.itemsize
    copies = _GATHERED if comm.ranks > 1 else 1
    largest = max((max(_sides(p)) + 1 for p in params if _is_matrix(p)), default=0)
    return max(kept + copies * statistics, 2 * kept + _CHOLESKY * 8 * largest**2)


def _numbers(p: Tensor) -> tuple[int, int]:
    """Return the sizes of a parameter's statistics and of its inverses."""
    rows, columns = _sides(p)
    if _is_matrix(p):
        both = (columns + 1) ** 2 + rows**2
        return both, both
    if p.ndim == 2 and columns <= LARGE:  # a diagonal, or an embedding with a diagonal A
        both = rows + columns**2
        return max(p.numel(), both), both
    return p.numel(), 0


def _is_matrix(p: Tensor) -> bool:
    return p.ndim > 1 and max(_sides(p)) <= LARGE


def _sides(p: Tensor) -> tuple[int, int]:
    rows = p.shape[0] if p.ndim > 1 else 1
    return rows, p.numel() // max(1, rows)


_STALE = 0.15  # inverses are recomputed when more than this part of the averages has been replaced
_LEAST = 0.05  # the factor of the damping without noise
_CHANGED = 1.2  # inverses are recomputed, too, when the damping has changed by this factor
_STAND_IN = (
    "The loss couples samples, or more than 64 outputs of a sample other than by softmax: the preconditioner uses the "
    "empirical Fisher matrix of per-sample gradients in place of the loss's curvature."
)


class KroneckerTrust(Trust):
    """Weights whose Σ δaᵀ equals the pull-back to them; ``updates`` counts this closure's updates of the factors."""

    def __init__(self) -> None:
        super().__init__()
        self.updates = 0


@dataclass(frozen=True, eq=False)
class KroneckerState:
    """The state that is kept over steps.

    Attributes:
        updates: n, the number of updates of the running means.
        age: the part of the means that has been replaced since the inverses were computed.
        damping: λ of the inverses.
        decay: Σc of the inverses.
        places: positions of the parameters among all, frozen ones included.
        blocks: the blocks by parameter index; a weight's block includes its bias.
    """

    updates: int = 0
    age: float = 0.0
    damping: float = 0.0
    decay: float = 0.0
    places: tuple[int, ...] = ()
    blocks: dict[int, AnyBlock] = field(default_factory=dict)

    def check(self, params: Sequence[Tensor]) -> None:
        """Require tensors no larger than those of any of these parameters.

        Raises:
            ValueError: one is larger.
        """
        widest = max((max(p.shape[0], p.numel() // max(1, p.shape[0])) for p in params if p.ndim), default=1) + 1
        longest = max(widest, *(p.numel() for p in params))
        for i, block in self.blocks.items():
            for x in (getattr(block, part.name) for part in fields(block)):
                if isinstance(x, Tensor) and (
                    max(x.shape, default=1) > (widest if x.ndim > 1 else longest) or x.ndim > 2
                ):
                    raise ValueError(
                        f"The state is one of another model: it has a factor {[*x.shape]} for parameter {i}. Build the "
                        "model as it was when it was saved."
                    )

    def of(self, parameters: ParameterVector) -> KroneckerState:
        """Return the state on these parameters' device; a new state if its places or shapes do not fit them."""
        params, blocks = parameters.params, self.blocks
        if list(self.places) != parameters.places[: len(self.places)]:
            return KroneckerState()  # other parameters are frozen now
        if any(not 0 <= i < len(params) or not block.belongs(i, params) for i, block in blocks.items()):
            return KroneckerState()
        placed = {i: block.placed(parameters.device, parameters.dtype) for i, block in sorted(blocks.items())}
        return replace(self, blocks=placed)


@dataclass(frozen=True, eq=False)
class Refreshed:
    """D⁻¹ or None, the state it was computed from, and a note for the report."""

    solve: Solve | None
    state: KroneckerState
    note: str = ""


@dataclass(frozen=True)
class Kronecker(Preconditioner):
    """Preconditions by the Kronecker-factored Gauss–Newton matrix (K-FAC) of dense, conv and embedding layers.

    Other matrices (those of nn.LSTM, of attention, of a network that is differentiated inside the closure) have factors
    from pull-backs to the matrix itself, all other parameters the diagonal of the Gauss–Newton matrix.

    Args:
        damping: τ; λ = τ tr F/P, the mean curvature times τ, is added to F. On growing sets, λ is scaled by the
            gradient noise: it rises, up to tenfold, where held-out samples confirm less than half of the last
            steps, and falls in proportion to the part of the samples that A leaves out, down to a twentieth.
        memory: the weight of the past in the running averages of the factors; smaller in the first updates.

    Example:
        >>> Kronecker(damping=1e-3)
        Kronecker(damping=0.001, memory=0.98)
    """

    name: ClassVar[str] = "kronecker"

    damping: float = 1e-2
    memory: float = 0.98

    def __post_init__(self) -> None:
        if not 0 < self.damping < math.inf:
            raise ValueError(f"Kronecker(damping={self.damping}): must be a positive number, 1e-2 for example.")
        if not 0 <= self.memory < 1:
            raise ValueError(f"Kronecker(memory={self.memory}): must be in [0, 1), 0.98 for example.")

    def init(self) -> Any:
        """Return a state without factors."""
        return KroneckerState()

    def solve(self, at: GradientPass, state: Any, noise: float) -> Solved:
        """Add the statistics of B, or of a part of it, to the factors and return D⁻¹."""
        found = self.refresh(at.objective, at.statistics, state, tuple(at.key), noise)
        notes = (found.note,) if found.note else ()
        if found.solve is None:
            return nothing_gathered(found.state, notes)
        return Solved(found.solve, found.state, self.name, notes)

    def bytes_in_step(self, objective: Objective) -> int:
        """Return the bytes of the old and new factors and their workspace."""
        return step_bytes(objective)

    def refresh(
        self,
        objective: Objective,
        batches: Sequence[Microbatch],
        state: KroneckerState,
        key: tuple[int, ...],
        noise: float = 1.0,
    ) -> Refreshed:
        """Add the statistics of B to the factors and return D⁻¹ with the new state. A collective.

        Args:
            objective: the objective whose parameters the factors belong to.
            batches: this rank's micro-batches of B, or of a part of it.
            state: the state of the last call; not modified.
            key: the seed of the random signs.
            noise: ν, the noise of the gradient, relative to that of a gradient that is half signal.

        Returns:
            D⁻¹, None if the closure gave only the loss or no curvature, and the new state. Statistics that are not
            finite are discarded.

        Raises:
            ValueError: parameters are spread over a mesh.
        """
        parameters = objective.parameters
        part(parameters, objective.comm)
        old = state.of(parameters)
        gathered = _gathered(objective, batches, old, key)
        if gathered is None:
            return Refreshed(None, state)
        fresh, note = gathered
        if not math.isfinite(sum(traces(x for block in fresh.values() for x in block.tensors()))):
            return Refreshed(*self._solver(objective, old, noise), note) if old.blocks else Refreshed(None, old, note)
        blocks, e = averaged(old.blocks, fresh, self.memory, old.updates + 1)
        age, places = 1 - (1 - old.age) * e, tuple(parameters.places)
        new = replace(old, updates=old.updates + 1, age=age, places=places, blocks=blocks)
        return Refreshed(*self._solver(objective, new, noise), note)

    def _solver(self, objective: Objective, state: KroneckerState, noise: float) -> tuple[Solve | None, KroneckerState]:
        """Return D⁻¹, None for a matrix of zeros or infinities, and the state with its stale inverses renewed."""
        parameters, comm = objective.parameters, objective.comm
        layers = {i: block for i, block in state.blocks.items() if isinstance(block, FactoredBlock)}
        read = iter(traces(x for block in state.blocks.values() for x in block.tensors()))
        known = {i: [next(read) for _ in block.tensors()] for i, block in state.blocks.items()}
        total = sum(math.prod(known[i]) for i in layers)
        total += math.fsum(known[i][0] for i in state.blocks if i not in layers)
        lam = self.damping * max(_LEAST, noise) * total / max(1, parameters.count)
        if not 0 < lam < math.inf:
            return None, state
        own = {i for i, block in layers.items() if overlaps(i, block, parameters, comm)}
        decay = sum(parameters.decay)
        stale = state.age > _STALE or not state.damping / _CHANGED < lam < state.damping * _CHANGED
        stale |= state.decay != decay
        missing = any(layers[i].inputs_inverse is None for i in own)
        if stale or float(comm.max(torch.tensor(float(missing), device="cpu"))):
            layers |= inverted({i: layers[i] for i in own}, {i: lam + parameters.decay[i] for i in own}, known)
            state = replace(state, age=0.0, damping=lam, decay=decay)
        # A checkpoint has the inverses of all ranks.
        layers = {i: block if i in own else block.without_inverses() for i, block in layers.items()}
        state = replace(state, blocks={**state.blocks, **layers})
        covered = len(layers) + sum(block.bias is not None for block in layers.values())
        rest = None if covered == len(parameters.params) else _diagonal(objective, state, lam)
        return solver(objective, layers, own, rest), state


def averaged(
    old: Mapping[int, AnyBlock], fresh: Mapping[int, AnyBlock], memory: float, n: int
) -> tuple[dict[int, AnyBlock], float]:
    """Return e·old + (1 − e)·fresh at update n, and the smallest e.

    A layer without calls keeps its block; a block of another kind or bias replaces the old one.
    """
    new, least = dict(old), memory
    for i, block in fresh.items():
        before = old.get(i)
        if before is None or not block.continues(before):
            new[i] = replace(block, begun=n)
            continue
        e = min(memory, 1 - 1 / (n - before.begun + 1))
        new[i], least = before.averaged(block, e), min(least, e)
    return dict(sorted(new.items())), least


def _gathered(
    objective: Objective, batches: Sequence[Microbatch], old: KroneckerState, key: Sequence[int]
) -> tuple[dict[int, AnyBlock], str] | None:
    """Return the blocks of these micro-batches, the same on all ranks, and a note; None without outputs."""
    comm, params = objective.comm, objective.parameters.params
    trust = objective.workspace.of(KroneckerTrust)
    trust.updates += 1
    again = due(trust.updates)
    alone = [i for i, block in old.blocks.items() if block.alone]
    taken = PassOverSet(objective, key, alone, () if again else trust.trusted)
    while True:
        failure = defer_error(comm, lambda: taken.run(batches))
        W = added(comm, taken.weight, failure)
        flags = torch.zeros(len(params) + 1, 2, dtype=torch.float64, device="cpu")
        flags[-1] = torch.tensor([not taken.available, taken.approximated], dtype=torch.float64)
        for i, role in taken.roles.items():
            flags[i] = torch.tensor(role.encoded(), dtype=torch.float64)
        flags = comm.max(flags)
        if float(flags[-1, 0]):
            return None
        roles = {i: ParameterRole.decoded(int(kind), int(j)) for i, (kind, j) in enumerate(flags[:-1].tolist()) if kind}
        refused = _contradicted(taken.roles, roles)
        several = comm.max(torch.tensor([float(i in refused) for i in range(len(params))], device="cpu"))
        if not bool(several.any()):
            break
        taken.refused |= {i for i, role in roles.items() if role.block.alone} | set(several.nonzero()[:, 0].tolist())
    require_weight(W)
    trust.learn(Found(taken.confirmed, taken.refused))
    return _shared(objective, taken.sums, roles, W), _STAND_IN if float(flags[-1, 1]) and again else ""


def _contradicted(own: ParameterRoles, agreed: ParameterRoles) -> set[int]:
    """Return the parameters to which another rank gave another role; a bias together with its weight."""
    different = {i for i, role in own.items() if agreed[i] != role}
    return different | {j for i in different if (j := own[i].bias_of) is not None}


def _shared(objective: Objective, sums: dict[int, Sums], roles: ParameterRoles, W: float) -> dict[int, AnyBlock]:
    """Return the blocks from the statistics of all ranks."""
    comm, parameters = objective.comm, objective.parameters
    owners = [i for i in sorted(roles) if roles[i].bias_of is None]
    if comm.ranks > 1:
        every = {i: new_sums(i, roles, parameters) for i in owners}
        tensors = [x for i in owners for x in every[i].tensors()]
        mine = [x for i in owners for x in (sums.pop(i) if i in sums else every[i]).tensors()]
        flat = torch.cat([x.reshape(-1) for x in mine])
        del mine
        flat = comm.all_gather(comm.reduce_scatter(flat, exact=True), len(flat))
        for into, x in zip(tensors, torch.split(flat, [x.numel() for x in tensors]), strict=True):
            into.copy_(x.view_as(into))
        sums = every
    biases = {role.bias_of: i for i, role in roles.items() if role.bias_of is not None}
    factored = {i: summed for i in owners if isinstance(summed := sums.get(i), FactorSums)}
    calls = dict(zip(factored, numbers_of([summed.calls for summed in factored.values()]), strict=True))
    found: dict[int, AnyBlock | None] = {}
    for i in owners:
        block, of_block = roles[i].block, sums.get(i)
        if isinstance(of_block, DiagonalSums):
            found[i] = DiagonalBlock.mean(of_block, W)
        elif isinstance(of_block, FactorSums) and issubclass(block, LayerBlock):
            found[i] = block.mean(of_block, W, biases.get(i), calls[i])
        elif isinstance(of_block, FactorSums):
            found[i] = PulledBlock.mean(of_block, W)
    return {i: block for i, block in found.items() if block is not None}


def solver(
    objective: Objective, layers: Mapping[int, FactoredBlock], own: Collection[int], diagonal: Tensor | None
) -> Solve:
    """Return w [P_local] → D⁻¹w [P_local].

    Args:
        objective: the objective that gives the layout of vectors.
        layers: blocks of layers.
        own: indices of the blocks with inverses, which overlap this rank's part.
        diagonal: D⁻¹ of all other parameters [P_local], whose entries for layers are ignored; None without others.
    """
    parameters, comm = objective.parameters, objective.comm
    starts, (start, stop) = offsets(parameters), part(parameters, comm)

    def write(out: Tensor, i: int, x: Tensor) -> None:
        first, last = max(start, starts[i]), min(stop, starts[i + 1])
        if first < last:
            out[first - start : last - start] = x.reshape(-1)[first - starts[i] : last - starts[i]]

    def apply(w: Tensor) -> Tensor:
        out = torch.zeros_like(w) if diagonal is None else w * diagonal
        whole = comm.all_gather(w, parameters.numel) if layers else w
        for i in own:
            block = layers[i]
            j = block.bias
            b = None if j is None else whole[starts[j] : starts[j + 1]]
            X, x = block.solved(whole[starts[i] : starts[i + 1]], b)
            write(out, i, X)
            if j is not None and x is not None:
                write(out, j, x)
        return out

    return apply


def _diagonal(objective: Objective, state: KroneckerState, lam: float) -> Tensor:
    """Return 1 / (diagonal + λ + c), this rank's part [P_local]; its entries for layers are ignored."""
    parameters = objective.parameters
    D = parameters.zeros()
    for i, (into, c) in enumerate(zip(parameters.views(D), parameters.decay, strict=True)):
        into.fill_(lam + c)
        if isinstance(block := state.blocks.get(i), DiagonalBlock):
            into.add_(block.diagonal.view_as(into))
    return objective.comm.shard(D.reciprocal_())


def offsets(parameters: ParameterVector) -> list[int]:
    """Return the start of each parameter in a vector [P], and the end of the last."""
    return [0, *itertools.accumulate(parameters.sizes)]


def part(parameters: ParameterVector, comm: Comm) -> tuple[int, int]:
    """Return the start and end of this rank's part, with its padding beyond P.

    Raises:
        ValueError: parameters are spread over a mesh.
    """
    bounds = comm.bounds(parameters.numel)
    if bounds is None:
        raise ValueError(
            "preconditioner='kronecker' cannot be used with parameters on a mesh (DTensor): no rank has a whole layer. "
            "Use preconditioner='fisher', or plain parameters with process_group=..., where every rank has a copy."
        )
    return bounds


def overlaps(i: int, block: FactoredBlock, parameters: ParameterVector, comm: Comm) -> bool:
    """Whether a layer overlaps this rank's part."""
    starts, (start, stop) = offsets(parameters), part(parameters, comm)
    indices = [i] if block.bias is None else [i, block.bias]
    return any(max(start, starts[j]) < min(stop, starts[j + 1]) for j in indices)
