"""The memory of a step by phase and owner, known before a run: what each method's own file counts up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from krylov_descent.distributed import Comm
from krylov_descent.vectors.parameters import ParameterVector

_BUCKET = 2 << 20  # numbers that a collective of vectors holds beside them

Phases = Mapping[str, Mapping[str, int]]
"""Bytes on a rank by phase and owner."""


@dataclass(frozen=True)
class Vectors:
    """Bytes of vectors of all parameters on a rank."""

    parameters: ParameterVector
    comm: Comm

    def whole(self, count: float) -> int:
        """Return the bytes of so many vectors that the rank holds whole."""
        return int(count * self.parameters.numel) * self.parameters.dtype.itemsize

    def parts(self, count: float) -> int:
        """Return the bytes of the rank's parts of so many vectors."""
        return int(count * -(-self.parameters.numel // self.comm.ranks)) * self.parameters.dtype.itemsize

    @property
    def always(self) -> dict[str, int]:
        """The owners that are there in every phase; each of several ranks has θ twice, to restore it alone."""
        several = self.comm.ranks > 1
        theta = sum(p.nbytes for p in self.parameters.local) + several * self.whole(1)
        sending = several * min(_BUCKET, 2 * self.parameters.numel) * self.parameters.dtype.itemsize
        return {"parameters": theta, "last step": self.parts(2), "collectives": sending}
