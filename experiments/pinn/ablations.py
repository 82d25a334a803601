"""The rational basis with one of its parts taken away, to see what each is worth."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

#: Part → the constant that has it, and the value that takes it away. They are no settings: users need none of them.
PARTS: Mapping[str, tuple[str, str, float]] = {
    "bend": ("krylov_descent.flow", "_BEND", 0.0),  # no acceleration is believed
    "gathering": ("krylov_descent.rational", "_WAIT", 1),  # damped steps at once
    "growth": ("krylov_descent.rational", "_OFTEN", 1.0),  # sketches keep their rows
    "large-rows": ("krylov_descent.row_choice", "_LARGE", math.inf),  # all rows are drawn alike
    "small-damping": ("krylov_descent.rational", "_LEAST", 1e-14),  # what a Gram matrix could resolve
    "short-pieces": ("krylov_descent.rational", "_LONGEST", 1.0),
}


@contextmanager
def without(part: str) -> Iterator[None]:
    """Inside, the rational basis lacks it.

    Raises:
        ValueError: there is no such part.
    """
    if part not in PARTS:
        raise ValueError(f"The rational basis has no part {part!r} to be taken away; it has {', '.join(PARTS)}.")
    name, constant, value = PARTS[part]
    module = importlib.import_module(name)
    usual = getattr(module, constant)
    setattr(module, constant, value)
    try:
        yield
    finally:
        setattr(module, constant, usual)
