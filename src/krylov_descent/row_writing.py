"""Rows of a closure's outputs, hundreds at a time wherever that is confirmed to give what a backward pass gives.

Letters: z outputs [N, …], S [s] chosen rows of them, u [k, s, …] k cotangents for each; a row of the Jacobian is
uᵀ∂z/∂θ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.jacobian import OwnWeights, Place, along, write_rows, write_rows_one_by_one
from krylov_descent.objective import PROBE, Objective

_ROUNDING = 1000  # ε of the largest column: what the small ones may be off by
_COARSE, _ROUGHLY = 1e-3, 0.3  # ε from which whole parameters are compared, not columns, and how closely


class MovedError(Exception):
    """Rows come from other places than they did."""


@dataclass(frozen=True, eq=False)
class Wanted:
    """Rows of one output: which of them, its place, S, and u; ``samples`` is what a call of the closure costs."""

    output: int
    z: Tensor
    place: Place | None
    S: Tensor
    u: Tensor
    samples: int

    @property
    def rows(self) -> int:
        """k·s."""
        return self.u.shape[0] * self.u.shape[1]


class RowWriter:
    """What is known of one closure on batches of one size: of which outputs rows may be had together."""

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}
        self.refuted: set[int] = set()

    def write(
        self, objective: Objective, own: OwnWeights, wanted: Wanted, block: Tensor, moved: Callable[[], bool]
    ) -> None:
        """Rows into ``block`` [k·s, P]; one by one where no place is known, or it was refuted.

        Args:
            objective: what is evaluated.
            own: with which the closure was called.
            wanted: which rows.
            block: where they go.
            moved: looks again where the rows come from, and says whether that has changed.

        Raises:
            MovedError: it has: all has to be done anew.
        """
        params = objective.parameters.params
        calls = self._calls[wanted.output] = self._calls.get(wanted.output, 0) + 1
        due = calls & (calls - 1) == 0  # at calls 1, 2, 4, 8, …: a closure changes its path rarely, if at all
        if wanted.place is not None and (due or wanted.output not in self.refuted):
            passes = _write_together(own, wanted, wanted.place, params, block)
            if not (due or _vacant(wanted, block)) or _confirmed(wanted, params, block, own.eps, calls):
                self.refuted.discard(wanted.output)
                objective.sample_gradients += (
                    PROBE * wanted.samples * passes
                )  # not for judging: a resumed run repeats it
                return
            if moved():
                raise MovedError
            self.refuted.add(wanted.output)
        s = len(wanted.S)
        for k, u in enumerate(wanted.u):
            write_rows_one_by_one(wanted.z, wanted.S, u, params, _columns(block[k * s : (k + 1) * s], params))
        objective.sample_gradients += PROBE * wanted.samples * wanted.rows


def _write_together(own: OwnWeights, wanted: Wanted, place: Place, params: Sequence[Tensor], block: Tensor) -> int:
    s = len(wanted.S)
    return sum(
        write_rows(own, wanted.z, place, wanted.S, u, _columns(block[k * s : (k + 1) * s], params))
        for k, u in enumerate(wanted.u)
    )


def _columns(block: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Views [s, …] of a block's columns, in the parameters' shapes."""
    views, at = [], 0
    for p in params:
        views.append(block[:, at : at + p.numel()].view(len(block), *p.shape))
        at += p.numel()
    return views


def _vacant(wanted: Wanted, block: Tensor) -> bool:
    """Whether some row of zeros should perhaps not be: so it looks where rows no longer come from their place."""
    size = torch.linalg.vector_norm(block, dim=1)  # vectorised, as that of the largest element is not
    asked = (wanted.u != 0).reshape(wanted.rows, -1).any(1)
    return bool(((size == 0) & asked).any())


def _confirmed(wanted: Wanted, params: Sequence[Tensor], block: Tensor, coarsest: float, seed: int) -> bool:
    """Whether a random combination of the rows is what a backward pass gives, column by column."""
    u = wanted.u
    random = torch.Generator("cpu").manual_seed(seed)
    w = torch.rand(wanted.rows, generator=random, dtype=torch.float64, device="cpu") + 0.5
    w[torch.rand(wanted.rows, generator=random, device="cpu") < 0.5] *= -1
    w = w.to(block)
    wu = (u * w.reshape(*u.shape[:2], *(1,) * (u.ndim - 2)).to(u.dtype)).sum(0)
    slopes = along(wanted.z, wanted.S, wu, params)
    expected = torch.cat(
        [p.new_zeros(p.numel()) if g is None else g.reshape(-1) for g, p in zip(slopes, params, strict=True)]
    ).to(block)
    if not bool(expected.isfinite().all()):
        return True  # says nothing of the closure
    error = w @ block - expected
    eps = max(coarsest, *(torch.finfo(x.dtype).eps for x in (block, u, *params)))
    if eps > _COARSE:  # columns of half precision are too noisy to tell; a parameter that is left out shows
        size = torch.maximum(expected.abs(), (w.square() @ block.square()).sqrt())
        parts = ([part.norm() for part in torch.split(x, [p.numel() for p in params])] for x in (error, size))
        return all(bool(off <= _ROUGHLY * whole) for off, whole in zip(*parts, strict=True))
    # Rows of neighbouring points may cancel in the sum: what rounds is as large as they are, not as it is.
    size = torch.maximum(expected.abs(), w.abs() @ block.abs())
    return bool((error.abs() <= eps**0.5 * size + _ROUNDING * eps * size.max()).all())
