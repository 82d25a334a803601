"""The Kronecker-factored preconditioner: D = F, a running average of the layerwise Gauss–Newton matrix.

Letters: F block-diagonal, with A ⊗ G for each layer (statistics.py) and a diagonal for other parameters;
τ the option, λ = τν tr F/P the damping; c the weight decay; n updates, e = min(memory, 1 − 1/n) the weight of the past.

Ranks: each parameter has an owner, the rank that holds, inverts and saves its block (the bias of a layer goes with the
weight). Statistics reach the owners by one reduce-scatter. D⁻¹w gathers w; owners solve for their layers, and a
reduce-scatter gives every rank its part.

The bound on memory follows from the parameters' shapes alone, which do not tell an embedding from a dense layer, nor
whether there is a bias. It counts every matrix as a dense layer with a bias, or beyond 4096 rows or columns as both a
diagonal and an embedding; and every vector as a diagonal. The bound is close for dense and convolutional layers, and
far too high for embeddings. Owners are chosen by the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from krylov_descent.distributed import Comm, added, defer_error, stacked
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

_GATHERED = 2  # copies of the statistics while ranks are summed: the rank's own, flattened
_CHOLESKY = 3  # float64 copies of a matrix during its inversion


def kept_bytes(params: Sequence[Tensor], dtype: torch.dtype, ranks: int = 1) -> int:
    """Return the bytes kept from step to step, the most of any rank: A, G, their inverses, and diagonals.

    Example:
        >>> kept_bytes([torch.ones(3, 4), torch.ones(3)], torch.float32)  # 2 (5² + 3²) + 3 numbers
        284
    """
    owned = [0] * ranks
    for p, owner in zip(params, owners(params, ranks), strict=True):
        owned[owner] += sum(_numbers(p))
    return max(owned) * dtype.itemsize


def step_bytes(objective: Objective) -> int:
    """Return the peak bytes in a step, the most of any rank.

    There are the old and the new state, as a failed step keeps the old, and workspace. Each rank passes over its
    samples with all layers: the statistics are whole until the ranks are summed.
    """
    params, dtype, ranks = objective.parameters.params, objective.parameters.dtype, objective.comm.ranks
    kept = kept_bytes(params, dtype, ranks)
    statistics = sum(_numbers(p)[0] for p in params) * dtype.itemsize
    copies = _GATHERED if ranks > 1 else 1
    largest = max((max(_sides(p)) + 1 for p in params if _is_matrix(p)), default=0)
    return max(kept + copies * statistics, 2 * kept + _CHOLESKY * 8 * largest**2)


def owners(params: Sequence[Tensor], ranks: int) -> list[int]:
    """Return the rank that owns each parameter: the largest first, each goes to the rank that owns the least.

    Example:
        >>> owners([torch.ones(3, 3), torch.ones(8, 8), torch.ones(3), torch.ones(5, 5)], 2)
        [1, 0, 1, 1]
    """
    sizes = [sum(_numbers(p)) for p in params]
    owned, found = [0] * ranks, [0] * len(params)
    for i in sorted(range(len(params)), key=lambda i: (-sizes[i], i)):
        found[i] = owned.index(min(owned))
        owned[found[i]] += sizes[i]
    return found


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
        blocks: this rank's blocks by parameter index; a weight's block includes its bias.
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

    def of(self, parameters: ParameterVector, comm: Comm) -> KroneckerState:
        """Return the state of this rank on these parameters' device; a new state if it does not fit them.

        One that was loaded has the blocks of all ranks.
        """
        params, blocks = parameters.params, self.blocks
        if list(self.places) != parameters.places[: len(self.places)]:
            return KroneckerState()  # other parameters are frozen now
        if any(not 0 <= i < len(params) or not block.belongs(i, params) for i, block in blocks.items()):
            return KroneckerState()
        owner = owners(params, comm.ranks)
        own = {i: block for i, block in sorted(blocks.items()) if owner[i] == comm.rank}
        return replace(self, blocks={i: b.placed(parameters.device, parameters.dtype) for i, b in own.items()})


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
        damping: τ; λ = τ tr F/P, the mean curvature times τ, is added to F. On growing sets, λ falls in
            proportion to the part of the samples that A leaves out, down to a twentieth.
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

    def bytes_held(self, objective: Objective) -> int:
        """Return the bytes of the old and new factors."""
        parameters = objective.parameters
        return 2 * kept_bytes(parameters.params, parameters.dtype, objective.comm.ranks)

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
            noise: ν, the noise of the gradient: 1 if A is a small part of all samples, 0 if it is all.

        Returns:
            D⁻¹, None if the closure gave only the loss or no curvature, and the new state. Statistics that are not
            finite are discarded.

        Raises:
            ValueError: parameters are spread over a mesh.
        """
        parameters, comm = objective.parameters, objective.comm
        _refuse_mesh(parameters, comm)
        old = state.of(parameters, comm)
        gathered = _gathered(objective, batches, old, key)
        if gathered is None:
            return Refreshed(None, state)
        fresh, note = gathered
        size = sum(traces(x for block in fresh.values() for x in block.tensors()))
        blocks, e = averaged(old.blocks, fresh, self.memory, old.updates + 1)
        of_ranks = stacked(comm, torch.tensor([size, e], dtype=torch.float64, device="cpu"))
        if not bool(of_ranks.isfinite().all()):
            return Refreshed(*self._solver(objective, old, noise), note) if old.updates else Refreshed(None, old, note)
        e = float(of_ranks[:, 1].min())
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
        missing = any(block.inputs_inverse is None for block in layers.values())
        of_ranks = stacked(comm, torch.tensor([total, missing], dtype=torch.float64, device="cpu"))
        lam = self.damping * max(_LEAST, noise) * math.fsum(of_ranks[:, 0].tolist()) / max(1, parameters.count)
        if not 0 < lam < math.inf:
            return None, state
        decay = sum(parameters.decay)
        stale = state.age > _STALE or not state.damping / _CHANGED < lam < state.damping * _CHANGED
        if stale or state.decay != decay or bool(of_ranks[:, 1].any()):
            layers = inverted(layers, {i: lam + parameters.decay[i] for i in layers}, known)
            state = replace(state, age=0.0, damping=lam, decay=decay, blocks={**state.blocks, **layers})
        return solver(objective, layers, _rest(objective, state, lam)), state


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
    """Return this rank's blocks of all ranks' micro-batches, and a note; None without outputs."""
    comm, params = objective.comm, objective.parameters.params
    trust = objective.workspace.of(KroneckerTrust)
    trust.updates += 1
    again = due(trust.updates)
    alone = torch.tensor([float(i in old.blocks and old.blocks[i].alone) for i in range(len(params))], device="cpu")
    refused = comm.max(alone).nonzero()[:, 0].tolist()
    taken = PassOverSet(objective, key, refused, () if again else trust.trusted)
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
        against = _contradicted(taken.roles, roles)
        several = comm.max(torch.tensor([float(i in against) for i in range(len(params))], device="cpu"))
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
    """Return this rank's blocks from the statistics of all ranks."""
    comm, parameters = objective.comm, objective.parameters
    owner = owners(parameters.params, comm.ranks)
    known = [i for i in sorted(roles, key=lambda i: (owner[i], i)) if roles[i].bias_of is None]
    if comm.ranks > 1 and known:
        sums = _scattered(comm, {i: sums.pop(i) if i in sums else new_sums(i, roles, parameters) for i in known}, owner)
    biases = {role.bias_of: i for i, role in roles.items() if role.bias_of is not None}
    factored = {i: of_block for i in known if isinstance(of_block := sums.get(i), FactorSums)}
    calls = dict(zip(factored, numbers_of([of_block.calls for of_block in factored.values()]), strict=True))
    found: dict[int, AnyBlock | None] = {}
    for i in known:
        block, of_block = roles[i].block, sums.get(i)
        if isinstance(of_block, DiagonalSums):
            found[i] = DiagonalBlock.mean(of_block, W)
        elif isinstance(of_block, FactorSums) and issubclass(block, LayerBlock):
            found[i] = block.mean(of_block, W, biases.get(i), calls[i])
        elif isinstance(of_block, FactorSums):
            found[i] = PulledBlock.mean(of_block, W)
    return {i: block for i, block in found.items() if block is not None}


