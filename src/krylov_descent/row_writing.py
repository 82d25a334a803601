"""Rows of a closure's outputs, hundreds at a time wherever that is confirmed to give what a backward pass gives.

Letters: z outputs [N, …], S [s] chosen rows of them, u [s, …] a cotangent for each; a row of the Jacobian is uᵀ∂z/∂θ.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from krylov_descent.jacobian import OwnWeights, Place, along, write_rows, write_rows_one_by_one
from krylov_descent.objective import PROBE, Objective

_ROUNDING = 1000  # ε of the largest column: what the small ones may be off by


class RowWriter:
    """What is known of one closure: of which outputs rows may be had together."""

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}
        self.refuted: set[int] = set()

    def write(
        self,
        objective: Objective,
        samples: int,
        own: OwnWeights,
        i: int,
        z: Tensor,
        place: Place | None,
        S: Tensor,
        u: Tensor,
        block: Tensor,
    ) -> None:
        """Rows of output i into ``block`` [s, P]; one by one where no place is known, or it was refuted."""
        params = objective.parameters.params
        views = _columns(block, params)
        if place is not None and i not in self.refuted:
            write_rows(own, z, place, S, u, views)
            if not self._due(i) or _confirmed(z, S, u, params, block):
                objective.sample_gradients += PROBE * samples  # not for judging, which a resumed run repeats
                return
            self.refuted.add(i)
        write_rows_one_by_one(z, S, u, params, views)
        objective.sample_gradients += PROBE * samples * len(S)

    def _due(self, i: int) -> bool:
        """At calls 1, 2, 4, 8, … of an output: a closure changes its path rarely, if at all."""
        calls = self._calls[i] = self._calls.get(i, 0) + 1
        return calls & (calls - 1) == 0


def _columns(block: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Views [s, …] of a block's columns, in the parameters' shapes."""
    views, at = [], 0
    for p in params:
        views.append(block[:, at : at + p.numel()].view(len(block), *p.shape))
        at += p.numel()
    return views


def _confirmed(z: Tensor, S: Tensor, u: Tensor, params: Sequence[Tensor], block: Tensor) -> bool:
    """Whether a combination of the rows is what a backward pass gives, column by column."""
    w = torch.linspace(-1, 1, len(S), dtype=block.dtype, device=block.device).cos_().add_(0.5)
    w[::2] *= -1
    wu = u * w.reshape(-1, *(1,) * (u.ndim - 1)).to(u.dtype)
    expected = torch.cat(
        [
            p.new_zeros(p.numel()) if g is None else g.reshape(-1)
            for g, p in zip(along(z, S, wu, params), params, strict=True)
        ]
    ).to(block)
    if not bool(expected.isfinite().all()):
        return True  # says nothing of the closure
    # Rows of neighbouring points may cancel in the sum: what rounds is as large as they are, not as it is.
    size = torch.maximum(expected.abs(), w.abs() @ block.abs())
    eps = max(torch.finfo(x.dtype).eps for x in (block, u, *params))
    allowed = eps**0.5 * size + _ROUNDING * eps * size.max()
    return bool(((w @ block - expected).abs() <= allowed).all())
