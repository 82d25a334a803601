"""What a run remembers, as the state of an optimizer: tensors per parameter, plain numbers beside those of the first.

As in torch's L-BFGS. All of it survives state_dict → torch.save → torch.load(weights_only=True) → load_state_dict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from krylov_descent.ksd import Memory
from krylov_descent.parameters import ParameterVector

State = MutableMapping[Tensor, Any]


def read_memory(state: State, first: Tensor, parameters: ParameterVector, seed: int) -> Memory:
    """The memory in a state; that of a new run if there is none. ``first`` is the first parameter of all."""
    numbers = state.get(first, {})
    return Memory(
        iteration=int(numbers.get("iteration", 0)),
        seed=int(numbers.get("seed", seed)),
        d_prev=read_vector(state, parameters, "d_prev", partial=True),
        accepted=read_vector(state, parameters, "accepted", partial=False),
        accepted_loss=float(numbers.get("accepted_loss", math.inf)),
        search_growth=int(numbers.get("search_growth", 0)),
    )


def write_memory(state: State, first: Tensor, parameters: ParameterVector, memory: Memory) -> None:
    """Replace the memory in a state; its vectors are kept as they are, in views."""
    write_vectors(state, parameters, {"d_prev": memory.d_prev, "accepted": memory.accepted})
    state[first].update(
        iteration=memory.iteration,
        seed=memory.seed,
        accepted_loss=memory.accepted_loss,
        search_growth=memory.search_growth,
    )


def write_vectors(state: State, parameters: ParameterVector, vectors: Mapping[str, Tensor | None]) -> None:
    """Replace vectors in the states of the parameters, kept as they are, in views; None leaves none."""
    for entry in state.values():
        for key in vectors:
            entry.pop(key, None)
    for key, vector in vectors.items():
        if vector is not None:
            for p, part in zip(parameters.params, parameters.unflatten(vector), strict=True):
                state[p][key] = part


def read_vector(state: State, parameters: ParameterVector, key: str, *, partial: bool) -> Tensor | None:
    """A vector from the states of the parameters; a parameter that has none counts as zero if ``partial``."""
    tensors = [state.get(p, {}).get(key) for p in parameters.params]
    missing = sum(t is None for t in tensors)
    if missing == len(tensors) or (missing and not partial):
        return None
    return parameters.joined(
        [torch.zeros_like(p) if t is None else t for t, p in zip(tensors, parameters.params, strict=True)]
    )
