"""Checkpoints of a run on any number of ranks, that load on any other: ``save`` and ``load``.

A directory holds ``step-00000012`` and the like, named by the iteration, and ``latest``, which names the one to load. A
checkpoint is written beside under a name that ``load`` does not look at, and renamed when it is complete; ``latest`` is
replaced after that, and old ones are removed last. Killed at any moment, a run finds the old or the new one.

Torch's random generators are not saved. The optimizer draws from none of them (its samples follow from seed and
iteration), and those of R ranks have no meaning for another R. A program that does use them puts into ``extra`` what it
needs, for example ``torch.get_rng_state().tolist()``.

What a preconditioner remembers is stored as it is, inverses included, though each of these could be made from the rest:
made anew they would be fresher than those of a run that was not interrupted, and the next steps others.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from krylov_descent.distributed.agreement import by_first, explained, gather, rank_in, together
from krylov_descent.distributed.directory import choose, publish, seen, start
from krylov_descent.distributed.groups import groups_of, require_groups
from krylov_descent.distributed.manifest import DTYPES, Manifest, read_manifest, short
from krylov_descent.distributed.storage import ManifestReader, ManifestWriter, Part, PartLoadPlanner, PartSavePlanner

State = tuple[dict[str, Tensor | None], dict[str, int | float]]

_FACTOR = "factors/"  # begins the names of what a preconditioner remembers; older checkpoints have none


class ShardedOptimizer(Protocol):
    """What a checkpoint needs of an optimizer; ``KSD`` has it."""

    param_groups: list[dict[str, Any]]

    @property
    def numel(self) -> int:
        """P, the length of its vectors."""
        ...

    @property
    def process_group(self) -> Any:
        """Of the ranks that share it; None in one process."""
        ...

    def sharded_state(self) -> State:
        """Its vectors, of which this rank has positions [r·s, (r+1)·s), padded by zeros, s = ⌈P/R⌉; and its numbers.

        May be a collective, as may be its counterpart.
        """
        ...

    @property
    def factors(self) -> Mapping[str, Tensor]:
        """What its preconditioner remembers: tensors that a rank has whole or not at all, and as other ranks do."""
        ...

    def load_sharded_state(
        self, vectors: dict[str, Tensor | None], numbers: dict[str, int | float], factors: Mapping[str, Tensor] | None
    ) -> None:
        """Take what these two gave, the factors of all ranks; ValueError, with nothing changed, if it is not that."""
        ...


def save(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: ShardedOptimizer,
    *,
    extra: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Save a run; every rank calls it.

    Args:
        directory: for all checkpoints of the run, on a file system that all ranks see. Nobody else may write there.
        model: its parameters and buffers are saved once, by whichever ranks.
        optimizer: its state is saved in parts, each by a rank that has it, with the settings of its groups.
        extra: anything else, of JSON types; that of rank 0 is kept.
        keep: checkpoints to keep, this one included; older ones are removed.

    Returns:
        The directory of this checkpoint, the same on every rank.

    Raises:
        ValueError: something cannot be saved; says what.
        RankError: another rank could not save its part; says which. What was saved before is still there.

    Example:
        >>> import tempfile, torch
        >>> from krylov_descent import KSD
        >>> from krylov_descent.distributed import checkpoint
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = KSD(model.parameters())
        >>> directory = tempfile.mkdtemp()
        >>> checkpoint.save(directory, model, optimizer, extra={"epoch": 3}).name
        'step-00000000'
        >>> checkpoint.load(directory, model, optimizer)
        {'epoch': 3}
    """
    root, group = Path(directory), optimizer.process_group
    if type(keep) is not int or keep < 1:
        raise ValueError(f"keep={keep!r}: must be a whole number ≥ 1.")
    state = optimizer.sharded_state()
    parts, values = together(group, lambda: _contents(model, optimizer, state, extra))
    iterations = set(gather(group, iteration := int(values["numbers"]["iteration"])))
    if len(iterations) > 1:
        raise ValueError(f"Ranks are at iterations {sorted(iterations)}: call save after the same step on every rank.")
    temporary = root / by_first(group, lambda: start(root))
    try:
        together(group, lambda: seen(temporary))
        with explained(group):
            state_dict_saver.save(
                parts,
                storage_writer=ManifestWriter(temporary, values),
                planner=PartSavePlanner(),
                process_group=group,
                no_dist=group is None,
            )
        return root / by_first(group, lambda: publish(root, temporary, iteration, keep))
    except BaseException:
        if rank_in(group)[0] == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def load(
    directory: str | os.PathLike[str], model: torch.nn.Module, optimizer: ShardedOptimizer
) -> dict[str, Any] | None:
    """Continue from the latest checkpoint, whatever the number of ranks that saved it; every rank calls it.

    It is the one that the file ``latest`` names. Without that file, or, with a warning, if it names one that is not
    there, it is the newest that is complete. Model and optimizer are left alone if it cannot be loaded.

    Args:
        directory: as given to ``save``.
        model: one of the same names, shapes and dtypes; whatever it holds is replaced.
        optimizer: one of the same parameter groups; their settings are replaced, too.

    Returns:
        ``extra`` as given to ``save``, {} if nothing was; None if there is no checkpoint at all.

    Raises:
        ValueError: the checkpoint is damaged, or is one of another model; says how.
        FileNotFoundError: ``latest`` names a checkpoint that is not there, and there is no other.
        RankError: another rank could not load; says which.
    """
    root, group = Path(directory), optimizer.process_group
    name = by_first(group, lambda: choose(root))
    if name is None:
        return None
    path = root / name
    state = optimizer.sharded_state()
    manifest, parts, vectors, numbers = together(group, lambda: _targets(path, model, optimizer, state))
    with explained(group):
        state_dict_loader.load(
            dict(parts),
            storage_reader=ManifestReader(path, manifest),
            planner=PartLoadPlanner(),
            process_group=group,
            no_dist=group is None,
        )

    def commit() -> None:
        factors = {n.removeprefix(_FACTOR): p.tensor for n, p in parts.items() if n.startswith(_FACTOR)}
        try:
            optimizer.load_sharded_state(vectors, numbers, factors or None)
        except ValueError as error:
            raise ValueError(f"{path}: {error} Load another checkpoint.") from None
        model.load_state_dict({n.removeprefix("model/"): p.tensor for n, p in parts.items() if n.startswith("model/")})
        for group, saved in zip(optimizer.param_groups, manifest.values["groups"], strict=True):
            group.update(saved["settings"])

    together(group, commit)
    return dict(manifest.values["extra"])


