"""What both baselines share: the sets of a step, and vectors in the states of the parameters."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from krylov_descent.samples.interface import FullBatch, SamplePolicy, StepSets
from krylov_descent.vectors.parameters import ParameterVector


def drawn(sets: SamplePolicy | None, iteration: int, krylov_dim: int) -> StepSets:
    """The sets of one step."""
    policy = FullBatch() if sets is None else sets
    return policy.choose(iteration, policy.init(), krylov_dim=krylov_dim, shard=0, of_shards=1).sets


def write_vectors(
    state: MutableMapping[Tensor, Any], parameters: ParameterVector, vectors: Mapping[str, Tensor | None]
) -> None:
    """Replace vectors in the states of the parameters, in views; None leaves none."""
    for entry in state.values():
        for key in vectors:
            entry.pop(key, None)
    for key, vector in vectors.items():
        if vector is not None:
            for p, part in zip(parameters.params, parameters.unflatten(vector), strict=True):
                state[p][key] = part


def read_vector(
    state: MutableMapping[Tensor, Any], parameters: ParameterVector, key: str, *, partial: bool
) -> Tensor | None:
    """A vector from the states of the parameters; a parameter that has none counts as zero if ``partial``."""
    tensors = [state.get(p, {}).get(key) for p in parameters.params]
    missing = sum(t is None for t in tensors)
    if missing == len(tensors) or (missing and not partial):
        return None
    return parameters.joined(
        [torch.zeros_like(p) if t is None else t for t, p in zip(tensors, parameters.params, strict=True)]
    )
