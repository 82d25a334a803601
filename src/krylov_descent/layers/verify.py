"""Which layer rules may be trusted: put to the test once by a signed pull-back, watched ever after by the gradient.

Letters as in layers/rules.py: δ = ∂loss/∂(output) of a layer's call, G the gradient of a parameter (or a signed sum of
per-sample gradients), u and v random.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from krylov_descent.distributed.sharded import is_sharded
from krylov_descent.layers.rules import Layer, discrepancy, fits, has_rule, layer_of


class Verdict:
    """Which rules attribute rows to the right samples; found out once for each parameter, at some cost, and kept.

    Attributes:
        judged: the parameters (by index) whose rule was put to the test.
        trusted: those of them that passed.
    """

    def __init__(self) -> None:
        self.judged: set[int] = set()
        self.trusted: set[int] = set()


class Call:
    """One recorded call of a module that may have a rule.

    Attributes:
        output: the tensor whose gradient δ is.
        indices: is it the weight? → the index of the parameter.
    """

    def __init__(self, module: nn.Module, a: Tensor, output: Tensor, indices: Mapping[bool, int]) -> None:
        self._module, self._a = module, a
        self.output, self.indices = output, indices

    def fits(self, samples: int) -> bool:
        """Whether the shapes are those of a layer with a rule."""
        return fits(self._module, self._a, self.output, samples)

    def layer(self, delta: Tensor, dtype: torch.dtype, scale: float) -> Layer:
        """The layer with its δ, where the shapes fit."""
        return layer_of(self._module, self._a.detach().to(dtype), delta.to(dtype), scale)


@contextmanager
def recorded_calls(index: Mapping[int, int]) -> Iterator[list[Call]]:
    """The calls inside of modules with a rule that own parameters in ``index`` (id → position).

    KSD is given parameters, not a model, so a global hook finds the modules. A module called several times is left out:
    the square of a sum is known to no single call.
    """
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []
    calls: list[Call] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        own = [p for p in module._parameters.values() if p is not None]
        # Rules are for layers whose parameters are all here; those of others take the probe.
        owns = any(id(p) in index for p in own) and not any(map(is_sharded, own))
        if owns and has_rule(module) and all(isinstance(x, Tensor) for x in (*args, output)) and len(args) == 1:
            seen.append((module, args[0], output))

    handle = register_module_forward_hook(hook)
    try:
        yield calls
    finally:
        handle.remove()
    times = Counter(id(module) for module, _, _ in seen)
    for module, a, output in seen:
        if times[id(module)] == 1 and output.requires_grad:
            positions = {name: index.get(id(module._parameters.get(name))) for name in ("bias", "weight")}
            calls.append(
                Call(module, a, output, {name == "weight": i for name, i in positions.items() if i is not None})
            )


class Witness:
    """What a layer's δ says of uᵀGv, to be compared with G itself."""

    def __init__(self, layer: Layer, indices: Mapping[bool, int], random: Callable[[int], Tensor]) -> None:
        self._indices = indices
        self._u, self._v = map(random, layer.widths())
        self._along = layer.along(self._u, self._v)

    def compare(self, G: Mapping[int, Tensor], s: Tensor | None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(index, error, scale of rounding) of each parameter that is in G; s are the signs of the samples in it."""
        for is_weight, i in self._indices.items():
            if i in G:
                v = self._v if is_weight else None
                yield i, *discrepancy(self._along[is_weight], G[i].to(self._u.dtype), s, self._u, v)


def right_and_wrong(
    witnesses: Sequence[Witness], G: Mapping[int, Tensor], s: Tensor | None, tolerance: float
) -> tuple[set[int], set[int]]:
    """The parameters whose rules reproduce G, and those whose do not; neither where all is zero and nothing is told."""
    compared = [entry for witness in witnesses for entry in witness.compare(G, s)]
    if not compared:
        return set(), set()
    indices = [i for i, _, _ in compared]
    error = torch.stack([e for _, e, _ in compared]).abs()
    size = torch.stack([size for _, _, size in compared])
    # After an overflow none agrees, and before a layer of zeros, as many are at first, any does.
    finite = error.isfinite() & size.isfinite()
    agrees = error <= tolerance * size
    right, wrong = (finite & agrees & (size > 0)).tolist(), (finite & ~agrees).tolist()
    return (
        {i for i, is_right in zip(indices, right, strict=True) if is_right},
        {i for i, is_wrong in zip(indices, wrong, strict=True) if is_wrong},
    )
