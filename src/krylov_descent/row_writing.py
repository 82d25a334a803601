"""Rows of a closure's outputs, hundreds at a time wherever that is confirmed to give what a backward pass gives.

Letters: z outputs [N, …], S [s] chosen rows of them, u [k, s, …] k cotangents for each; a row of the Jacobian is
uᵀ∂z/∂θ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.jacobian import OwnWeights, Place, along, write_rows, write_rows_one_by_one
from krylov_descent.objective import PROBE, Objective
from krylov_descent.output_hessian import cotangents

_ROUNDING = 1000  # ε of the largest column: what the small ones may be off by
_HARDLY = 16  # rows, up to which a backward pass has hardly more than one
_AGAIN = 32  # calls after which rows are looked at again at the latest
_COARSE, _ROUGHLY = 5e-4, 0.3  # ε from which whole parameters are compared, not columns, and how closely


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

    @property
    def apart(self) -> bool:
        """Whether they are combinations of a few rows with many entries: a backward pass for hardly more than one."""
        k, s, *entries = self.u.shape
        return k > 1 and s <= _HARDLY and cotangents(math.prod(entries)) == 1


class RowWriter:
    """What is known of one closure on batches of one size: of which outputs rows may be had together."""

    def __init__(self) -> None:
        self._calls: dict[int, int] = {}
        self._vacant: dict[int, int] = {}  # rows of zeros that were confirmed, at most: hard constraints have some
        self.refuted: set[int] = set()

    def write(
        self, objective: Objective, own: OwnWeights, wanted: Wanted, block: Tensor, moved: Callable[[], bool]
    ) -> int:
        """Rows into ``block`` [k·s, P]; one by one where no place is known, or it was refuted; → how many that were.

        Args:
            objective: what is evaluated.
            own: with which the closure was called.
            wanted: which rows.
            block: where they go.
            moved: looks again where the rows come from, and says whether that has changed.

        Raises:
            MovedError: it has: all has to be done anew.
        """
        params, i = objective.parameters.params, wanted.output
        calls = self._calls[i] = self._calls.get(i, 0) + 1
        # At calls 1, 2, 4, …, 32, 64, 96, …: a closure changes its path rarely, if at all.
        due = calls & (calls - 1) == 0 or calls % _AGAIN == 0
        if wanted.place is not None:
            wrong = i in self.refuted
            if not wrong:
                passes = _write_together(own, wanted, wanted.place, params, block)
                vacant = _vacant(own, wanted, params, block)
                if due or vacant > self._vacant.get(i, 0):
                    wrong = not _confirmed(wanted, params, block, own.eps, calls)
                    self._vacant[i] = max(vacant, self._vacant.get(i, 0))
            if not wrong:
                objective.sample_gradients += PROBE * wanted.samples * passes  # not for judging, which is repeated
                return wanted.rows if wanted.apart else 0
            if (due or i not in self.refuted) and moved():
                raise MovedError
            self.refuted.add(i)
        s = len(wanted.S)
        for k, u in enumerate(wanted.u):
            write_rows_one_by_one(wanted.z, wanted.S, u, params, _columns(block[k * s : (k + 1) * s], params))
        objective.sample_gradients += PROBE * wanted.samples * wanted.rows
        return wanted.rows


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


def _vacant(own: OwnWeights, wanted: Wanted, params: Sequence[Tensor], block: Tensor) -> int:
    """How many rows are zero in the columns of linear layers: all, where rows no longer come from their place."""
    views = _columns(block, params)
    sizes = [torch.linalg.vector_norm(views[i].reshape(len(block), -1), dim=1) for i in own.inside]
    asked = (wanted.u != 0).reshape(wanted.rows, -1).any(1)
    return int(((torch.stack(sizes).amax(0) == 0) & asked).sum()) if sizes else 0


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
