"""Ranks that may hang and be killed: new processes for each use, forked from one that has imported torch already."""

from __future__ import annotations

import multiprocessing
import pickle
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

# The first optimizer of a process imports torch._dynamo, which takes a second.
_MODULES = ["reliability.training", "reliability.problems", "krylov_descent.checkpoint", "torch._dynamo", "numpy"]


def preloaded() -> ForkServerContext:
    """Where processes start with torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_MODULES)
    return context


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, negative for a signal, None if it had to be stopped; and what it returned."""

    code: int | None
    result: Any


def _serve(directory: Path, rank: int, ranks: int, seconds: float, function: Callable[..., Any], args: Any) -> None:
    warnings.simplefilter("error")
    import torch

    torch.set_num_threads(1)
    group = None if ranks == 1 else _joined(directory, rank, ranks, seconds)
    result = function(group, *args)
    temporary = directory / f".{rank}"
    temporary.write_bytes(pickle.dumps(result))
    temporary.rename(directory / str(rank))


def _joined(directory: Path, rank: int, ranks: int, seconds: float) -> Any:
    """The group of all of them."""
    import torch.distributed as dist

    # Joining may take long where others compute; what is tested is the timeout of the group.
    dist.init_process_group(
        "gloo", init_method=f"file://{directory / 'store'}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    return dist.new_group(timeout=timedelta(seconds=seconds))


class Running:
    """Ranks at work."""

    def __init__(self, ranks: int, seconds: float, function: Callable[..., Any], args: Sequence[Any]) -> None:
        context = preloaded()
        self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._processes = [
            context.Process(target=_serve, args=(self._directory, rank, ranks, seconds, function, tuple(args)))
            for rank in range(ranks)
        ]
        for process in self._processes:
            process.start()

    @property
    def pids(self) -> list[int]:
        """Of the ranks."""
        return [process.pid or 0 for process in self._processes]

    def alive(self) -> bool:
        """Whether any rank is still at work."""
        return any(process.exitcode is None for process in self._processes)

    def ends(self, wait_for: Sequence[int] | None = None, timeout: float = 100) -> list[Ended]:
        """How they end; those that are not waited for are stopped after the others."""
        until = time.monotonic() + timeout
        for rank in range(len(self._processes)) if wait_for is None else wait_for:
            self._processes[rank].join(timeout=max(0.0, until - time.monotonic()))
        ended = []
        for rank, process in enumerate(self._processes):
            path = self._directory / str(rank)
            ended.append(Ended(process.exitcode, pickle.loads(path.read_bytes()) if path.is_file() else None))
        self.stop()
        return ended

    def stop(self) -> None:
        """End what is left."""
        for process in self._processes:
            process.kill()
            process.join()
        shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def running(ranks: int, seconds: float, function: Callable[..., Any], *args: Any) -> Iterator[Running]:
    """function(group, *args) on new processes, in a group whose timeout is ``seconds``; a single one has no group."""
    run = Running(ranks, seconds, function, args)
    try:
        yield run
    finally:
        run.stop()
