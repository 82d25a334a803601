"""Statistics of a set for the Kronecker-factored Gauss–Newton matrix (K-FAC, expand).

Letters: aᵢₜ a layer's input (with a 1 for the bias) at position t of sample i, δᵢₜ what a random root u of the loss's
Hessian (curvature/output_roots.py) becomes at its output when it is pulled back; A = mean of aᵢₜaᵢₜᵀ over samples and
positions, G = Σ δᵢₜδᵢₜᵀ of a mean loss. A ⊗ G stands for the layer's block of the Gauss–Newton matrix: Σ (aaᵀ ⊗ δδᵀ),
with its two parts averaged apart. Over micro-batches b with weights w_b, both are means with weights w_b.

Which layers have factors: layers/calls.py. Several calls of a layer count as further positions. Every other parameter
has what X, that which u becomes at the parameter itself, tells of its block E[vec X vec Xᵀ]:
- a matrix [out, in] (recurrent layers, attention, grouped convolutions): G = E[XXᵀ], A = E[XᵀX]/E[tr XᵀX]. A ⊗ G has
  the trace of the block, and curvature along what rows or columns have in common, which a diagonal has not (Gupta,
  Koren & Singer 2018 use the same two matrices of gradients);
- a vector (norms), or a matrix with more than 4096 rows or columns: the diagonal, E[X∘X].
Among these are a weight that belongs to several modules, a layer of which only the bias is trained, and a weight that
acts anywhere else than in recorded calls (functional use, a network differentiated inside the closure). The last is
found out by comparing Σ δᵢₜaᵢₜᵀ with the pull-back to the weight itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krylov_descent.curvature.errors import explained
from krylov_descent.curvature.output_roots import random_roots
from krylov_descent.layers.calls import LayerCall, merged, recorded_layers
from krylov_descent.objective.closure import require_attached, require_outputs
from krylov_descent.objective.objective import GRADIENT, Objective
from krylov_descent.samples.subsets import Microbatch

Sums = dict[str, Tensor]
"""By name: f"{i}.inputs", f"{i}.outputs", f"{i}.diagonal" and f"{i}.calls", the weight of what had calls of layer i."""

# What stands for a parameter. Of the opinions of several ranks the largest counts.
UNKNOWN, BIAS, MATRIX, TABLE, PULLED, DIAGONAL = range(6)

LARGE = 4096  # rows or columns of a matrix beyond which a parameter outside of layers has a diagonal


@dataclass(frozen=True)
class Role:
    """What stands for a parameter: ``weight`` is, of a bias, the index of the weight whose matrix it belongs to."""

    kind: int
    weight: int = -1


Roles = dict[int, Role]
"""Of the parameters that are known, by index."""


class PassOverSet:
    """Gathers the statistics of this rank's micro-batches.

    Args:
        objective: what is evaluated.
        key: seeds the signs.
        refused: parameters that are taken by themselves, whatever calls they have.
        judged: weights whose Σ δaᵀ was compared with the pull-back before.

    Attributes:
        roles: what was found for each parameter.
        weight: Σ w_b.
        sums: of the statistics.
        available: whether the closure gave outputs.
        approximated: whether the gradients of samples stand for the curvature of the loss (curvature/output_roots.py).
        refused: with those that were found since.
    """

    def __init__(
        self, objective: Objective, key: Sequence[int], refused: Collection[int], judged: Collection[int]
    ) -> None:
        self._objective, self._key = objective, tuple(key)
        self._index = {id(p): i for i, p in enumerate(objective.parameters.params)}
        self._judged = set(judged)
        self.refused = set(refused)
        self._begin()

    def _begin(self) -> None:
        self.roles: Roles = {}
        self.weight = 0.0
        self.sums: Sums = {}
        self.available = True
        self.approximated = False

    def run(self, batches: Sequence[Microbatch]) -> None:
        """Take all micro-batches; from the start, whenever a layer proves to have no factors."""
        known = -1
        while known < len(self.refused):
            known = len(self.refused)
            self._begin()
            for batch in batches:
                self._add(batch)
                if known < len(self.refused) or not self.available:
                    break

    def _add(self, batch: Microbatch) -> None:
        """One micro-batch; its graph dies with this call."""
        objective = self._objective
        with recorded_layers(self._index) as calls:
            evaluation = objective.evaluate(batch)
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
        calls = self._served(calls)
        layers = {i for call in calls for i in (call.weight, call.bias) if i is not None}
        rest = [i for i in range(len(self._index)) if i not in layers]
        fresh = any(call.weight not in self._judged for call in calls if call.a.numel())
        unjudged = sorted(layers) if fresh else []
        with explained():
            roots, exact = random_roots(evaluation, self._key)
        self.approximated |= not exact
        if not roots:  # the loss is linear in its outputs: there is no curvature
            return
        params = objective.parameters.params
        inputs: list[Any] = [*(call.edge for call in calls), *(params[i] for i in (*rest, *unjudged))]
        pulled = torch.autograd.grad([z for z, _ in roots], inputs, [u for _, u in roots], allow_unused=True)
        found = merged([(call, delta) for call, delta in zip(calls, pulled, strict=False) if delta is not None])
        gradients = dict(zip((*rest, *unjudged), pulled[len(calls) :], strict=True))
        alone = {i: x for i in rest if (x := gradients[i]) is not None}
        for i, x in alone.items():
            self._note(i, Role(_kind_alone(x)))
        if unjudged:
            self.refused |= self._wrong(found, gradients)
        self._add_alone(alone, evaluation.weight)
        self._add_factors(found, evaluation.weight)

    def _served(self, calls: Sequence[LayerCall]) -> list[LayerCall]:
        """The calls of layers that have factors; a bias that several weights have is left out of their matrices."""
        modules: dict[int, set[int]] = {}
        weights: dict[int | None, set[int]] = {}
        for call in calls:
            modules.setdefault(call.weight, set()).add(id(call.module))
            weights.setdefault(call.bias, set()).add(call.weight)
        served = []
        for call in calls:
            if len(modules[call.weight]) > 1 or call.weight in self.refused:
                continue
            weight = self._objective.parameters.params[call.weight]
            if call.width > LARGE or (not call.table and weight[0].numel() > LARGE):
                continue  # its factors would be larger than a step has room and time for
            if call.bias in self.refused or len(weights[call.bias]) > 1:
                call = dataclasses.replace(call, bias=None)
            self._note(call.weight, Role(TABLE if call.table else MATRIX))
            if call.bias is not None:
                self._note(call.bias, Role(BIAS, call.weight))
            served.append(call)
        return served

    def _note(self, i: int, role: Role) -> None:
        """A parameter has one role in all micro-batches; one that has two is taken by itself, with its layer."""
        if (before := self.roles.setdefault(i, role)) != role:
            self.refused |= {i} | ({before.weight, role.weight} - {-1})

    def _add_alone(self, pulled: Mapping[int, Tensor], weight: float) -> None:
        for i, x in pulled.items():
            x = x.to(self._objective.parameters.dtype)
            if _kind_alone(x) == DIAGONAL:
                self._accumulate(f"{i}.diagonal", x.square().reshape(-1).mul_(weight))
                continue
            X = x.reshape(x.shape[0], -1)
            self._accumulate(f"{i}.inputs", (X.T @ X).mul_(weight))
            self._accumulate(f"{i}.outputs", (X @ X.T).mul_(weight))

    def _add_factors(self, found: Sequence[tuple[LayerCall, Tensor]], weight: float) -> None:
        """A and G of each layer, over all of its calls."""
        parameters, sums = self._objective.parameters, self.sums
        positions: dict[int, int] = {}
        for call, delta in found:
            positions[call.weight] = positions.get(call.weight, 0) + call.positions(delta)
        for i in (i for i, count in positions.items() if count):  # calls that had no influence tell nothing of A
            self._accumulate(f"{i}.calls", torch.tensor(weight, dtype=parameters.dtype, device=parameters.device))
        for call, delta in found:
            i, out = call.weight, call.width
            into = parameters.params[i].numel() // out + (call.bias is not None)
            for name, shape in ((f"{i}.inputs", (into,) * (1 if call.table else 2)), (f"{i}.outputs", (out, out))):
                if name not in sums:
                    sums[name] = torch.zeros(shape, dtype=parameters.dtype, device=parameters.device)
            share = weight / max(1, positions[i])
            call.add_factors(sums[f"{i}.inputs"], sums[f"{i}.outputs"], delta, share, weight)

    def _accumulate(self, name: str, x: Tensor) -> None:
        self.sums[name] = self.sums[name].add_(x) if name in self.sums else x

    def _wrong(self, found: Sequence[tuple[LayerCall, Tensor]], gradients: Mapping[int, Tensor | None]) -> set[int]:
        """Layers whose Σ δaᵀ is not what pulling back to their parameters gives: these act elsewhere too."""
        dtype = self._objective.parameters.dtype
        coarsest = max((torch.finfo(call.dtype).eps for call, _ in found), default=0.0)
        # Rounding reached 20 ε on deep autoencoders; in half precision little can be told.
        tolerance = min(0.1, 512 * max(torch.finfo(dtype).eps, coarsest))
        layers: dict[int, int] = {}  # the weight of each parameter
        expected: dict[int, Tensor] = {}
        sizes: dict[int, float] = {}
        for call, delta in found:
            for i, term, size in call.gradients(delta, dtype):
                layers[i] = call.weight
                expected[i] = expected[i] + term if i in expected else term
                sizes[i] = sizes.get(i, 0.0) + size
        wrong = set()
        for i, x in expected.items():
            given = gradients[i]
            error = x if given is None else x - given.to(dtype).reshape(x.shape)
            if float(error.norm()) > tolerance * sizes[i]:  # not after an overflow, when nothing is told
                wrong.add(layers[i])
        return {i for i, weight in layers.items() if weight in wrong}


def _kind_alone(x: Tensor) -> int:
    """Of a parameter outside of layers."""
    rows = x.shape[0] if x.ndim > 1 else 1
    columns = x.numel() // max(1, rows)
    return PULLED if min(rows, columns) > 1 and max(rows, columns) <= LARGE else DIAGONAL
