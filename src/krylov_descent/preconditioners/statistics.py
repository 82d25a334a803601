"""Statistics of a set for the Kronecker-factored Gauss–Newton matrix (K-FAC, expand).

Letters: aᵢₜ a layer's input (with a 1 for the bias) at position t of sample i; u a random root of the loss's Hessian
(curvature/output_roots.py), δᵢₜ its pull-back to the layer's output; A = mean of aᵢₜaᵢₜᵀ over samples and positions,
G = Σ δᵢₜδᵢₜᵀ of a mean loss. A ⊗ G approximates the layer's block Σ (aaᵀ ⊗ δδᵀ) of the Gauss–Newton matrix, by
averaging its two parts separately. Over micro-batches b, both are means with weights w_b.

Layers with factors are those of layers/calls.py. Further calls of a layer count as further positions. For every other
parameter, the pull-back X of u to the parameter itself approximates its block E[vec X vec Xᵀ]:
- a matrix [out, in] (recurrent layers, attention, grouped convolutions): G = E[XXᵀ], A = E[XᵀX]/E[tr XᵀX]. A ⊗ G has
  the trace of the block and, unlike a diagonal, the curvature common to rows or columns (Gupta, Koren & Singer 2018
  use the same two matrices of gradients);
- a vector (norms), or a matrix with more than 4096 rows or columns: the diagonal, E[X∘X].
These other parameters include a weight shared by layers of different kinds or with different biases, a layer with only
its bias trained, and a weight used outside of recorded calls (x @ W, a network differentiated inside the closure). The
last case is detected by comparing Σ δᵢₜaᵢₜᵀ with the pull-back to the weight itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krylov_descent.curvature.errors import explain_missing_second_derivative
from krylov_descent.curvature.output_roots import random_roots
from krylov_descent.layers.calls import LayerCall, Recorder, merged
from krylov_descent.layers.rules import Convolution
from krylov_descent.layers.verify import Found, compared, tolerance
from krylov_descent.objective.closure import require_attached, require_outputs
from krylov_descent.objective.objective import GRADIENT, Objective
from krylov_descent.preconditioners.kronecker_blocks import (
    AnyBlock,
    DiagonalBlock,
    DiagonalSums,
    FactorSums,
    LayerBlock,
    PulledBlock,
    Sums,
    TableBlock,
)
from krylov_descent.samples.interface import Microbatch
from krylov_descent.vectors.parameters import ParameterVector
from krylov_descent.vectors.products import numbers_of

LARGE = 4096  # rows or columns of a matrix outside of layers, beyond which it has a diagonal block

#: The last of these wins where ranks disagree about a parameter; "bias of a layer" comes before them all.
BLOCKS: tuple[type[LayerBlock | PulledBlock | DiagonalBlock], ...] = (
    LayerBlock,
    TableBlock,
    PulledBlock,
    DiagonalBlock,
)


@dataclass(frozen=True)
class ParameterRole:
    """The block of a parameter: its own, or for a bias that of the weight with the index ``bias_of``."""

    block: type[AnyBlock]
    bias_of: int | None = None

    def encoded(self) -> tuple[int, int]:
        """Return the role as two numbers for other ranks, the first positive."""
        return (1, self.bias_of + 1) if self.bias_of is not None else (2 + BLOCKS.index(self.block), 0)

    @classmethod
    def decoded(cls, kind: int, bias_of: int) -> ParameterRole:
        """Return the role that these numbers encode."""
        return cls(LayerBlock, bias_of - 1) if kind == 1 else cls(BLOCKS[kind - 2])


ParameterRoles = dict[int, ParameterRole]
"""The roles of known parameters by index."""


def new_sums(i: int, roles: ParameterRoles, parameters: ParameterVector) -> Sums:
    """Return zero sums for parameter i, which has a block of its own."""
    biased = any(role.bias_of == i for role in roles.values())
    return roles[i].block.sums(parameters.params[i], biased, parameters.dtype)


class PassOverSet:
    """Gathers the statistics of this rank's micro-batches.

    Args:
        objective: the objective to evaluate.
        key: the seed of the signs.
        refused: parameters whose layer calls are ignored.
        trusted: weights whose Σ δaᵀ need not be compared with the pull-back.

    Attributes:
        roles: the role of each parameter.
        weight: Σ w_b.
        sums: the sums of the statistics, by the index of the parameter with the block.
        available: whether the closure gave outputs.
        approximated: whether per-sample gradients replace the curvature of the loss (curvature/output_roots.py).
        refused: the argument, and the parameters refused since.
        confirmed: weights whose Σ δaᵀ equals the pull-back.
    """

    def __init__(
        self, objective: Objective, key: Sequence[int], refused: Collection[int], trusted: Collection[int]
    ) -> None:
        self._objective, self._key = objective, tuple(key)
        self._trusted = set(trusted)
        self.refused = set(refused)
        self.confirmed: set[int] = set()
        self._begin()

    def _begin(self) -> None:
        self.roles: ParameterRoles = {}
        self.weight = 0.0
        self.sums: dict[int, Sums] = {}
        self.available = True
        self.approximated = False

    def run(self, batches: Sequence[Microbatch]) -> None:
        """Add all micro-batches, starting over whenever a layer proves to have no factors."""
        known = -1
        while known < len(self.refused):
            known = len(self.refused)
            self._begin()
            for batch in batches:
                self._add(batch)
                if known < len(self.refused) or not self.available:
                    break

    def _add(self, batch: Microbatch) -> None:
        """Add one micro-batch; its graph is freed on return."""
        objective = self._objective
        params = objective.parameters.params
        recorder = Recorder(params)
        evaluation = objective.evaluate(batch, lambda: recorder)
        objective.sample_gradients += GRADIENT * evaluation.samples
        if not evaluation.outputs:
            self.available = False
            return
        if evaluation.weight == 0:  # every term is masked
            return
        if not self.weight:
            require_outputs(evaluation, "The Kronecker preconditioner")
        require_attached(evaluation)
        self.weight += evaluation.weight
        calls = self._served(recorder.calls)
        layers = {i for call in calls for i in call.indices.values()}
        rest = [i for i in range(len(params)) if i not in layers]
        fresh = {call.weight for call in calls if call.a.numel()} - self._trusted
        unjudged = sorted({i for call in calls if call.weight in fresh for i in call.indices.values()})
        with explain_missing_second_derivative():
            roots, exact = random_roots(evaluation, self._key)
        self.approximated |= not exact
        if not roots:  # the loss is linear in its outputs: there is no curvature
            return
        inputs: list[Any] = [*(call.edge for call in calls), *(params[i] for i in (*rest, *unjudged))]
        pulled = torch.autograd.grad([z for z, _ in roots], inputs, [u for _, u in roots], allow_unused=True)
        found = merged([(call, delta) for call, delta in zip(calls, pulled, strict=False) if delta is not None])
        gradients = dict(zip((*rest, *unjudged), pulled[len(calls) :], strict=True))
        alone = {i: x for i in rest if (x := gradients[i]) is not None}
        for i, x in alone.items():
            self._note(i, ParameterRole(_block_alone(x)))
        if unjudged:
            judged = self._compared([(call, delta) for call, delta in found if call.weight in fresh], gradients)
            self.refused |= judged.refuted
            self.confirmed |= judged.confirmed
        self._add_alone(alone, evaluation.weight)
        self._add_factors(found, evaluation.weight)

    def _served(self, calls: Sequence[LayerCall]) -> list[LayerCall]:
        """Return the calls of layers with factors; a bias shared by several weights is left out of their matrices."""
        kinds: dict[int, set[object]] = {}
        weights: dict[int | None, set[int]] = {}
        for call in calls:
            if (i := call.weight) is not None:
                kinds.setdefault(i, set()).add((call.bias, call.how))
                weights.setdefault(call.bias, set()).add(i)
        served = []
        for call in calls:
            i = call.weight
            if i is None or len(kinds[i]) > 1 or i in self.refused or not _has_factors(call):
                continue
            if call.bias in self.refused or len(weights[call.bias]) > 1:
                call = dataclasses.replace(call, bias=None)
            self._note(i, ParameterRole(TableBlock if call.table else LayerBlock))
            if call.bias is not None:
                self._note(call.bias, ParameterRole(LayerBlock, bias_of=i))
            served.append(call)
        return served

    def _note(self, i: int, role: ParameterRole) -> None:
        """Note a parameter's role; one with two roles is refused, together with its layer."""
        if (before := self.roles.setdefault(i, role)) != role:
            self.refused |= {i, *(j for j in (before.bias_of, role.bias_of) if j is not None)}

    def _add_alone(self, pulled: Mapping[int, Tensor], weight: float) -> None:
        for i, x in pulled.items():
            x, sums = x.to(self._objective.parameters.dtype), self._sums_of(i)
            if isinstance(sums, DiagonalSums):
                sums.diagonal += x.square().reshape(-1).mul_(weight)
                continue
            X = x.reshape(x.shape[0], -1)
            sums.inputs += (X.T @ X).mul_(weight)
            sums.outputs += (X @ X.T).mul_(weight)

    def _add_factors(self, found: Sequence[tuple[LayerCall, Tensor]], weight: float) -> None:
        """Add to A and G of each layer, over all of its calls."""
        counts = numbers_of([call.positions(delta) for call, delta in found])
        positions: dict[int, float] = {}
        for (call, _), count in zip(found, counts, strict=True):
            i = call.indices[True]
            positions[i] = positions.get(i, 0) + count
        for i, count in positions.items():
            sums = self._sums_of(i)
            assert isinstance(sums, FactorSums)
            sums.calls += weight * (count > 0)  # calls without influence do not count in A
        for (call, delta), count in zip(found, counts, strict=True):
            i = call.indices[True]
            sums = self._sums_of(i)
            assert isinstance(sums, FactorSums)
            call.add_factors(sums.inputs, sums.outputs, delta, weight / max(1, positions[i]), weight, count)

    def _sums_of(self, i: int) -> Sums:
        if i not in self.sums:
            self.sums[i] = new_sums(i, self.roles, self._objective.parameters)
        return self.sums[i]

    def _compared(self, found: Sequence[tuple[LayerCall, Tensor]], gradients: Mapping[int, Tensor | None]) -> Found:
        """Return the weights whose Σ δaᵀ equals the pull-back to them, and the layers used elsewhere, too."""
        dtype = self._objective.parameters.dtype
        coarsest = max((torch.finfo(call.dtype).eps for call, _ in found), default=0.0)
        layers: dict[int, int] = {}  # the weight of each parameter
        expected: dict[int, Tensor] = {}
        sizes: dict[int, Tensor] = {}
        for call, delta in found:
            for i, term, size in call.gradients(delta, dtype):
                layers[i] = call.indices[True]
                expected[i] = expected[i] + term if i in expected else term
                sizes[i] = sizes[i] + size if i in sizes else size
        errors = []
        for i, x in expected.items():
            given = gradients[i]
            error = x if given is None else x - given.to(dtype).reshape(x.shape)
            errors.append((i, error.norm(), sizes[i]))
        right, wrong = compared(errors, tolerance(max(torch.finfo(dtype).eps, coarsest)))
        refuted = {layers[i] for i in wrong}
        return Found(right & set(layers.values()), {i for i, weight in layers.items() if weight in refuted})


def _has_factors(call: LayerCall) -> bool:
    """Whether A ⊗ G approximates the layer's block, and both factors are small enough."""
    if isinstance(call.how, Convolution) and call.how.groups > 1:
        return False
    return (call.table or (call.batched and call.shape[1:].numel() <= LARGE)) and call.width <= LARGE


def _block_alone(x: Tensor) -> type[PulledBlock | DiagonalBlock]:
    """Return the kind of block of a parameter outside of layers."""
    rows = x.shape[0] if x.ndim > 1 else 1
    columns = x.numel() // max(1, rows)
    return PulledBlock if min(rows, columns) > 1 and max(rows, columns) <= LARGE else DiagonalBlock
