"""Version, owner and checksum of a ``state_dict``, to detect a damaged one or another optimizer's.

``torch.load`` does not verify contents: a flipped bit in a file loads as another number. A state without this entry is
accepted unverified, so that it can be edited on purpose.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from krylov_descent.distributed.sharded import is_sharded
from krylov_descent.safety.untrusted import require_plain

KEY = "krylov_descent"
VERSION = 1


def raw_bytes(x: Tensor) -> Any:
    """Return the memory of a contiguous CPU tensor, without numpy, which torch does not require."""
    return (ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr()) if x.nbytes else b""


def checksum(value: Any, crc: int = 0) -> int:
    """Return the CRC-32 of nested mappings, sequences, tensors and plain values; other objects count by type alone.

    Example:
        >>> import torch
        >>> checksum({"a": torch.zeros(3)}) == checksum({"a": torch.zeros(3)}) != checksum({"a": torch.ones(3)})
        True
    """
    if isinstance(value, Tensor):
        x = (value.to_local() if is_sharded(value) else value).detach().cpu().contiguous()
        crc = zlib.crc32(f"{x.dtype}{[*x.shape]}".encode(), crc)
        return zlib.crc32(raw_bytes(x), crc)
    if isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            crc = checksum(value[key], checksum(key, crc))
        return zlib.crc32(b"}", crc)
    if isinstance(value, (list, tuple)):
        for item in value:
            crc = checksum(item, crc)
        return zlib.crc32(b"]", crc)
    plain = value is None or isinstance(value, (str, int, float, bool))
    return zlib.crc32((repr(value) if plain else type(value).__name__).encode(), crc)


def with_checksum(state_dict: dict[str, Any], owner: str) -> dict[str, Any]:
    """Return the state_dict with the entry that ``require_intact`` verifies."""
    contents = {key: value for key, value in state_dict.items() if key != KEY}
    return {**contents, KEY: {"version": VERSION, "optimizer": owner, "crc32": checksum(contents)}}


def require_intact(state_dict: Any, owner: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Require an undamaged state_dict of this optimizer, for parameters of these shapes.

    Raises:
        ValueError: it is damaged or another's; the message has a remedy.
    """
    if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("state"), Mapping):
        raise ValueError(
            f"load_state_dict was given a {type(state_dict).__name__} that is no state_dict of an optimizer. Give it "
            "what optimizer.state_dict() returned."
        )
    require_plain(state_dict)
    seal = state_dict.get(KEY)
    if seal is not None:
        _check_owner(seal, owner)
    state = state_dict["state"]
    entries = [entry for entry in state.values() if isinstance(entry, Mapping)]
    if len(entries) != len(state) or (state and not any(map(_counts_iterations, entries))):
        raise ValueError(
            f"The state_dict is not one of {owner}: none of its entries counts iterations. Load one that {owner} "
            "saved, or begin anew with a new optimizer."
        )
    _check_groups(state_dict, groups)
    _check_shapes(state_dict, groups)
    if seal is not None:
        _check_sum(state_dict, seal)


def _check_owner(seal: Any, owner: str) -> None:
    version: Any = seal.get("version") if isinstance(seal, Mapping) else None
    if not _natural(version) or version > VERSION:
        raise ValueError(
            f"The state_dict is of version {_short(version)}; this krylov_descent reads versions up to {VERSION}. Load "
            "it with the krylov_descent that wrote it, or a newer one."
        )
    if seal.get("optimizer") != owner:
        raise ValueError(
            f"The state_dict is one of {_short(seal.get('optimizer'))}, and this optimizer is a {owner}. Load it into "
            "one of its own kind, or begin anew."
        )


def _check_sum(state_dict: Mapping[str, Any], seal: Mapping[str, Any]) -> None:
    found = checksum({key: value for key, value in state_dict.items() if key != KEY})
    if found != seal.get("crc32"):
        raise ValueError(
            f"The state_dict is damaged: its checksum is {found}, and was {_short(seal.get('crc32'))} when it was "
            f"saved. Load another checkpoint. If it was changed on purpose, remove its entry {KEY!r} first; if it was "
            "kept in memory while the optimizer went on, keep copy.deepcopy(optimizer.state_dict()) instead."
        )


def _check_groups(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Require as many groups and parameters as there are, each parameter once, with a weight decay."""
    saved = state_dict.get("param_groups")
    groups_of: list[Any] = saved if isinstance(saved, list) else [None]
    if not all(isinstance(g, Mapping) and isinstance(g.get("params"), list) for g in groups_of):
        raise ValueError("The state_dict has no list of param_groups. Give what optimizer.state_dict() returned.")
    there, here = ([len(g["params"]) for g in those] for those in (groups_of, groups))
    if there != here:
        raise ValueError(
            f"The state_dict has groups of {_short(there)} parameters, and the optimizer of {_short(here)}. Give the "
            "optimizer the same parameter groups as when it was saved; with DeepXDE, the same "
            "external_trainable_variables."
        )
    names = [i for group in groups_of for i in group["params"]]
    known = {i for i in names if isinstance(i, (int, str))}
    if len(known) < len(names) or not known.issuperset(state_dict["state"]):
        raise ValueError("The state_dict does not name each of its parameters once. Load another state.")
    for i, group in enumerate(groups_of):
        decay = group.get("weight_decay")
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 <= decay < math.inf:
            raise ValueError(
                f"The state_dict has weight_decay = {_short(decay)} in group {i}, which is no number ≥ 0. Load another "
                "state."
            )


def _check_shapes(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    here = [p for group in groups for p in group["params"]]
    there = [i for group in state_dict["param_groups"] for i in group["params"]]
    for i, p in zip(there, here, strict=True):
        for key, value in state_dict["state"].get(i, {}).items():
            if isinstance(value, Tensor) and (value.shape != p.shape or value.is_complex()):
                raise ValueError(
                    f"The state_dict is one of another model: {_short(key)} of parameter {i} has the shape "
                    f"{[*value.shape]} in {value.dtype}, and the parameter {[*p.shape]} in {p.dtype}. Build the model "
                    "as it was when it was saved."
                )


def _short(value: Any) -> str:
    """Return a value's repr, shortened for an error message."""
    return repr(value if not isinstance(value, str) else value[:80])[:80]


def _counts_iterations(entry: Mapping[str, Any]) -> bool:
    numbers = entry.get("numbers", entry)
    return isinstance(numbers, Mapping) and _natural(numbers.get("iteration"))


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
