"""The Kronecker-factored preconditioner: D⁻¹ = F⁻¹ of a Gauss–Newton matrix that sees layers, remembered over steps.

Letters: F ≈ block-diagonal of A ⊗ G for each layer (statistics.py) and of a diagonal for other parameters;
τ the option, λ = τν tr F/P the damping; c the weight decay; n updates, e = min(memory, 1 − 1/n) the weight of the past.

Ranks: sums of all ranks are on each of them, by one reduce-scatter and one all-gather of as many numbers as there are
in all A and G. Inverses are computed where a rank's part of the vector overlaps the layer. D⁻¹w gathers w.

Memory is bounded from above by the parameters' shapes alone, which do not tell an embedding from a dense layer, nor
whether there is a bias: every matrix is counted as a dense layer with a bias, or beyond 4096 rows or columns as a
diagonal and an embedding at once, every vector as a diagonal, every rank as one that needs all inverses. That is little
too much on one rank, and far too much for embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krylov_descent.distributed import added, attempt
from krylov_descent.objective.closure import require_weight
from krylov_descent.objective.objective import Objective
from krylov_descent.preconditioners.kronecker_blocks import (
    Factors,
    averaged,
    blocks_of,
    damped_inverses,
    factors_of,
    number,
    overlaps,
    part,
    scalar,
    shapes_of,
    solver,
    trace,
)
from krylov_descent.preconditioners.statistics import BIAS, LARGE, PULLED, PassOverSet, Role, Roles, Sums
from krylov_descent.samples.subsets import Microbatch

_GATHERED = 3  # copies of the statistics while ranks add theirs: their own, those in one piece, those of all ranks
_CHOLESKY = 3  # copies, in float64, of a matrix that is inverted


def kept_bytes(params: Sequence[Tensor], dtype: torch.dtype) -> int:
    """What is remembered from step to step: A, G and their inverses, and diagonals.

    Example:
        >>> kept_bytes([torch.ones(3, 4), torch.ones(3)], torch.float32)  # 2 (5² + 3²) + 3 numbers
        284
    """
    return sum(sum(_numbers(p)) for p in params) * dtype.itemsize


def step_bytes(objective: Objective) -> int:
    """What there is of that in a step: the old and the new, since a step that fails leaves the old; and workspace."""
    params, dtype, comm = objective.parameters.params, objective.parameters.dtype, objective.comm
    kept = kept_bytes(params, dtype)
    statistics = sum(_numbers(p)[0] for p in params) * dtype.itemsize
    copies = _GATHERED if comm.ranks > 1 else 1
    largest = max((max(_sides(p)) + 1 for p in params if _is_matrix(p)), default=0)
    return max(kept + copies * statistics, 2 * kept + _CHOLESKY * 8 * largest**2)


def _numbers(p: Tensor) -> tuple[int, int]:
    """Of a parameter's statistics, and of its inverses."""
    rows, columns = _sides(p)
    if _is_matrix(p):
        both = (columns + 1) ** 2 + rows**2
        return both, both
    if p.ndim == 2 and columns <= LARGE:  # a diagonal, or an embedding, of which A alone is one
        both = rows + columns**2
        return max(p.numel(), both), both
    return p.numel(), 0


def _is_matrix(p: Tensor) -> bool:
    return p.ndim > 1 and max(_sides(p)) <= LARGE


def _sides(p: Tensor) -> tuple[int, int]:
    rows = p.shape[0] if p.ndim > 1 else 1
    return rows, p.numel() // max(1, rows)


__all__ = ["Factors", "Kronecker", "KroneckerPreconditioner"]

_STALE = 0.15  # inverses are made anew when more than this part of the averages has been replaced
_LEAST = 0.05  # of λ, where there is no noise
_CHANGED = 1.2  # or when the damping has changed by this factor
_STAND_IN = (
    "The loss couples samples, or more than 64 outputs of one in another way than softmax: in the preconditioner the "
    "gradients of samples stand for its curvature (the empirical Fisher matrix)."
)


@dataclass(frozen=True)
class Kronecker:
    """The Kronecker-factored Gauss–Newton matrix (K-FAC) of dense, convolutional and embedding layers.

    Other matrices (those of nn.LSTM, of attention, of a network that is differentiated inside the closure) have factors
    from pull-backs to the matrix itself, all other parameters the diagonal of the Gauss–Newton matrix.

    Args:
        damping: τ; λ = τ tr F/P, the mean curvature times τ, is added to F. On sets that grow, λ follows the noise
            that it guards against: it rises, up to tenfold, where other samples confirm less than half of the last
            steps, and falls in proportion to the part of the samples that A leaves out, down to a twentieth.
        memory: the weight of the past in the running averages of the factors; smaller while they are young.

    Example:
        >>> Kronecker(damping=1e-3)
        Kronecker(damping=0.001, memory=0.98)
    """

    damping: float = 1e-2
    memory: float = 0.98

    def __post_init__(self) -> None:
        if not 0 < self.damping < math.inf:
            raise ValueError(f"Kronecker(damping={self.damping}): must be a positive number, 1e-2 for example.")
        if not 0 <= self.memory < 1:
            raise ValueError(f"Kronecker(memory={self.memory}): must be in [0, 1), 0.98 for example.")

    def prepare(self) -> KroneckerPreconditioner:
        """For one optimizer: what works by these options."""
        return KroneckerPreconditioner(self)


