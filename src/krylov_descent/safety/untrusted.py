"""Checks of a state from outside, before anything is computed from it or allocated for it.

A file of a few kilobytes can describe a tensor of terabytes (strides of zero, a sparse layout, no storage at all), a
list that contains itself, or ten lists of ten lists of ten lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent.distributed.sharded import is_sharded

_MOST_VALUES, _MOST_TIMES, _DEEPEST, _LONGEST_WORD = 1_000_000, 1000, 50, 1 << 20
_SHARED = 8  # a strategy may keep one vector under several names
_ANOTHER = "Load another state."


def require_plain(state: Any) -> None:
    """Require nested mappings, lists and tuples that end, and tensors that hold the numbers of their shapes.

    Raises:
        ValueError: something would take more time or memory than its file has bytes.
    """
    storages: dict[int, int] = {}
    seen: Counter[int] = Counter()
    count = numbers = 0
    waiting = [(state, 0)]
    while waiting:
        value, depth = waiting.pop()
        items = _items(value)
        count += len(items)
        seen[id(value)] += bool(items)
        if count > _MOST_VALUES or depth > _DEEPEST or seen[id(value)] > _MOST_TIMES:
            how = f"{_MOST_VALUES:,} values, {_DEEPEST} levels, or {_MOST_TIMES:,} times the same list"
            raise ValueError(f"The state has more than {how}. {_ANOTHER}")
        waiting += [(item, depth + 1) for item in items]
        if isinstance(value, Tensor):
            x = _stored(value)
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            numbers += x.nbytes
        elif isinstance(value, int) and abs(value) > 1 << 64:
            raise ValueError(f"The state has a whole number beyond 2**64. {_ANOTHER}")
        elif isinstance(value, str) and len(value) > _LONGEST_WORD:
            raise ValueError(f"The state has a word of {len(value):,} characters: {value[:40]!r}…. {_ANOTHER}")
    if numbers > _SHARED * sum(storages.values()):
        raise ValueError(
            f"The state has tensors of {numbers:,} bytes in all that share {sum(storages.values()):,}. {_ANOTHER}"
        )


def _items(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    return [*value] if isinstance(value, (list, tuple)) else []


def _stored(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor, if all of its numbers are in its storage."""
    part = x.to_local() if is_sharded(x) else x
    plain = type(part) in (Tensor, nn.Parameter) and part.layout == torch.strided
    if not plain or part.is_nested or part.is_quantized or part.is_meta:
        kind = "quantised" if part.is_quantized else "on the device meta" if part.is_meta else "sparse or nested"
        raise ValueError(f"The state has a tensor that is {kind}; a state's tensors are plain numbers. {_ANOTHER}")
    if part.nbytes > part.untyped_storage().nbytes():
        raise ValueError(f"A tensor of shape {[*part.shape]} has fewer numbers than that. {_ANOTHER}")
    return part
