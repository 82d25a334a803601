"""Storage of the basis V in any dtype and on any device; products are computed in those of the vectors.

Letters: V [m, P] rows, x [P] a vector, c [m] coefficients; P counts this rank's part of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_CHUNK = 1 << 21  # elements of V converted at a time
_CACHED = 1 << 15  # columns of V that fit a CPU's cache: best of 2^12 … 2^17 at 5, 10 and 20 rows


class BasisStorage:
    """The rows of V, in a buffer for ``capacity`` rows.

    If its dtype or device differs from the vectors', V is converted in chunks, so that no second V ever exists.

    Attributes:
        m: the number of rows in use.
        dtype, device: those of the vectors.
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
    def of(cls, V: Tensor) -> BasisStorage:
        """Return the rows of a tensor V, without a copy.

        Example:
            >>> BasisStorage.of(torch.eye(3)).dots(torch.arange(3.0))
            tensor([0., 1., 2.])
        """
        rows = cls(0, V[0])
        rows._buffer, rows.m = V, len(V)
        return rows

    @property
    def direct(self) -> bool:
        """Whether V has the dtype and device of the vectors."""
        return self._buffer.dtype == self.dtype and self._buffer.device == self.device

    @property
    def eps(self) -> float:
        """The rounding of a row as it is stored."""
        return torch.finfo(self._buffer.dtype).eps

    def holds(self, capacity: int, like: Tensor) -> bool:
        """Return whether this buffer fits ``capacity`` vectors like this one."""
        shape = (capacity, like.numel())
        return self._buffer.shape == shape and (self.dtype, self.device) == (like.dtype, like.device)

    def begin(self, u: Tensor) -> Tensor:
        """Return a copy of u to be modified in place; it is the next row itself if V is direct."""
        return self._buffer[self.m].copy_(u) if self.direct else u.clone()

    def append(self, x: Tensor) -> None:
        """Make x, which ``begin`` returned, the next row."""
        if not self.direct:
            self._buffer[self.m].copy_(x)
        self.m += 1

    def row(self, i: int) -> Tensor:
        """Return a row in the vectors' dtype: a view if V is direct, otherwise a copy."""
        return self._buffer[i].to(self.device, self.dtype)

    def dots(self, x: Tensor) -> Tensor:
        """Return V x [m]."""
        if self.direct:
            return self._buffer[: self.m] @ x
        total = torch.zeros(self.m, dtype=self.dtype, device=self.device)
        for i, j, part in self._parts():
            total += part @ x[i:j]
        return total

    def products(self, xs: Sequence[Tensor]) -> Tensor:
        """Return V x [n, m] of n vectors; each part of V is read from memory once."""
        total = torch.zeros(len(xs), self.m, dtype=self.dtype, device=self.device)
        for i, j, part in self._parts(self._together):
            total.addmm_(torch.stack([x[i:j] for x in xs]), part.T)
        return total

    def combine(self, c: Tensor) -> Tensor:
        """Return Vᵀc [P]."""
        if self.direct:
            return self._buffer[: self.m].T @ c
        d = torch.empty(self._buffer.shape[1], dtype=self.dtype, device=self.device)
        for i, j, part in self._parts():
            torch.mv(part.T, c, out=d[i:j])
        return d

    def subtract(self, c: Tensor, x: Tensor) -> None:
        """Subtract Vᵀc from x, in place."""
        if self.direct:
            x.addmv_(self._buffer[: self.m].T, c, alpha=-1)
            return
        for i, j, part in self._parts():
            x[i:j].addmv_(part.T, c, alpha=-1)

    def sweep(self, c: Tensor, x: Tensor) -> Tensor:
        """Subtract Vᵀc from x, in place, and return V x and x·x of the result [m + 1].

        Each part of V is read from memory once. Sums of few parts are as accurate as one of few numbers.
        """
        total = torch.zeros(self.m + 1, dtype=self.dtype, device=self.device)
        for i, j, part in self._parts(self._together):
            rest = x[i:j].addmv_(part.T, c, alpha=-1)
            total[:-1].addmv_(part, rest)
            total[-1] += rest @ rest
        return total

    def gram(self) -> Tensor:
        """Return V Vᵀ [m, m]."""
        if self.direct:
            return self._buffer[: self.m] @ self._buffer[: self.m].T
        total = torch.zeros(self.m, self.m, dtype=self.dtype, device=self.device)
        for _, _, part in self._parts():
            total.addmm_(part, part.T)
        return total

    def tensor(self) -> Tensor:
        """Return V in the vectors' dtype: a view if V is direct, otherwise a copy."""
        return self._buffer[: self.m].to(self.device, self.dtype)

    @property
    def _together(self) -> int | None:
        """The number of columns of V to read at a time for several uses: all of them where each part is a launch."""
        if not self.direct:
            return None
        return _CACHED if self.device.type == "cpu" else max(1, self._buffer.shape[1])

    def _parts(self, step: int | None = None) -> Iterator[tuple[int, int, Tensor]]:
        """Yield i, j and the columns [i, j) of V, converted."""
        stop = self._buffer.shape[1]
        step = step or max(1, _CHUNK // max(1, self.m))
        for i in range(0, stop, step):
            j = min(stop, i + step)
            yield i, j, self._buffer[: self.m, i:j].to(self.device, self.dtype)
