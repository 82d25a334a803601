"""How ranks talk: a small protocol, its single-process form, the identity, and torch.distributed."""

from krylov_descent.distributed.comm import (
    Comm,
    RankError,
    SingleProcess,
    added,
    attempt,
    part_length,
    stacked,
    together,
)
from krylov_descent.distributed.process_group import ProcessGroup, Ranks

__all__ = [
    "Comm",
    "ProcessGroup",
    "RankError",
    "Ranks",
    "SingleProcess",
    "added",
    "attempt",
    "part_length",
    "stacked",
    "together",
]
