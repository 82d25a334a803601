"""What a run remembers, as the state of an optimizer: tensors per parameter, plain numbers beside those of the first.

As in torch's L-BFGS. With several ranks, a state has this rank's parts of the vectors. All of it survives state_dict →
torch.save → torch.load(weights_only=True) → load_state_dict.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor

from krylov_descent.distributed import Comm
from krylov_descent.distributed.sharded import is_sharded
from krylov_descent.krylov.basis import EARLIER
from krylov_descent.krylov.candidates import Carry
from krylov_descent.krylov.memory import Memory
from krylov_descent.samples.growing import Confirmation, Promise
from krylov_descent.vectors.parameters import ParameterVector
from krylov_descent.vectors.ranks import require_plain

State = MutableMapping[Tensor, Any]
#: Vectors [P], numbers, and factors of a preconditioner, by name.
WholeState = tuple[dict[str, Tensor], dict[str, int | float], dict[str, Tensor]]

_EARLIER = tuple(f"earlier_{i}" for i in range(1, EARLIER + 1))
_VECTORS = ("d_prev", "accepted", *_EARLIER)
_COUNTS = ("iteration", "search_growth", "growths")
_NUMBERS = (*_COUNTS, "seed", "accepted_loss")
_CARRIED = tuple(field.name for field in fields(Carry))
_JUDGED = tuple(field.name for field in fields(Confirmation))
_PROMISED = tuple(field.name for field in fields(Promise))
_FACTORS = "factors"
_ALL = (*_NUMBERS, *_CARRIED, *_JUDGED, *_PROMISED)


def read_memory(state: State, first: Tensor, parameters: ParameterVector, seed: int, comm: Comm) -> Memory:
    """The memory in a state; that of a new run if there is none. ``first`` is the first parameter of all.

    Raises:
        ValueError: it is that of another number of ranks.
    """
    numbers = state.get(first, {})
    if "iteration" not in numbers:
        return Memory(iteration=0, seed=seed)
    in_parts, own = "layout" in numbers, _layout(parameters, comm)
    found = tuple(numbers.get("layout", own))
    vectors: dict[str, Tensor | None]
    if comm.as_parameters and not in_parts:
        whole = {key: read_vector(state, parameters, key, partial=key != "accepted") for key in _VECTORS}
        vectors = {key: None if x is None else comm.shard(x) for key, x in whole.items()}
    elif in_parts and not comm.as_parameters and own == found:
        vectors = {key: numbers.get(f"{key}_part") for key in _VECTORS}
    elif found == own:
        raise ValueError(
            "The optimizer's state is that of a run in one process, and this KSD has a process_group. Make it without "
            "process_group=..., as in that run, or save there by krylov_descent.checkpoint and load that."
        )
    else:
        raise ValueError(
            f"The optimizer's state is that of rank {found[0]} of {found[1]} with {found[2]:,} parameters, and this is "
            f"rank {own[0]} of {own[1]} with {own[2]:,}. A state_dict holds one rank's part: to go on with other ranks "
            "or parameters, save and load by krylov_descent.checkpoint."
        )
    memory = memory_of(vectors, {key: numbers[key] for key in _ALL if key in numbers})
    factors = numbers.get(_FACTORS)
    if factors is None:
        return memory
    return replace(memory, factors={k: x if isinstance(x, Tensor) else _scalar(x) for k, x in factors.items()})


def write_memory(state: State, first: Tensor, parameters: ParameterVector, memory: Memory, comm: Comm) -> None:
    """Replace the memory in a state; its vectors are kept as they are, in views, or as this rank's parts."""
    vectors, numbers = memory_parts(memory)
    for key in (*_CARRIED, *_JUDGED, *_PROMISED, _FACTORS):  # a memory without them has none, whatever was there before
        state.get(first, {}).pop(key, None)
    factors = {}
    if memory.factors is not None:
        # Numbers as such: torch casts tensors to the parameters' dtype when a state is loaded.
        factors = {_FACTORS: {k: x if x.ndim else float(x) for k, x in memory.factors.items()}}
    if comm.as_parameters:
        whole = {k: None if x is None else comm.all_gather(x, parameters.numel) for k, x in vectors.items()}
        write_vectors(state, parameters, whole)
        for key in ("layout", *(f"{key}_part" for key in vectors)):  # of a state in parts that was there before
            state[first].pop(key, None)
        state[first].update(numbers, **factors)
        return
    for key, x in vectors.items():
        state[first].pop(f"{key}_part", None)
        if x is not None:
            state[first][f"{key}_part"] = x
    state[first].update(numbers, layout=list(_layout(parameters, comm)), **factors)