class KroneckerPreconditioner:
    """The Kronecker-factored Gauss–Newton matrix, for one optimizer; ``note`` is what a report should say of it."""

    name = "kronecker"

    def __init__(self, options: Kronecker) -> None:
        self._options = options
        self._judged: tuple[object, ...] = ()
        self.note = ""

    def refresh(
        self,
        objective: Objective,
        batches: Sequence[Microbatch],
        factors: Factors | None,
        key: tuple[int, ...],
        noise: float = 1.0,
    ) -> tuple[Callable[[Tensor], Tensor] | None, Factors]:
        """The factors with the statistics of B added, and D⁻¹ from them. A collective.

        Args:
            objective: what is evaluated; its parameters are those of the factors.
            batches: this rank's micro-batches of B, or of a part of it.
            factors: what the last call returned, or None at first; left as it is.
            key: seeds the random signs.
            noise: ν, of the gradient, relative to that of which one half is signal.

        Returns:
            w [P_local] → D⁻¹w [P_local], or None where the closure gave only the loss, or no curvature; and the new
            factors. Statistics that are not finite are not taken in.

        Raises:
            ValueError: parameters are spread over a mesh.
        """
        parameters = objective.parameters
        part(parameters, objective.comm)
        self.note = ""
        old = factors_of(factors or {}, parameters)
        n = int(number(old, "updates")) + 1
        gathered = self._gathered(objective, batches, old, key, n)
        if gathered is None:
            return None, factors or {}
        roles, fresh = gathered
        if not math.isfinite(sum(trace(x) for x in fresh.values() if x.ndim)):
            if not old:
                return None, {}
            return self._solver(objective, old, noise)
        new, e = averaged(old, fresh, roles, self._options.memory, n)
        new["updates"] = scalar(n)
        new["places"] = torch.tensor(parameters.places, dtype=parameters.dtype, device=parameters.device)
        new["age"] = scalar(1 - (1 - number(old, "age")) * e)
        return self._solver(objective, new, noise)

    def _gathered(
        self, objective: Objective, batches: Sequence[Microbatch], old: Factors, key: Sequence[int], n: int
    ) -> tuple[Roles, Sums] | None:
        """Roles and statistics, the same on all ranks; None without outputs.

        Rules are compared with the pull-back at n = 1, 4, 16, … and where the closure is another one.
        """
        comm, params = objective.comm, objective.parameters.params
        judging = (objective.identity, *map(id, params))
        due = n & (n - 1) == 0 and n.bit_length() % 2 == 1
        judged = () if due or judging != self._judged else [i for i in range(len(params)) if f"{i}.inputs" in old]
        alone = [i for i in range(len(params)) if f"{i}.diagonal" in old or f"{i}.pulled" in old]
        taken = PassOverSet(objective, key, alone, judged)
        while True:
            failure = attempt(comm, lambda: taken.run(batches))
            W = added(comm, taken.weight, failure)
            flags = torch.zeros(len(params) + 1, 2, dtype=torch.float64, device="cpu")
            flags[-1] = torch.tensor([not taken.available, taken.approximated], dtype=torch.float64)
            for i, role in taken.roles.items():
                flags[i] = torch.tensor([role.kind, role.weight + 1.0])
            flags = comm.max(flags)
            if float(flags[-1, 0]):
                return None
            roles = {i: Role(int(k), int(w) - 1) for i, (k, w) in enumerate(flags[:-1].tolist()) if k}
            refused = _contradicted(taken.roles, roles)
            several = comm.max(torch.tensor([float(i in refused) for i in range(len(params))], device="cpu"))
            if not bool(several.any()):
                break
            taken.refused |= {i for i, r in roles.items() if r.kind >= PULLED} | set(several.nonzero()[:, 0].tolist())
        require_weight(W)
        self.note = _STAND_IN if float(flags[-1, 1]) and (due or judging != self._judged) else ""
        self._judged = judging
        return roles, _shared(objective, taken.sums, roles, W)

    def _solver(
        self, objective: Objective, factors: dict[str, Tensor], noise: float
    ) -> tuple[Callable[[Tensor], Tensor] | None, Factors]:
        """D⁻¹, None for a matrix of zeros or infinities; and the factors, with new inverses where those are old."""
        parameters, comm = objective.parameters, objective.comm
        blocks = blocks_of(factors)
        total = sum(trace(factors[f"{b.weight}.inputs"]) * trace(factors[f"{b.weight}.outputs"]) for b in blocks)
        total += math.fsum(trace(x) for name, x in factors.items() if name.endswith(".diagonal"))  # in any order
        lam = self._options.damping * max(_LEAST, noise) * total / parameters.count
        if not 0 < lam < math.inf:
            return None, factors
        own = [block for block in blocks if overlaps(block, parameters, comm)]
        others = {f"{b.weight}.{side}_inverse" for b in blocks if b not in own for side in ("inputs", "outputs")}
        factors = {name: x for name, x in factors.items() if name not in others}  # a checkpoint has those of all ranks
        past = number(factors, "damping")
        decay = sum(parameters.decay)
        stale = number(factors, "age") > _STALE or not past / _CHANGED < lam < past * _CHANGED
        stale |= number(factors, "decay") != decay
        missing = any(f"{block.weight}.inputs_inverse" not in factors for block in own)
        if stale or float(comm.max(torch.tensor(float(missing), device="cpu"))):
            factors = {name: x for name, x in factors.items() if not name.endswith("_inverse")}
            for block in own:
                i = block.weight
                A, G = factors[f"{i}.inputs"], factors[f"{i}.outputs"]
                A, G = damped_inverses(A, G, lam + parameters.decay[i])
                factors |= {f"{i}.inputs_inverse": A, f"{i}.outputs_inverse": G}
            factors |= {"age": scalar(0.0), "damping": scalar(lam), "decay": scalar(decay)}
        inverses = {
            i: (factors[f"{i}.inputs_inverse"], factors[f"{i}.outputs_inverse"]) for i in (b.weight for b in own)
        }
        in_layers = {b.weight for b in blocks} | {b.bias for b in blocks}
        rest = any(i not in in_layers for i in range(len(parameters.params)))
        return solver(parameters, comm, blocks, inverses, _diagonal(objective, factors, lam) if rest else None), factors

    def __getstate__(self) -> dict[str, Any]:
        # A copy is of other parameters.
        return {"_options": self._options, "_judged": (), "note": ""}


