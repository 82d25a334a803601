"""A random problem as plain values: what may be chosen, and the problem of a seed.

The choices are one table. ``Problem.of_seed`` draws from it by a seed; the tests give the same table to hypothesis,
which makes a failure small. Either way a problem prints as something that can be pasted:
``Problem(network='mlp', ...)``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

NETWORKS = ("mlp", "conv1d", "conv2d", "rnn", "lstm", "gru", "attention", "tied", "twice", "embedding", "vector")
ACTIVATIONS = ("tanh", "relu", "gelu", "softplus", "sigmoid", "elu", "sine", "identity", "exp", "sqrt")
#: What is odd about the parameters.
ODDITIES = (
    "frozen",
    "all frozen",
    "unused",
    "unused nan",
    "zero-size",
    "only zero-size",
    "0-d",
    "transposed",
    "batch norm",
    "dropout",
    "nan weight",
    "zero weights",
)
LOSSES = (
    "squared",
    "cross entropy",
    "bce",
    "huber",
    "l1",
    "log cosh",
    "poisson",
    "quartic",
    "log",
    "root",
    "linear",
    "concave",
    "constant",
    "coupled",
    "sum",
    "masked",
    "two outputs",
)
#: What the closure does that it should not, from call ``fault_call`` on.
RETURNS = (
    "nothing",
    "float",
    "integer loss",
    "complex loss",
    "loss of many elements",
    "loss without elements",
    "loss without graph",
    "list",
    "four values",
    "no values",
    "loss alone",
    "outputs none",
    "outputs text",
    "outputs integer",
    "outputs empty",
    "outputs without graph",
    "outputs twice",
    "outputs softmax",
    "outputs flattened",
    "outputs cut",
    "weight negative",
    "weight nan",
    "weight zero",
    "weight text",
    "swapped",
    "backward",
    "random",
    "nan loss",
    "inf loss",
    "nan outputs",
    "other parameters",
)
#: What it raises at call ``fault_call``, once.
RAISES = (
    "RuntimeError",
    "RuntimeError of grad",
    "RuntimeError of twice",
    "ValueError",
    "IndexError",
    "Unusual",
    "KeyboardInterrupt",
    "SystemExit",
    "GeneratorExit",
    "StopIteration",
    "MemoryError",
    "OutOfMemoryError",
)


@dataclass(frozen=True)
class Problem:
    """A network, data, a loss, settings of an optimizer, and perhaps something wrong with them."""

    network: str
    depth: int
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
    sets: str
    krylov_dim: int
    method: str
    curvature: str
    preconditioner: str
    previous: str
    search: str
    weight_decay: float
    rollback: bool
    memory: str
    fault: str
    fault_call: int
    steps: int
    seed: int

    @classmethod
    def of_seed(cls, seed: int) -> Problem:
        """The problem of a seed: the same on every machine."""
        chance = random.Random(seed)
        return cls(**{name: chance.choice(values) for name, values in CHOICES.items()})

    @property
    def case(self) -> str:
        """What is tried with it, by what is strangest."""
        tried = {
            "closure raises": self.fault in RAISES,
            "closure returns the wrong thing": self.fault in RETURNS,
            "labels out of range": self.targets.startswith("labels"),
            "NaN or inf in data": any(word in f"{self.inputs} {self.targets}" for word in ("nan", "inf")),
            "scales 1e-20 to 1e20": any((self.input_exponent, self.target_exponent, self.weight_exponent)),
            "condition numbers 1e4 to 1e16": self.condition_exponent > 0,
            "one sample, constant data": self.samples == 1 or self.inputs != "random" or self.targets != "random",
            "odd parameters": self.oddity != "none",
            "K beyond the rank": self.krylov_dim >= 20,
        }
        return next((name for name, is_tried in tried.items() if is_tried), "ordinary")


def _mostly(common: Any, times: int, *rare: Any) -> tuple[Any, ...]:
    """Each of the rare ones once, the common one so often: one thing at a time should be wrong, mostly."""
    return (common,) * times + rare


_EXPONENTS = _mostly(0, 160, *range(-20, 0), *range(1, 21))

#: The values of each field of ``Problem``; each is as likely as it is often here. The first is the simplest.
CHOICES: dict[str, tuple[Any, ...]] = {
    "network": _mostly("mlp", 6, *NETWORKS[1:], "tied", "vector", "vector"),
    "depth": (1, 0, 2, 3),
    "width": (1, 2, 3, 5, 8),
    "activation": _mostly("tanh", 3, *ACTIVATIONS[1:]),
    "oddity": _mostly("none", 3 * len(ODDITIES), *ODDITIES),
    "outputs": (1, 2, 3),
    "loss": _mostly("squared", 6, *LOSSES[1:], "cross entropy", "cross entropy", "bce", "bce"),
    "dtype": ("float64", "float64", "float32", "float32", "float32", "bfloat16", "bfloat16 throughout"),
    "samples": _mostly(7, 3, 1, 1, 2, 3, 12, 20),
    "inputs": _mostly("random", 30, "constant", "constant", "zeros", "equal columns", "nan", "inf", "all nan"),
    "targets": _mostly("random", 30, "constant", "zeros", "nan", "inf", "labels too large", "labels negative"),
    "input_exponent": _EXPONENTS,
    "target_exponent": _EXPONENTS,
    "weight_exponent": _EXPONENTS,
    "condition_exponent": _mostly(0, 10, 4, 6, 8, 10, 12, 14, 16),
    "sets": ("full", "full", "full", "subsets", "half", "tenth", "single batches"),
    "krylov_dim": (3, 1, 1, 2, 2, 3, 4, 4, 6, 8, 20, 64),
    "method": _mostly("ksd", 3, "flow", "flow of 3 rows"),
    "curvature": _mostly("ggn", 2, "hessian", "fisher"),
    "preconditioner": _mostly("fisher", 2, "none", "paper"),
    "previous": ("step", "step", "e1", "none"),
    "search": _mostly("default", 4, "absolute", "short", "tiny floor"),
    "weight_decay": _mostly(0.0, 12, 1e-3, 1.0, 10.0, 1e20, 1e300),
    "rollback": (True, True, True, False),
    "memory": _mostly("default", 8, "bfloat16 basis", "float32 basis", "rebuilt graphs", "no room"),
    "fault": _mostly("none", 2 * len(RETURNS + RAISES), *RETURNS, *RAISES),
    "fault_call": (1, 2, 3, 4, 5, 8, 13, 21, 34, 55),
    "steps": (2, 3),
    "seed": tuple(range(1000)),
}
