"""Settings of a method: keyword arguments with a default of the function that makes it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any


def defaults(make: Callable[..., Any]) -> dict[str, Any]:
    """All settings as they are unless given."""
    return {name: parameter.default for name, parameter in _parameters(make).items()}


def given(name: str, make: Callable[..., Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings to be changed; strings are read as what the method's function says it takes.

    Raises:
        ValueError: no such setting, or a value that cannot be it.
    """
    known = _parameters(make)
    read = {}
    for key, value in changes.items():
        key = key.replace("-", "_")
        if key not in known:
            raise ValueError(f"{name} has no setting {key!r}; it has {', '.join(known) or 'none'}.")
        read[key] = _read(f"{name}: {key}", value, str(known[key].annotation)) if isinstance(value, str) else value
    return read


def pair(text: str) -> tuple[str, str]:
    """The two sides of a ``--set key=value``."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--set {text!r} is not understood; write --set key=value.")
    return key.replace("-", "_"), value


def goes_by_budget(make: Callable[..., Any]) -> bool:
    """Whether the function takes the ``seconds`` of a run, which are no setting."""
    return "seconds" in inspect.signature(make).parameters


def _parameters(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(make).parameters
    found = {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    return {name: p for name, p in found.items() if name != "seconds"}


def _read(name: str, text: str, kind: str) -> Any:
    """A setting from the command line: text, a truth value, or a number that is not negative."""
    if kind.endswith("| None") and text.lower() == "none":
        return None
    if kind.startswith("str"):
        return text
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name}={text!r} must be true or false.")
        return text.lower() == "true"
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number.") from None
    whole = kind.startswith("int")
    if not 0 <= number < math.inf or (whole and number != int(number)):
        raise ValueError(f"{name}={text!r} must be a {'whole ' * whole}number, 0 or more.")
    return int(number) if whole else number
