"""The rows of V, stored in a dtype and on a device of their own, seen by the maths in the vectors' own.

Letters: V [m, P] rows, x [P] a vector, c [m] coefficients; P stands for this rank's part of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_CHUNK = 1 << 21  # elements of V that are converted at a time
_CACHED = 1 << 15  # columns of V that stay in the cache between two uses: best of 2^14 … 2^17 at 10 and 20 rows


class Rows:
    """V, in a buffer made once for ``capacity`` rows.

    Stored as the vectors are, V is used where it lies. In another dtype or on another device it is converted in chunks,
    so that no second V ever exists.

    Attributes:
        m: the rows so far.
        dtype, device: of the vectors.
    """

    def __init__(
        self,
        capacity: int,
        like: Tensor,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._buffer = torch.empty(
            capacity, like.numel(), dtype=dtype or like.dtype, device=like.device if device is None else device
        )
        self.dtype, self.device = like.dtype, like.device
        self.m = 0

    @classmethod
    def of(cls, V: Tensor) -> Rows:
        """Rows that are there already.

        Example:
            >>> Rows.of(torch.eye(3)).dots(torch.arange(3.0))
            tensor([0., 1., 2.])
        """
        rows = cls(0, V[0])
        rows._buffer, rows.m = V, len(V)
        return rows

    @property
    def direct(self) -> bool:
        """Whether V is stored as the vectors are."""
        return self._buffer.dtype == self.dtype and self._buffer.device == self.device

    def holds(self, capacity: int, like: Tensor) -> bool:
        """Whether this buffer serves ``capacity`` vectors like this one."""
        shape = (capacity, like.numel())
        return self._buffer.shape == shape and (self.dtype, self.device) == (like.dtype, like.device)

    def begin(self, u: Tensor) -> Tensor:
        """A copy of u to be worked on in place; where V is direct, in the next row itself."""
        return self._buffer[self.m].copy_(u) if self.direct else u.clone()

    def stage(self, x: Tensor) -> Tensor:
        """Put x where the next row will be; returns it as it is stored."""
        if self.direct:
            return x
        return x.copy_(self._buffer[self.m].copy_(x))

    def dots(self, x: Tensor) -> Tensor:
        """V x [m]."""
        if self.direct:
            return self._buffer[: self.m] @ x
        total = torch.zeros(self.m, dtype=self.dtype, device=self.device)
        for i, j, part in self._parts():
            total += part @ x[i:j]
        return total

    def combine(self, c: Tensor) -> Tensor:
        """Vᵀc [P]."""
        if self.direct:
            return self._buffer[: self.m].T @ c
        d = torch.empty(self._buffer.shape[1], dtype=self.dtype, device=self.device)
        for i, j, part in self._parts():
            torch.mv(part.T, c, out=d[i:j])
        return d

    def subtract(self, c: Tensor, x: Tensor) -> None:
        """x −= Vᵀc, in place."""
        if self.direct:
            x.addmv_(self._buffer[: self.m].T, c, alpha=-1)
            return
        for i, j, part in self._parts():
            x[i:j].addmv_(part.T, c, alpha=-1)

    def sweep(self, c: Tensor, x: Tensor) -> Tensor:
        """x −= Vᵀc, in place, and V x of what is left: each part of V is read once, and used again from the cache."""
        total = torch.zeros(self.m, dtype=self.dtype, device=self.device)
        for i, j, part in self._parts(_CACHED if self.direct else None):
            total.addmv_(part, x[i:j].addmv_(part.T, c, alpha=-1))
        return total

    def gram(self) -> Tensor:
        """V Vᵀ [m, m]."""
        if self.direct:
            return self._buffer[: self.m] @ self._buffer[: self.m].T
        total = torch.zeros(self.m, self.m, dtype=self.dtype, device=self.device)
        for _, _, part in self._parts():
            total.addmm_(part, part.T)
        return total

    def tensor(self) -> Tensor:
        """All rows, in the vectors' dtype: a view where V is direct, otherwise a copy as large as V."""
        return self._buffer[: self.m].to(self.device, self.dtype)

    def _parts(self, step: int | None = None) -> Iterator[tuple[int, int, Tensor]]:
        """Columns [i, j) of V, converted."""
        stop = self._buffer.shape[1]
        step = step or max(1, _CHUNK // max(1, self.m))
        for i in range(0, stop, step):
            j = min(stop, i + step)
            yield i, j, self._buffer[: self.m, i:j].to(self.device, self.dtype)
