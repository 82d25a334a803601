"""Communication between ranks: a small protocol, the identity for one process, and torch.distributed."""

from krylov_descent.distributed.comm import (
    Comm,
    RankError,
    SingleProcess,
    added,
    defer_error,
    part_length,
    run_on_all,
    stacked,
)
from krylov_descent.distributed.process_group import ProcessGroup, Ranks

__all__ = [
    "Comm",
    "ProcessGroup",
    "RankError",
    "Ranks",
    "SingleProcess",
    "added",
    "defer_error",
    "part_length",
    "run_on_all",
    "stacked",
]
