"""Collectives over the mesh of sharded parameters: vectors follow the parameters' placements.

Letters: p a parameter, P the total size of all local parts on this rank, k the number of ranks with the same part of p.
All ranks evaluate the same closure together, as DTensor requires: losses, weights and counts are those of the whole
micro-batch, equal on every rank. On each rank, θ and vectors like it are the concatenated local parts of the
parameters. A part that k ranks share is cut into k pieces, and each rank keeps one of them in V, g and D. So every
number has one owner, one small sum completes inner products, and copies of a parameter stay equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from krylov_descent.distributed.comm import RankError
from krylov_descent.distributed.process_group import all_gather, explained
from krylov_descent.distributed.sharded import is_sharded


class MeshComm:
    """Collectives for vectors in parts that follow the parameters' placements."""

    def __init__(self, params: Sequence[Tensor], sizes: Sequence[int]) -> None:
        meshes = {p.device_mesh for p in params if is_sharded(p)}
        if len(meshes) != 1:
            raise ValueError(
                f"KSD needs all DTensor parameters on one mesh; found {len(meshes)}: {meshes}. Use one mesh with a "
                "dimension for each, and Replicate() where a parameter is not cut."
            )
        self._mesh = meshes.pop()
        self.rank, self.ranks = self._mesh.get_rank(), self._mesh.size()
        self.shard_of_sets, self.as_parameters = (0, 1), True
        self.sent = 0
        self._sizes = list(sizes)
        # Dimensions of the mesh → parameters replicated along them.
        self._alike: dict[tuple[int, ...], list[int]] = {}
        for i, p in enumerate(params):
            if is_sharded(p):
                bad = [x for x in p.placements if not (x.is_shard() or x.is_replicate())]
                if bad:
                    raise ValueError(f"A parameter has placements {p.placements}: must be Shard or Replicate.")
            dims = tuple(
                d
                for d in range(self._mesh.ndim)
                if self._mesh.size(d) > 1 and (not is_sharded(p) or p.placements[d].is_replicate())
            )
            self._alike.setdefault(dims, []).append(i)
        self._trivial = set(self._alike) == {()}

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks of the mesh."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        """Return the maximum over all ranks of the mesh."""
        return self._reduced(x, dist.ReduceOp.MAX)

    def total(self, x: Tensor, failure: Exception | None = None) -> Tensor:
        """Return ``x``: every rank has evaluated all samples."""
        if float(self.max(torch.tensor(float(failure is not None), device="cpu"))):
            raise failure or RankError("Another rank of the mesh failed, so this one cannot go on.", connected=True)
        return x

    def dot(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x·y over all ranks."""
        return self._reduced(self.shard(x) @ self.shard(y), dist.ReduceOp.SUM)

    def reduce_scatter(
        self, x: Tensor, out: Tensor | None = None, *, exact: bool = False, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Return ``shard(x)``: gradients are already summed when they get the parameters' placements."""
        return self.shard(x)

    def bounds(self, numel: int) -> None:
        """Return None: this rank's numbers are scattered over [P]."""

    def shard(self, x: Tensor) -> Tensor:
        """Return the numbers that this rank owns."""
        if self._trivial:
            return x
        parts = torch.split(x, self._sizes)
        owned = []
        for dims, indices in self._alike.items():
            alike = torch.cat([parts[i] for i in indices])
            if dims:
                size, rank = self._piece(dims, len(alike))
                alike = alike[rank * size : (rank + 1) * size]
            owned.append(alike)
        return torch.cat(owned)

    def all_gather(self, x: Tensor, numel: int, *, row: bool = False) -> Tensor:
        """Return the local parts of all parameters, from the pieces of the ranks that share them."""
        if self._trivial:
            return x
        parts: list[Tensor] = [x] * len(self._sizes)
        start = 0
        for dims, indices in self._alike.items():
            sizes = [self._sizes[i] for i in indices]
            n = sum(sizes)
            if dims:
                size, rank = self._piece(dims, n)
                own = max(0, min(n, (rank + 1) * size) - rank * size)
                piece = x.new_zeros(size)
                piece[:own] = x[start : start + own]
                for d in reversed(dims):  # row-major: the last dimension's pieces lie side by side
                    gathered = piece.new_empty(self._mesh.size(d) * len(piece))
                    with explained(self.rank, self.ranks):
                        all_gather(gathered, piece, group=self._mesh.get_group(d))
                    self.sent += piece.nbytes * (self._mesh.size(d) - 1)
                    piece = gathered
                alike, start = piece[:n], start + own
            else:
                alike, start = x[start : start + n], start + n
            for i, part in zip(indices, torch.split(alike, sizes), strict=True):
                parts[i] = part
        return torch.cat(parts)

    def _piece(self, dims: Sequence[int], n: int) -> tuple[int, int]:
        """Return the size of a piece of n numbers replicated along ``dims``, and the number of this rank's piece."""
        rank = 0
        for d in dims:
            rank = rank * self._mesh.size(d) + self._mesh.get_local_rank(d)
        return -(-n // math.prod(self._mesh.size(d) for d in dims)), rank

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        y = x.to(self._mesh.device_type, torch.float64, copy=True)
        for d in range(self._mesh.ndim):
            with explained(self.rank, self.ranks):
                dist.all_reduce(y, op, group=self._mesh.get_group(d))
            self.sent += 2 * y.nbytes * (self._mesh.size(d) - 1) // self._mesh.size(d)
        return y.to(x.device, x.dtype)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("An optimizer of parameters on a mesh cannot be copied or pickled: save its state_dict().")
