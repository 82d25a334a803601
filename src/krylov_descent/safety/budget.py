"""What a step needs of memory, and what to do where it does not fit: arithmetic and words, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

_SHARE = 0.8  # of the memory at hand that may be taken


@dataclass(frozen=True)
class Storage:
    """How the basis V is kept: K+1 vectors of all parameters, by far the largest thing that a step holds.

    Args:
        dtype: None keeps V as the parameters are. ``torch.bfloat16`` halves it for float32 parameters,
            ``torch.float32`` for float64 ones; inner products are still taken in the parameters' dtype, and the search
            still moves by exact combinations of what is stored. docs/performance.md has the cost of each.
        device: None keeps V where the parameters are; "cpu" keeps it in host memory for a model on an accelerator.

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
    """The needs of a step.

    Attributes:
        budget: the bytes that may be taken.
        vectors: K+1.
        length: P of each, on this rank.
        dtype: of the parameters.
        device: of the parameters.
        storage: how V is kept.
        parts: into how many micro-batches B is cut.
        graphs: bytes of the graphs of all of B; None before one was built.
        factors: bytes, at most, of those of a Kronecker-factored preconditioner; 0 for others.
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
        """Bytes of V on the parameters' device."""
        kept_at = self.device if self.storage.device is None else torch.device(self.storage.device)
        if kept_at.type != self.device.type:
            return 0
        return self._bytes(self.storage.dtype or self.dtype)

    @property
    def for_graphs(self) -> int:
        """What V and the factors leave of the budget."""
        return self.budget - self.basis - self.factors

    def refusal(self) -> str | None:
        """What to say if V and the factors alone are beyond the budget."""
        if self.for_graphs >= 0:
            return None
        kept = self.storage.dtype or self.dtype
        return (
            f"The basis takes {self.basis:,} bytes ({self.vectors} vectors of {self.length:,} parameters in "
            f"{_name(kept)}){self._and_factors()}, more than memory_budget={self.budget:,}. Remedies: "
            f"{'; '.join(self._smaller())}."
        )

    def warning(self) -> str | None:
        """What to say if V fits and the graphs of B do not."""
        if self.graphs is None or self.graphs <= self.for_graphs:
            return None
        kept = max(0, self.parts * self.for_graphs // max(1, self.graphs))
        return (
            f"The basis takes {self.basis:,} bytes{self._and_factors()} and the graphs of B about {self.graphs:,}, "
            f"more than memory_budget={self.budget:,}: about {kept} of {self.parts} graphs are kept and the rest "
            f"rebuilt for every product, which makes a product on them 1.7 times as long. Remedies: memory_budget="
            f"{self.basis + self.factors + self.graphs:,}; a smaller Subsets(batch_size=...), so that more of them fit "
            f"one by one; a smaller Subsets(fraction=...); {'; '.join(self._smaller())}."
        )

    def _and_factors(self) -> str:
        return f", the factors of preconditioner='kronecker' up to {self.factors:,}" if self.factors else ""

    def _smaller(self) -> list[str]:
        """Ways to less, with what each takes and costs."""
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
    """Bytes of memory that are free, as far as the system tells."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # what torch keeps for later
        return int(torch.cuda.mem_get_info(device)[0]) + idle
    if device.type == "cpu":
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        except (OSError, StopIteration):
            pass
    return None


def share(available: int) -> int:
    """The part of what is at hand that a step may take."""
    return int(_SHARE * available)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