def _scattered(comm: Comm, sums: dict[int, Sums], owner: Sequence[int]) -> dict[int, Sums]:
    """Return the sums over ranks of this rank's blocks; the argument, in the order of owners, is emptied."""
    numbers = [0] * comm.ranks
    for i, of_block in sums.items():
        numbers[owner[i]] += sum(x.numel() for x in of_block.tensors())
    own = {i: of_block for i, of_block in sums.items() if owner[i] == comm.rank}
    flat = torch.cat([x.reshape(-1) for of_block in sums.values() for x in of_block.tensors()])
    sums.clear()
    flat = comm.reduce_scatter(flat, exact=True, sizes=numbers)
    tensors = [x for of_block in own.values() for x in of_block.tensors()]
    for into, x in zip(tensors, torch.split(flat, [x.numel() for x in tensors]), strict=True):
        into.copy_(x.view_as(into))
    return own


def solver(objective: Objective, layers: Mapping[int, FactoredBlock], rest: Mapping[int, Tensor]) -> Solve:
    """Return w [P_local] → D⁻¹w [P_local].

    Args:
        objective: the objective that gives the layout of vectors.
        layers: this rank's layers, with inverses.
        rest: D⁻¹ of this rank's other parameters, which broadcasts.
    """
    parameters, comm = objective.parameters, objective.comm

    def apply(w: Tensor) -> Tensor:
        whole = comm.all_gather(w, parameters.numel)
        solved = torch.zeros_like(whole)
        given, found = torch.split(whole, parameters.sizes), torch.split(solved, parameters.sizes)
        for i, inverse in rest.items():
            torch.mul(given[i], inverse, out=found[i])
        for i, block in layers.items():
            j = block.bias
            X, x = block.solved(given[i], None if j is None else given[j])
            found[i].copy_(X.reshape(-1))
            if j is not None and x is not None:
                found[j].copy_(x)
        return comm.reduce_scatter(solved, exact=True)

    return apply


