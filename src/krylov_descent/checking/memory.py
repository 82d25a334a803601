"""``memory_of``: the bytes of a step on each rank, before a run and without the memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krylov_descent.base import CurvatureOptimizer, whole
from krylov_descent.checking.finding import bytes_in_words
from krylov_descent.checking.restore import as_found
from krylov_descent.distributed import SingleProcess
from krylov_descent.samples.interface import Microbatch


@dataclass(frozen=True)
class MemoryReport:
    """The memory of a rank at the peak of a step.

    Attributes:
        ranks: R.
        phase: the phase of the step that has the peak.
        owners: bytes by owner.
    """

    ranks: int
    phase: str
    owners: Mapping[str, int]

    @property
    def total(self) -> int:
        """The sum over owners."""
        return sum(self.owners.values())

    def __str__(self) -> str:
        on = "in one process" if self.ranks == 1 else f"on each of {self.ranks:,} ranks"
        lines = [f"{bytes_in_words(self.total)} {on}, at the peak of a step ({self.phase}):"]
        lines += [f"  {bytes_in_words(size):>10}  {owner}" for owner, size in self.owners.items() if size]
        return "\n".join(lines)


class _Planned(SingleProcess):
    """One of R ranks, which do not run."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def shard(self, x: Tensor) -> Tensor:
        return x[: -(-len(x) // self.ranks)]


def memory_of(
    optimizer: CurvatureOptimizer, closure: Callable[[Any], Any] | None = None, batch: Any = None, *, ranks: int = 1
) -> MemoryReport:
    """Return the bytes that a step of this optimizer takes on each of R ranks, by owner.

    Nothing is allocated for parameters on the device "meta". Graphs are counted if a closure is given. ``DEEP`` is
    counted with the earlier steps that it has once growing sets hold all samples.

    Args:
        optimizer: KSD or GaussNewtonFlow, made as for the run, with parameters on any device and without ranks.
        closure: as for ``step``; called on the parameters' device. The model is unchanged afterwards.
        batch: the closure's argument, as large as B of one rank; None for a closure without one.
        ranks: R.

    Raises:
        ValueError: ``ranks`` is no number of ranks.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD
        >>> from krylov_descent.checking import memory_of
        >>> model = torch.nn.Linear(10_000, 10_000, device="meta")
        >>> report = memory_of(KSD(model.parameters()), ranks=8)
        >>> report.phase, f"{report.total:,}", f"{report.owners['basis']:,}"
        ('search', '3,558,743,608', '1,050,105,000')
    """
    if whole("ranks", ranks) < 1:
        raise ValueError(f"ranks={ranks}: must be a whole number ≥ 1.")
    parameters = optimizer._parameters()
    with as_found(None, parameters.params) as seen, torch.enable_grad():
        # dict is not called.
        objective = optimizer._objective(closure or dict, batch if closure else None, parameters, seen)
        objective.comm = _Planned(ranks)
        phases = optimizer._phases(objective, None if closure is None else Microbatch(batch, None))
    phase = max(phases, key=lambda phase: sum(phases[phase].values()))
    return MemoryReport(ranks, phase, phases[phase])