def memory_parts(memory: Memory) -> tuple[dict[str, Tensor | None], dict[str, int | float]]:
    """Its vectors and its numbers, by name."""
    numbers = {key: getattr(memory, key) for key in _NUMBERS}
    for group in (memory.carry, memory.confirmation, memory.promise):
        numbers |= {} if group is None else asdict(group)
    vectors = dict.fromkeys(_VECTORS) | dict(zip(_EARLIER, memory.earlier, strict=False))
    return vectors | {"d_prev": memory.d_prev, "accepted": memory.accepted}, numbers


def memory_of(vectors: Mapping[str, Tensor | None], numbers: Mapping[str, int | float]) -> Memory:
    """The memory of such parts.

    Raises:
        ValueError: names are missing, there are others, or a number is of another kind.
    """
    groups = {fields[0]: fields for fields in (_CARRIED, _JUDGED, _PROMISED) if fields[0] in numbers}
    if set(numbers) != {*_NUMBERS}.union(*groups.values()) or not set(vectors) <= {*_VECTORS}:
        raise ValueError(
            f"The state has {sorted([*vectors, *numbers])}, which is not what a KSD remembers. Load one that KSD saved."
        )
    for key, n in numbers.items():
        whole = type(n) is int and abs(n) < 1 << 64 and (n >= 0 or key not in _COUNTS)
        if not whole and (not isinstance(n, float) or key in (*_COUNTS, "seed")):
            raise ValueError(
                f"The state has {key} = {str(n)[:80]!r}, which is no number of its kind. Load another one."
            )
    carry, confirmation, promise = (
        None if fields[0] not in groups else {key: float(numbers[key]) for key in fields}
        for fields in (_CARRIED, _JUDGED, _PROMISED)
    )
    return Memory(
        iteration=int(numbers["iteration"]),
        seed=int(numbers["seed"]),
        d_prev=vectors.get("d_prev"),
        accepted=vectors.get("accepted"),
        accepted_loss=float(numbers["accepted_loss"]),
        search_growth=int(numbers["search_growth"]),
        growths=int(numbers["growths"]),
        carry=None if carry is None else Carry(**carry),
        confirmation=None if confirmation is None else Confirmation(**confirmation),
        promise=None if promise is None else Promise(**promise),
        earlier=tuple(x for key in _EARLIER if (x := vectors.get(key)) is not None),
    )


def require_whole(state: WholeState, parameters: ParameterVector) -> None:
    """A state must be one of KSD, with finite vectors of these parameters; their values count unless on "meta".

    Raises:
        ValueError: it is not, or the parameters are DTensors.
    """
    require_plain(parameters.params)
    vectors, numbers, factors = state
    memory_of(vectors, numbers)
    for name, x in vectors.items():
        if [*x.shape] != [parameters.numel] or x.dtype != parameters.dtype:
            raise ValueError(
                f"The state is one of another model: {name} is {[*x.shape]} of {x.dtype}, and the parameters are "
                f"{parameters.numel} numbers of {parameters.dtype}. Build the model as it was when it was saved."
            )
    for name, x in {**vectors, **factors}.items():
        if not x.is_meta and not bool(x.isfinite().all()):
            raise ValueError(f"The state is of no use: {name} is not finite. Load an older one.")


def memory_of_whole(state: WholeState, parameters: ParameterVector, comm: Comm) -> Memory:
    """The memory of one rank, from a whole state.

    Raises:
        ValueError: it is of another optimizer or model, or not finite.
    """
    require_whole(state, parameters)
    vectors, numbers, factors = state
    parts = {name: comm.shard(x.to(parameters.device)) for name, x in vectors.items()}
    placed = {name: x.to(parameters.device) for name, x in factors.items()}
    return replace(memory_of(parts, numbers), factors=placed or None)


def _scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64, device="cpu")


def _layout(parameters: ParameterVector, comm: Comm) -> tuple[int, ...]:
    """Rank, ranks and P."""
    return comm.rank, comm.ranks, parameters.numel


def write_vectors(state: State, parameters: ParameterVector, vectors: Mapping[str, Tensor | None]) -> None:
    """Replace vectors in the states of the parameters, kept as they are, in views; None leaves none."""
    for entry in state.values():
        for key in vectors:
            entry.pop(key, None)
    for key, vector in vectors.items():
        if vector is not None:
            for p, part in zip(parameters.params, parameters.unflatten(vector), strict=True):
                # torch.save fails for a DTensor whose local part does not begin its storage.
                state[p][key] = part.clone() if is_sharded(part) else part


def read_vector(state: State, parameters: ParameterVector, key: str, *, partial: bool) -> Tensor | None:
    """A vector from the states of the parameters; a parameter that has none counts as zero if ``partial``."""
    tensors = [state.get(p, {}).get(key) for p in parameters.params]
    missing = sum(t is None for t in tensors)
    if missing == len(tensors) or (missing and not partial):
        return None
    return parameters.joined(
        [torch.zeros_like(p) if t is None else t for t, p in zip(tensors, parameters.params, strict=True)]
    )
