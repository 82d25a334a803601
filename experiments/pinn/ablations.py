"""The Gauss–Newton flow changed in one thing, or with one of its parts taken away, to see what each is worth."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

#: Part → the constants that have it, and the value that takes it away. They are no settings: users need none of them.
PARTS: Mapping[str, tuple[str, str, float]] = {
    "corrections": ("krylov_descent.flow.straight_steps", "_MOST", 0),  # steps are ηφ
    "later-corrections": ("krylov_descent.flow.straight_steps", "_MOST", 1),  # geodesic acceleration
    "reach": ("krylov_descent.flow.factored", "_FAR", math.inf),  # φ may be far longer than θ
    "growth": ("krylov_descent.flow.step", "_OFTEN", 1.0),  # sketches keep their rows
    "large-rows": ("krylov_descent.flow.row_sampling", "_LARGE", math.inf),  # all rows are drawn alike
    "small-damping": ("krylov_descent.flow.step", "_LEAST", 1e-14),  # what a Gram matrix could resolve
    "share": ("krylov_descent.flow.factored", "_ENOUGH", -math.inf),  # λ by the length of steps alone
}

#: Label → what of a run is not as usual, fields of ``RunConfig``; the last two labels are those that ``run`` gives.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    **{f"without-{part}": {"settings": {"without": part}} for part in PARTS},
    "without-momentum": {"settings": {"momentum": 0.0}},
    **{f"rows-{m}": {"settings": {"rows": m}} for m in (100, 200, 800, 1600)},
    "flow-resample10": {"resample": 10},
    "flow-float32": {"dtype": "float32"},
}


@contextmanager
def without(part: str) -> Iterator[None]:
    """Inside, the flow lacks it.

    Raises:
        ValueError: there is no such part.
    """
    if part not in PARTS:
        raise ValueError(f"The flow has no part {part!r} to be taken away; it has {', '.join(PARTS)}.")
    name, constants, value = PARTS[part]
    module = importlib.import_module(name)
    usual = {constant: getattr(module, constant) for constant in constants.split()}
    try:
        for constant in usual:
            setattr(module, constant, value)
        yield
    finally:
        for constant, before in usual.items():
            setattr(module, constant, before)
