"""Verification of rules: every rule is compared with autograd before it is used, and again on a schedule.

A rule replaces backward passes: for squares of per-sample gradients (preconditioners/fisher.py), factors of a layer
(preconditioners/statistics.py), rows of a Jacobian (flow/jacobian_rows.py). ``Trust`` keeps the comparisons' verdicts.

Letters as in layers/rules.py: δ = ∂loss/∂(output) of a layer's call, G the gradient of a parameter (or a signed sum of
per-sample gradients), u and v random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from krylov_descent.layers.rules import Layer, discrepancy

COARSE = 5e-4  # ε from which rounding hides the errors that a comparison should find


def due(n: int) -> bool:
    """Whether rules are compared at the n-th occasion: at 1, 4, 16 and every 64th.

    A change of the closure's path, which is rare, is noticed after at most 64 occasions.
    """
    return n in (1, 4, 16) or n % 64 == 0


def tolerance(eps: float) -> float:
    """Return the allowed error of a sum of products, relative to its terms; deep autoencoders reach 20 ε."""
    return min(0.1, 1000 * eps)


class Found(NamedTuple):
    """The verdicts of a comparison, by index; an undecided rule is in neither set."""

    confirmed: set[int]
    refuted: set[int]


class Trust:
    """The verdicts on rules, by the index of a parameter or an output; a rule in neither set is unjudged.

    Attributes:
        trusted: rules that were confirmed and never refuted.
        refuted: rules that were ever refuted.
    """

    def __init__(self) -> None:
        self.trusted: set[int] = set()
        self.refuted: set[int] = set()

    def learn(self, found: Found) -> None:
        """Add the verdicts of a comparison."""
        self.refuted |= found.refuted
        self.trusted = (self.trusted | found.confirmed) - self.refuted

    def judged(self, indices: Iterable[int]) -> bool:
        """Whether none of these is unjudged."""
        return (self.trusted | self.refuted).issuperset(indices)


class Witness:
    """The value of uᵀGv by a layer's rule, to be compared with G itself."""

    def __init__(self, layer: Layer, indices: Mapping[bool, int], random: Callable[[int], Tensor]) -> None:
        self._indices = indices
        self._u, self._v = map(random, layer.widths())
        self._along = layer.along(self._u, self._v)

    def compare(self, G: Mapping[int, Tensor], s: Tensor | None) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield (index, error, scale of rounding) of each parameter in G; s are the signs of the samples in G."""
        for is_weight, i in self._indices.items():
            if i in G:
                v = self._v if is_weight else None
                yield i, *discrepancy(self._along[is_weight], G[i].to(self._u.dtype), s, self._u, v)


def compared(errors: Iterable[tuple[int, Tensor, Tensor]], relative: float) -> Found:
    """Return the verdicts from (index, error, scale of rounding) and the tolerance relative to that scale."""
    errors = list(errors)
    if not errors:
        return Found(set(), set())
    error = torch.stack([e for _, e, _ in errors]).abs()
    size = torch.stack([size for _, _, size in errors])
    # Overflows and zeros decide nothing: any rule agrees in front of a layer of zeros, a common initialisation.
    finite = error.isfinite() & size.isfinite()
    agrees = error <= relative * size
    right, wrong = torch.stack([finite & agrees & (size > 0), finite & ~agrees]).tolist()
    indices = [i for i, _, _ in errors]
    return Found(
        {i for i, is_right in zip(indices, right, strict=True) if is_right},
        {i for i, is_wrong in zip(indices, wrong, strict=True) if is_wrong},
    )