def _diagonal(objective: Objective, factors: Factors, lam: float) -> Tensor:
    """1 / (diagonal + λ + c), this rank's part [P_local]; what stands in place of layers is not used."""
    parameters = objective.parameters
    D = parameters.zeros()
    for i, (into, c) in enumerate(zip(parameters.views(D), parameters.decay, strict=True)):
        into.fill_(lam + c)
        if f"{i}.diagonal" in factors:
            into.add_(factors[f"{i}.diagonal"].view_as(into))
    return objective.comm.shard(D.reciprocal_())


def _contradicted(own: Roles, agreed: Roles) -> set[int]:
    """Parameters that other ranks found another role for; a bias and its weight together."""
    different = {i for i, role in own.items() if agreed[i] != role}
    return different | {own[i].weight for i in different if own[i].kind == BIAS}


def _shared(objective: Objective, sums: Sums, roles: Roles, W: float) -> Sums:
    """The statistics of all ranks: G and diagonals over W, A over the weight of what called the layer, or its trace."""
    comm, parameters = objective.comm, objective.parameters
    shapes = shapes_of(roles, parameters.params)
    if comm.ranks > 1:
        sizes = [math.prod(shape) for shape in shapes.values()]
        flat = torch.zeros(sum(sizes), dtype=parameters.dtype, device=parameters.device)
        for name, into in zip(shapes, torch.split(flat, sizes), strict=True):
            if name in sums:
                into.copy_(sums.pop(name).reshape(-1))
        flat = comm.all_gather(comm.reduce_scatter(flat, exact=True), len(flat))
        # Tensors of their own: a view that is kept, or saved, would take all of them along.
        sums = {name: x.view(shapes[name]).clone() for name, x in zip(shapes, torch.split(flat, sizes), strict=True)}
    found: Sums = {}
    for name in shapes:
        i, _, what = name.partition(".")
        if what == "diagonal":
            found[name] = sums[name].div_(W)
        elif what == "pulled":
            A = sums[f"{i}.inputs"]
            found |= {f"{i}.inputs": A.div_(trace(A) or 1.0), f"{i}.outputs": sums[f"{i}.outputs"].div_(W)}
        elif what == "calls" and (weight := float(sums.get(name, 0.0))) > 0:
            found |= {f"{i}.inputs": sums[f"{i}.inputs"].div_(weight), f"{i}.outputs": sums[f"{i}.outputs"].div_(W)}
    return found
