"""The state of a run as nested frozen dataclasses, converted to and from named values; independent of their fields.

A strategy's state is a frozen dataclass of numbers, tensors, tuples, dictionaries, further such dataclasses and None.
A field made by ``vector()`` holds vectors of all parameters [P], of which each rank has its part. If a field may hold
one of several dataclasses, their field ``kind`` distinguishes them. ``taken_apart`` gives every number and tensor a
name such as ``subspace.earlier.0``; ``put_together`` is its inverse.

In torch's optimizer state, vectors are stored by name with each parameter, in its shape; numbers and other tensors with
the first parameter. With several ranks, each stores its parts of the vectors there instead. All of it survives
state_dict → torch.save → torch.load(weights_only=True) → load_state_dict.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from krylov_descent.distributed import Comm
from krylov_descent.distributed.sharded import is_sharded
from krylov_descent.vectors.parameters import ParameterVector
from krylov_descent.vectors.ranks import require_plain

T = TypeVar("T")
OptimizerState = MutableMapping[Tensor, Any]
Number = int | float | str


class Parts(NamedTuple):
    """A state by names: vectors [P] or this rank's parts of them, numbers and strings, and other tensors."""

    vectors: dict[str, Tensor]
    numbers: dict[str, Number]
    tensors: dict[str, Tensor]

    def without(self, start: str) -> Parts:
        """Return the parts whose names do not begin with ``start``."""
        return Parts(*({name: x for name, x in part.items() if not name.startswith(start)} for part in self))  # type: ignore[arg-type]


def vector(default: Any = None) -> Any:
    """Return a dataclass field that holds a vector of all parameters, or a tuple of such vectors.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Mine:
        ...     direction: Tensor | None = vector()
        ...     length: float = 1.0
        >>> taken_apart(Mine()).numbers
        {'length': 1.0}
    """
    return dataclasses.field(default=default, metadata={"vector": True})


def taken_apart(state: Any) -> Parts:
    """Return a state as named vectors, numbers and tensors.

    Raises:
        TypeError: a value cannot be saved, or could not be restored.
    """
    parts = Parts({}, {}, {})
    _take_apart(state, "", parts, in_vector=False)
    return parts


def _take_apart(value: Any, name: str, parts: Parts, *, in_vector: bool) -> None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = _hints(type(value))
        for field in dataclasses.fields(value):
            below, part = _joined(name, field.name), getattr(value, field.name)
            if hints[field.name] is Any and not (part is None or dataclasses.is_dataclass(part)):
                raise TypeError(_unsavable(below, part))
            _take_apart(part, below, parts, in_vector=field.metadata.get("vector", in_vector))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _take_apart(item, _joined(name, key), parts, in_vector=in_vector)
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            _take_apart(item, _joined(name, i), parts, in_vector=in_vector)
    elif isinstance(value, Tensor):
        (parts.vectors if in_vector else parts.tensors)[name] = value
    elif type(value) in _KINDS:
        if not _is(type(value), value):
            raise TypeError(
                f"{name} = {str(value)[:80]!r} cannot be saved: a state has whole numbers from 0 to 2**64 - 1, and "
                f"strings of up to {_LONGEST_WORD} characters. Use a float, or a shorter string."
            )
        parts.numbers[name] = value
    elif value is not None:
        raise TypeError(_unsavable(name, value))


def _unsavable(name: str, value: object) -> str:
    return (
        f"{name or 'A state'} is a {type(value).__name__}, which cannot be saved. A strategy's state is a frozen "
        "dataclass of numbers, strings, tensors, tuples, dictionaries and further such dataclasses."
    )


def put_together(fresh: T, parts: Parts) -> T:
    """Return the state of these parts; ``fresh`` is the state of a new run with the same strategies.

    Raises:
        ValueError: names are missing or unknown, or a value is of another type.
    """
    state: T = _dataclass(type(fresh), fresh, _leaves(parts), "", in_vector=False)
    return state


_Leaves = dict[str, tuple[bool, Any]]
"""Values by name, or by the rest of their names: (whether it is a vector, value)."""


def _leaves(parts: Parts) -> _Leaves:
    found = {}
    for in_vector, part in ((True, parts.vectors), (False, parts.numbers), (False, parts.tensors)):
        for name, value in part.items():
            if name in found:
                raise ValueError(_foreign(f"it has {name[:80]} twice"))
            found[name] = (in_vector, value)
    return found


