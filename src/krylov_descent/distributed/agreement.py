"""Doing things together: what fails on one rank fails on all, and none waits for another that gave up.

``group`` is a process group, or None for a single process, where all of this is nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from krylov_descent.distributed.comm import RankError

T = TypeVar("T")


def rank_in(group: Any) -> tuple[int, int]:
    """The own rank, and the number of ranks.

    Example:
        >>> rank_in(None)
        (0, 1)
    """
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def gather(group: Any, value: T) -> list[T]:
    """The small values of all ranks."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    with explained(group):
        dist.all_gather_object(values, value, group=group)
    return values


def together(group: Any, work: Callable[[], T]) -> T:
    """What ``work`` returns on this rank.

    Raises:
        Exception: what it raised on this rank.
        RankError: it raised on another.
    """
    failure = None
    try:
        result = work()
    except Exception as error:
        failure = error
    texts = gather(group, None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    _raise_others(group, {rank: text for rank, text in enumerate(texts) if text is not None})
    return result


def by_first(group: Any, work: Callable[[], T]) -> T:
    """What ``work`` returns on rank 0, on every rank."""
    result = together(group, lambda: work() if rank_in(group)[0] == 0 else None)
    first: Any = gather(group, result)[0]
    return first  # type: ignore[no-any-return]


@contextmanager
def explained(group: Any) -> Iterator[None]:
    """Errors of torch.distributed and its checkpoints as ours: the own one as it was, others as RankError."""
    rank, ranks = rank_in(group)
    try:
        with warnings.catch_warnings():
            # Said of every checkpoint in a single process, where it is meant.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:
        failures = {r: failure for r, (failure, _) in error.failures.items()}
        if rank in failures:
            raise failures[rank] from None
        _raise_others(group, {r: f"{type(failure).__name__}: {failure}" for r, failure in failures.items()})
    except RankError:
        raise
    except RuntimeError as error:
        raise RankError(
            f"Rank {rank} of {ranks} lost the others during a checkpoint: one of them died or hung longer than the "
            f"process group's timeout. Look at the output of each rank for the first error "
            f"({str(error).splitlines()[0]}).",
            connected=False,
        ) from error


def _raise_others(group: Any, texts: dict[int, str]) -> None:
    if texts:
        rank, ranks = rank_in(group)
        raise RankError(
            f"Rank {', '.join(map(str, texts))} of {ranks} failed, so that rank {rank} cannot go on: "
            f"{texts[min(texts)]}",
            connected=True,
        )