def _contents(
    model: torch.nn.Module, optimizer: ShardedOptimizer, state: State, extra: Mapping[str, Any] | None
) -> tuple[dict[str, Part], dict[str, Any]]:
    """All tensors of this rank, and all that goes to the manifest."""
    rank, P = rank_in(optimizer.process_group)[0], optimizer.numel
    vectors, numbers = state
    parts = {}
    for name, tensor in model.state_dict().items():
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.dtype not in DTYPES.values():
            raise ValueError(
                f"model.state_dict() has {name} = {short(tensor)}; a checkpoint holds plain tensors only. Keep it out "
                "of the state (persistent=False) and put what can be JSON into extra=."
            )
        parts[f"model/{name}"] = Part(tensor.detach())
    for name, vector in vectors.items():
        if vector is not None:
            start = min(rank * vector.numel(), P)
            parts[f"optimizer/{name}"] = Part(vector[: P - start], start, P)
    parts |= {f"{_FACTOR}{name}": Part(x) for name, x in optimizer.factors.items()}
    extra = {} if extra is None else dict(extra)
    try:
        same = json.loads(json.dumps(extra, allow_nan=False)) == extra
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"extra={short(extra)} is not JSON: {error}. Give dicts, lists, numbers and strings."
        ) from None
    if not same:
        raise ValueError(
            f"extra={short(extra)} would not come back the same: in JSON, keys are strings and tuples become lists."
        )
    encoded = {k: x if isinstance(x, int) or math.isfinite(x) else str(float(x)) for k, x in numbers.items()}
    return parts, {"numbers": encoded, "groups": groups_of(model, optimizer.param_groups), "extra": extra}


def _targets(
    path: Path, model: torch.nn.Module, optimizer: ShardedOptimizer, now: State
) -> tuple[Manifest, dict[str, Part], dict[str, Tensor | None], dict[str, int | float]]:
    """The manifest if it fits what is there now, new tensors to load into, the vectors among them, and the numbers."""
    manifest = read_manifest(path)
    saved = manifest.tensors()
    state = model.state_dict()
    names = {name.removeprefix("model/") for name in saved if name.startswith("model/")}
    if names != state.keys():
        raise ValueError(
            f"{path} is a checkpoint of another model: only there are {short(sorted(names - state.keys()))}, only here "
            f"{short(sorted(state.keys() - names))}. Build the model as it was when it was saved."
        )
    parts: dict[str, Part] = {}
    for name, tensor in state.items():
        there = saved[f"model/{name}"]
        if (there.size, there.properties.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{path} is a checkpoint of another model: {name} is {[*there.size]} of {there.properties.dtype} there "
                f"and {[*tensor.shape]} of {tensor.dtype} here. Build the model as it was when it was saved."
            )
        parts[f"model/{name}"] = Part(torch.empty_like(tensor, device="cpu"))
    require_groups(path, manifest.values, groups_of(model, optimizer.param_groups))
    P, (rank, ranks) = optimizer.numel, rank_in(optimizer.process_group)
    s = -(-P // ranks)
    start = min(rank * s, P)
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    vectors: dict[str, Tensor | None] = dict.fromkeys(now[0])
    for key, there in saved.items():
        name = key.removeprefix("optimizer/")
        if key.startswith("model/"):
            continue
        if key.startswith(_FACTOR):
            parts[key] = Part(torch.empty(there.size, dtype=there.properties.dtype, device=device))
            continue
        if name not in vectors or [*there.size] != [P] or not there.properties.dtype.is_floating_point:
            raise ValueError(
                f"{path} is a checkpoint of another optimizer: {name} is {[*there.size]} of {there.properties.dtype} "
                f"there, and the vectors of this one are {sorted(vectors)} of {P} numbers. Build it as it was."
            )
        vector = torch.zeros(s, dtype=there.properties.dtype, device=device)
        vectors[name] = vector
        parts[key] = Part(vector[: P - start], start, P)
    return manifest, parts, vectors, _numbers(path, manifest.values, now[1])


def _numbers(path: Path, values: dict[str, Any], current: dict[str, int | float]) -> dict[str, int | float]:
    """The numbers of a manifest, of the types of those that are there; their names are the optimizer's to check."""
    numbers = {}
    for key, x in values["numbers"].items():
        if type(x) is str and x in ("inf", "-inf", "nan"):
            x = float(x)
        if type(x) is not int and (type(x) is not float or type(current.get(key)) is int):
            raise ValueError(f"{path}: {key} is {short(x)}, no number of its kind. Load another checkpoint.")
        numbers[key] = x
    return numbers