def _below(leaves: _Leaves, name: str) -> dict[str, Any]:
    """Return the leaves by the first part of their names: a leaf, or those whose names go on."""
    found: dict[str, Any] = {}
    for key, leaf in leaves.items():
        first, dot, rest = key.partition(".")
        below = found.setdefault(first, {} if dot else leaf)
        if isinstance(below, dict) != bool(dot):
            raise ValueError(_foreign(f"it has {_joined(name, key)[:80]}"))
        if dot:
            below[rest] = leaf
    return found


def _dataclass(kind: type[Any], like: Any, leaves: _Leaves, name: str, *, in_vector: bool) -> Any:
    """Return a dataclass; ``like``, an instance or None, has the types of fields that are annotated with Any."""
    hints, tree = _hints(kind), _below(leaves, name)
    values = {}
    for field in dataclasses.fields(kind):
        known = getattr(like, field.name, None)
        hint = type(known) if dataclasses.is_dataclass(known) else hints[field.name]
        inside = field.metadata.get("vector", in_vector)
        found, below = tree.pop(field.name, None), _joined(name, field.name)
        if found is None and hints[field.name] is Any:  # a strategy that replaces a stateless one begins anew
            values[field.name] = known
            continue
        values[field.name] = _value(hint, known, found, below, in_vector=inside)
    if tree:
        raise ValueError(_foreign(f"it has {_joined(name, next(iter(tree)))[:80]}"))
    return kind(**values)


def _value(hint: Any, like: Any, found: Any, name: str, *, in_vector: bool) -> Any:
    """Return the value of a field of this type; ``found`` is its leaf, the leaves below its name, or None."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if found is None:
            return None
        meant = _meant([kind for kind in inner if kind is not type(None)], found, name)
        return _value(meant, like, found, name, in_vector=in_vector)
    if origin is None and not dataclasses.is_dataclass(hint):
        return _leaf(hint, found, name, in_vector=in_vector)
    below = {} if found is None else found
    if not isinstance(below, dict):
        raise ValueError(_foreign(f"it has {name}"))
    if dataclasses.is_dataclass(hint):
        return _dataclass(typing.cast(type[Any], hint), like, below, name, in_vector=in_vector)
    if origin is tuple:
        items = _items(int, inner[0], below, name, in_vector=in_vector)
        if sorted(items) != list(range(len(items))):
            raise ValueError(_foreign(f"it has gaps in {name}"))
        return tuple(items[i] for i in range(len(items)))
    return _items(inner[0], inner[1], below, name, in_vector=in_vector)


def _items(key_kind: Any, item: Any, leaves: _Leaves, name: str, *, in_vector: bool) -> dict[Any, Any]:
    """Return the items of a mapping; keys of numbers and tensors may contain dots."""
    values = {}
    for key, found in (leaves if item is Tensor or item in _KINDS else _below(leaves, name)).items():
        if key_kind is int and not (key.isascii() and key.isdecimal() and len(key) < 20 and str(int(key)) == key):
            raise ValueError(_foreign(f"it has {_joined(name, key)[:80]}"))
        values[key_kind(key)] = _value(item, None, found, _joined(name, key), in_vector=in_vector)
    return values


def _meant(kinds: list[Any], found: Any, name: str) -> Any:
    """Return the dataclass whose field ``kind`` was found."""
    if len(kinds) == 1:
        return kinds[0]
    leaf = found.get("kind") if isinstance(found, dict) else None
    said = leaf[1] if isinstance(leaf, tuple) and isinstance(leaf[1], str) else None
    meant = [kind for kind in kinds if kind.kind == said]
    if len(meant) != 1:
        raise ValueError(_foreign(f"it has {name}.kind = {str(said)[:80]!r}"))
    return meant[0]


def _leaf(kind: Any, found: Any, name: str, *, in_vector: bool) -> Any:
    if found is None:
        raise ValueError(_foreign(f"it has no {name}"))
    is_vector, value = found if isinstance(found, tuple) else (None, None)
    if (
        is_vector is None
        or isinstance(value, Tensor) != (kind is Tensor)
        or is_vector != (in_vector and kind is Tensor)
    ):
        raise ValueError(_foreign(f"it has something else for {name}"))
    if kind is Tensor:
        return value
    if not _is(kind, value):
        raise ValueError(f"The state has {name} = {str(value)[:80]!r}, which is no {_KINDS[kind]}. Load another.")
    return kind(value)


@functools.cache
def _hints_of(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _hints(kind: type[Any]) -> dict[str, Any]:
    """Return the types of a dataclass's fields."""
    try:
        return _hints_of(kind)  # type: ignore[arg-type]
    except NameError as error:
        raise TypeError(
            f"{kind.__name__} is a state whose annotations cannot be read: {error}. Define or import their names at "
            "the top of its module."
        ) from None