def _rest(objective: Objective, state: KroneckerState, lam: float) -> dict[int, Tensor]:
    """Return 1 / (diagonal + λ + c) of this rank's parameters outside of layers; without a block, 1 / (λ + c)."""
    parameters, comm = objective.parameters, objective.comm
    indices = range(len(parameters.params))
    biases = {block.bias for block in state.blocks.values() if isinstance(block, FactoredBlock)}
    blocks = comm.max(torch.tensor([2.0 * (i in biases) or float(i in state.blocks) for i in indices], device="cpu"))
    rest = {}
    for i, owner in enumerate(owners(parameters.params, comm.ranks)):
        block = state.blocks.get(i)
        D = parameters.local[i].detach().new_full((), lam + parameters.decay[i], dtype=parameters.dtype)
        if isinstance(block, DiagonalBlock) and blocks[i] < 2:
            rest[i] = (D + block.diagonal).reciprocal_()
        elif owner == comm.rank and not blocks[i]:
            rest[i] = D.reciprocal()
    return rest


def _refuse_mesh(parameters: ParameterVector, comm: Comm) -> None:
    if comm.bounds(parameters.numel) is None:
        raise ValueError(
            "preconditioner='kronecker' cannot be used with parameters on a mesh (DTensor): no rank has a whole layer. "
            "Use preconditioner='fisher', or plain parameters with process_group=..., where every rank has a copy."
        )
