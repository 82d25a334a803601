"""The memory that a step needs, and messages with remedies if it does not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

_SHARE = 0.8  # part of the free memory that a step may take


@dataclass(frozen=True)
class Storage:
    """Chooses dtype and device of the basis V: K+1 vectors of all parameters, the largest memory of a step.

    Args:
        dtype: the dtype of V; None is that of the parameters. ``torch.bfloat16`` halves V for float32 parameters,
            ``torch.float32`` for float64 ones; inner products are still taken in the parameters' dtype, and the search
            still moves by exact combinations of the stored vectors. docs/appendix/speed.md has the cost of each.
        device: the device of V; None is that of the parameters, "cpu" is host memory for a model on an accelerator.

    Example:
        >>> from krylov_descent import KSD, Storage
        >>> optimizer = KSD([torch.nn.Parameter(torch.ones(3))], storage=Storage(dtype=torch.bfloat16))
    """

    dtype: torch.dtype | None = None
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ValueError(f"Storage(dtype={self.dtype!r}): must be a floating-point torch.dtype or None.")
        if self.device is not None:
            try:
                torch.device(self.device)
            except (RuntimeError, TypeError):
                raise ValueError(f"Storage(device={self.device!r}): must be a device such as 'cpu', or None.") from None


@dataclass(frozen=True)
class Need:
    """The memory needs of a step.

    Attributes:
        budget: the bytes that may be taken.
        vectors: K+1, the number of vectors in V.
        length: the length of each vector on this rank.
        dtype: the dtype of the parameters.
        device: the device of the parameters.
        storage: the storage of V.
        parts: the number of micro-batches of B.
        graphs: bytes of the graphs of all of B; None before one was built.
        factors: an upper bound of the bytes of Kronecker factors; 0 for other preconditioners.
    """

    budget: int
    vectors: int
    length: int
    dtype: torch.dtype
    device: torch.device
    storage: Storage
    parts: int = 1
    graphs: int | None = None
    factors: int = 0

    @property
    def basis(self) -> int:
        """The bytes of V on the parameters' device."""
        kept_at = self.device if self.storage.device is None else torch.device(self.storage.device)
        if kept_at.type != self.device.type:
            return 0
        return self._bytes(self.storage.dtype or self.dtype)

    @property
    def for_graphs(self) -> int:
        """The bytes of the budget that V and the factors leave for graphs."""
        return self.budget - self.basis - self.factors

    def refusal(self) -> str | None:
        """Return an error message if V and the factors alone exceed the budget."""
        if self.for_graphs >= 0:
            return None
        kept = self.storage.dtype or self.dtype
        return (
            f"The basis takes {self.basis:,} bytes ({self.vectors} vectors of {self.length:,} parameters in "
            f"{_name(kept)}){self._and_factors()}, more than memory_budget={self.budget:,}. Remedies: "
            f"{'; '.join(self.smaller())}."
        )

    def warning(self) -> str | None:
        """Return a warning if V fits and the graphs of B do not."""
        if self.graphs is None or self.graphs <= self.for_graphs:
            return None
        kept = max(0, self.parts * self.for_graphs // max(1, self.graphs))
        return (
            f"The basis takes {self.basis:,} bytes{self._and_factors()} and the graphs of B about {self.graphs:,}, "
            f"more than memory_budget={self.budget:,}: about {kept} of {self.parts} graphs are kept and the rest "
            f"rebuilt for every product, which makes a product on them 1.7 times as long. Remedies: memory_budget="
            f"{self.basis + self.factors + self.graphs:,}; a smaller Subsets(batch_size=...), so that more of them fit "
            f"one by one; a smaller Subsets(fraction=...); {'; '.join(self.smaller())}."
        )

    def _and_factors(self) -> str:
        return f", the factors of preconditioner='kronecker' up to {self.factors:,}" if self.factors else ""

    def smaller(self) -> list[str]:
        """Return ways to need less memory, each with its size and cost."""
        kept = self.storage.dtype or self.dtype
        ways = ["preconditioner='fisher', which has no factors"] if self.factors else []
        if self.device.type != "cpu" and self.storage.device is None:
            ways.append("Storage(device='cpu') keeps V in host memory (each use then crosses the bus)")
        if kept == torch.float64:
            ways.append(
                f"Storage(dtype=torch.float32), {self._bytes(torch.float32):,} bytes "
                "(basis and search 1.4 times as long)"
            )
        if kept.itemsize > 2:
            ways.append(
                f"Storage(dtype=torch.bfloat16), {self._bytes(torch.bfloat16):,} bytes "
                "(basis and search 1.3 times as long)"
            )
        if self.dtype == torch.float64:
            ways.append("float32 parameters, which halve everything")
        fitting = (self.budget - self.factors) // max(1, self._bytes(kept) // self.vectors) - 1
        if 1 <= fitting < self.vectors - 1:
            ways.append(f"krylov_dim={fitting}")
        ways.append("a larger memory_budget")
        return ways

    def _bytes(self, dtype: torch.dtype) -> int:
        return self.vectors * self.length * dtype.itemsize


def at_hand(device: torch.device) -> int | None:
    """Return the bytes of free memory, or None if the system does not tell."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached by torch
        return int(torch.cuda.mem_get_info(device)[0]) + idle
    if device.type == "cpu":
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        except (OSError, StopIteration):
            pass
    return None


def share(available: int) -> int:
    """Return the part of the free memory that a step may take."""
    return int(_SHARE * available)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