_LONGEST_WORD = 200
_KINDS: dict[type[Any], str] = {int: "whole number from 0", bool: "truth value", float: "number", str: "word"}


def _is(kind: type[Any], value: Any) -> bool:
    """Return whether a value is of this type and of a size that any file format holds; a float may be an int."""
    whole = type(value) is int and 0 <= value < 1 << 64
    word = type(value) is str and len(value) <= _LONGEST_WORD
    return {int: whole, bool: type(value) is bool, float: type(value) is float or whole, str: word}[kind]


def _joined(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


def _foreign(how: str) -> str:
    return (
        f"The state is not that of an optimizer with these settings: {how}. Make the optimizer, and the sets, as they "
        "were when the state was saved, in the version of krylov-descent that saved it."
    )


def write_state(state: OptimizerState, first: Tensor, parameters: ParameterVector, parts: Parts, comm: Comm) -> None:
    """Replace an optimizer's state; vectors are stored without a copy, as views or as this rank's parts."""
    for entry in state.values():
        entry.clear()
    entry = state[first]
    if comm.as_parameters:
        for name, x in parts.vectors.items():
            whole = comm.all_gather(x, parameters.numel)
            for p, part in zip(parameters.params, parameters.unflatten(whole), strict=True):
                # torch.save fails for a DTensor whose local part does not begin its storage.
                state[p][name] = part.clone() if is_sharded(part) else part
    else:
        entry["parts"] = {"layout": list(_layout(parameters, comm)), **parts.vectors}
    entry["numbers"], entry["tensors"] = dict(parts.numbers), dict(parts.tensors)


def read_state(state: OptimizerState, first: Tensor, parameters: ParameterVector, comm: Comm) -> Parts | None:
    """Return an optimizer's state; None if it has none.

    Raises:
        ValueError: the state is of another number of ranks.
    """
    entry = state.get(first, {})
    if "numbers" not in entry:
        return None
    own = _layout(parameters, comm)
    in_parts: dict[str, Any] | None = entry.get("parts")
    found = own if in_parts is None else tuple(in_parts["layout"])
    if comm.as_parameters and in_parts is None:
        names = dict.fromkeys(name for p in parameters.params for name in state.get(p, {}) if name not in _BESIDE)
        vectors = {name: comm.shard(_whole_vector(state, parameters, name)) for name in names}
    elif in_parts is not None and not comm.as_parameters and own == found:
        vectors = {name: x for name, x in in_parts.items() if name != "layout"}
    elif found == own:
        raise ValueError(
            "The optimizer's state is that of a run in one process, and this optimizer has a process_group. Make it "
            "without process_group=..., as in that run, or save there by krylov_descent.checkpoint and load that."
        )
    else:
        raise ValueError(
            f"The optimizer's state is that of rank {found[0]} of {found[1]} with {found[2]:,} parameters, and this is "
            f"rank {own[0]} of {own[1]} with {own[2]:,}. A state_dict holds one rank's part: to go on with other ranks "
            "or parameters, save and load by krylov_descent.checkpoint."
        )
    return Parts(vectors, dict(entry["numbers"]), dict(entry["tensors"]))


_BESIDE = ("numbers", "tensors", "parts")


def _whole_vector(state: OptimizerState, parameters: ParameterVector, name: str) -> Tensor:
    """Return a vector [P] from the states of the parameters, with zeros for parameters added since."""
    found = ((p, state.get(p, {}).get(name)) for p in parameters.params)
    return parameters.joined([torch.zeros_like(p) if t is None else t for p, t in found])


def _layout(parameters: ParameterVector, comm: Comm) -> tuple[int, ...]:
    """Return the rank, the number of ranks and P."""
    return comm.rank, comm.ranks, parameters.numel


def parts_of(entries: list[Mapping[str, Any]]) -> Parts | None:
    """Return the state in the entries of a ``state_dict``, one for each parameter; None if they are empty.

    A vector is this rank's part, or the part of one of the parameters.

    Raises:
        ValueError: the entries are none that ``write_state`` writes.
    """
    if not any(entries):
        return None
    numbers, tensors, in_parts = (entries[0].get(key, {}) for key in _BESIDE)
    vectors = {name: x for entry in entries for name, x in entry.items() if name not in _BESIDE}
    if not isinstance(in_parts, Mapping):
        raise ValueError(_foreign("its parts have no names"))
    layout = in_parts.get("layout", [0, 0, 0])
    if not isinstance(layout, list) or [type(x) for x in layout] != [int, int, int]:
        raise ValueError(_foreign(f"it has the layout {str(layout)[:80]}"))
    own = {name: x for name, x in in_parts.items() if name != "layout"}
    return require_parts((vectors | own, numbers, tensors))


def require_parts(parts: Any) -> Parts:
    """Return vectors, numbers and tensors by name.

    Raises:
        ValueError: they are something else.
    """
    if not isinstance(parts, tuple) or len(parts) != 3:
        raise ValueError(_foreign(f"it is a {type(parts).__name__}, not vectors, numbers and tensors"))
    for part in parts:
        if not isinstance(part, Mapping) or not all(isinstance(name, str) for name in part):
            raise ValueError(_foreign(f"its values have no names in a {type(part).__name__}"))
    for name, x in (*parts[0].items(), *parts[2].items()):
        if not isinstance(x, Tensor):
            raise ValueError(_foreign(f"{name[:80]} is a {type(x).__name__} and no tensor"))
    return Parts(*map(dict, parts))


def require_values(parts: Parts) -> None:
    """Require numbers that a state can have, and finite tensors; those on the device "meta" are not checked.

    Raises:
        ValueError: a number is none, or a tensor is not finite.
    """
    iteration = parts.numbers.get("iteration")
    if type(iteration) is not int or iteration < 0:
        said = f"The state has iteration = {str(iteration)[:80]!r}, which is no count of steps."
        raise ValueError(f"{said} Load another.")
    for name, value in parts.numbers.items():  # also those of a sample policy that is not known before the next step
        counted = name != "seed" and type(value) is int and value >= 1 << 63
        if type(value) not in _KINDS or not _is(type(value), value) or counted:
            raise ValueError(f"The state has {name[:80]} = {str(value)[:80]!r}, which no state has. Load another.")
    for name, x in {**parts.vectors, **parts.tensors}.items():
        local = x.to_local() if is_sharded(x) else x
        # θ may have entries that the loss does not use, and that are not finite.
        if name != "earlier" and not x.is_meta and not bool(local.isfinite().all()):
            raise ValueError(f"The state cannot be used: {name[:80]} is not finite. Load an older one.")


def require_whole(parts: Parts, parameters: ParameterVector) -> None:
    """Require finite vectors of these parameters in a whole state; values on the device "meta" are not checked.

    Raises:
        ValueError: a vector does not fit or is not finite, or the parameters are DTensors.
    """
    require_plain(parameters.params)
    require_values(parts)
    for name, x in parts.vectors.items():
        if [*x.shape] != [parameters.numel] or x.dtype != parameters.dtype:
            raise ValueError(
                f"The state is one of another model: {name[:80]} is {[*x.shape]} of {x.dtype}, and the parameters are "
                f"{parameters.numel} numbers of {parameters.dtype}. Build the model as it was when it was saved."
            )


def on_rank(parts: Parts, parameters: ParameterVector, comm: Comm) -> Parts:
    """Return this rank's part of a whole state."""
    vectors = {name: comm.shard(x.to(parameters.device)) for name, x in parts.vectors.items()}
    tensors = {name: x.to(parameters.device) if x.ndim else x for name, x in parts.tensors.items()}
    return Parts(vectors, dict(parts.numbers), tensors)
