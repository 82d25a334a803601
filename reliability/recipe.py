"""A random problem as plain values: what may be chosen, and the problem of a seed.

The choices are one table. ``Problem.drawn`` draws from it by a seed; the tests give the same table to hypothesis,
which makes a failure small. Either way a problem prints as something that can be pasted:
``Problem(network='mlp', ...)``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from reliability.closures import RAISES, RETURNS
from reliability.losses import LANDSCAPES, LOSSES
from reliability.methods import METHODS
from reliability.models import ACTIVATIONS, MODELS, ODDITIES


@dataclass(frozen=True)
class Problem:
    """A network, data, a loss, settings of a method, and perhaps something wrong with them."""

    network: str
    width: int
    activation: str
    oddity: str
    outputs: int
    loss: str
    dtype: str
    samples: int
    inputs: str
    targets: str
    input_exponent: int
    target_exponent: int
    weight_exponent: int
    condition_exponent: int
    grad: bool
    sets: str
    krylov_dim: int
    method: str
    curvature: str
    preconditioner: str
    previous: str
    search: str
    rows: int
    weight_decay: float
    rollback: bool
    memory: str
    fault: str
    fault_call: int
    steps: int
    seed: int

    @classmethod
    def drawn(cls, method: str, seed: int, kind: str = "odd problem") -> Problem:
        """The problem of a seed, for a method: the same on every machine, and the same for all methods."""
        chance = random.Random(f"{kind} {seed}")
        choices = CHOICES | _OF_KIND[kind]
        return replace(cls(**{name: chance.choice(values) for name, values in choices.items()}), method=method)


def _mostly(common: Any, times: int, *rare: Any) -> tuple[Any, ...]:
    """Each of the rare ones once, the common one so often: one thing at a time should be wrong, mostly."""
    return (common,) * times + rare


_EXPONENTS = _mostly(0, 250, *range(-20, 0), *range(1, 21))

#: The values of each field of ``Problem``; each is as likely as it is often here. The first is the simplest.
CHOICES: dict[str, tuple[Any, ...]] = {
    "network": (*MODELS, "mlp", "mlp", "deep mlp", "vector", "lstm", "conv2d"),
    "width": (1, 2, 3, 5, 8),
    "activation": _mostly("tanh", 6, *[name for name in ACTIVATIONS if name != "tanh"]),
    "oddity": _mostly("none", 5 * len(ODDITIES), *ODDITIES),
    "outputs": (1, 2, 3),
    "loss": _mostly("squared", 6, *LOSSES, "cross entropy", "cross entropy", "bce", "bce"),
    "dtype": ("float64", "float64", "float64", "float32", "float32", "float32", "bfloat16", "bfloat16 throughout"),
    "samples": _mostly(7, 3, 1, 2, 3, 16, 33),
    "inputs": _mostly("random", 50, "constant", "zeros", "equal columns", "nan", "inf", "all nan"),
    "targets": _mostly("random", 50, "constant", "zeros", "reachable", "nan", "inf", "too large", "negative"),
    "input_exponent": _EXPONENTS,
    "target_exponent": _EXPONENTS,
    "weight_exponent": _EXPONENTS,
    "condition_exponent": _mostly(0, 10, 4, 8, 12, 16),
    "grad": (False, False, True),
    "sets": ("full", "full", "full", "subsets", "half", "tenth", "single batches"),
    "krylov_dim": (3, 1, 1, 2, 2, 3, 4, 4, 6, 8, 20, 64),
    "method": tuple(METHODS),
    "curvature": _mostly("ggn", 2, "hessian", "fisher"),
    "preconditioner": _mostly("fisher", 3, "none", "kronecker"),
    "previous": ("step", "step", "e1", "none"),
    "search": _mostly("default", 4, "absolute", "short", "tiny floor"),
    "rows": (400, 400, 3),
    "weight_decay": _mostly(0.0, 20, 1e-3, 1.0, 10.0, 1e20, 1e300),
    "rollback": (True, True, True, False),
    "memory": _mostly("default", 8, "bfloat16 basis", "float32 basis", "rebuilt graphs", "no room"),
    "fault": ("none",),
    "fault_call": (1, 2, 3, 4, 5, 8, 13, 21, 34, 55),
    "steps": (2, 3),
    "seed": tuple(range(1000)),
}
_SOUND: dict[str, tuple[Any, ...]] = {
    **{name: (0,) for name in CHOICES if name.endswith("exponent")},
    "oddity": ("none",),
    "inputs": ("random",),
    "targets": ("random",),
    "weight_decay": (0.0, 0.0, 0.0, 1e-3),
    "memory": ("default",),
}
#: What is drawn otherwise, by the kind of problem.
_OF_KIND: dict[str, dict[str, tuple[Any, ...]]] = {
    "odd problem": {},
    "exception": {
        **_SOUND,
        "loss": ("squared", "squared", "cross entropy", "bce", "huber", "masked", "two outputs"),
        "samples": (7, 16, 33),
        "fault": (*RETURNS, *RAISES, *RAISES, *RAISES),
    },
    "NaN region": {
        **_SOUND,
        "network": ("mlp", "deep mlp", "linear", "linear", "vector", "vector", "vector", "lstm"),
        "activation": ("tanh", "relu", "identity", "exp", "sqrt"),
        "loss": LANDSCAPES,
        "dtype": ("float32", "float64"),
        "samples": (1, 7, 16, 33),
        "inputs": ("random", "whole numbers", "whole numbers"),
        "targets": ("random", "zeros", "reachable", "reachable"),
        "steps": (8,),
    },
}
