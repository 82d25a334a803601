"""Trials in processes of their own: one that hangs or dies is lost, and the next one goes on in a new process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

from reliability.matrix import FAULTS, Cell, trial
from reliability.processes import preloaded


def _work(pipe: Connection) -> None:
    """Trials as they are asked for."""
    os.setsid()  # so that it can be ended with the workers that load its samples
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    # Those that load samples, as in a user's program; else a process of the fork server has its children by it, too.
    multiprocessing.set_start_method("fork", force=True)
    import torch

    torch.set_num_threads(1)
    while True:
        fault, method, seed = pipe.recv()
        try:
            pipe.send(trial(method, fault, seed))
        except Exception:
            pipe.send(_lost((fault, method, seed), f"the trial itself failed: {traceback.format_exc()[-600:]}"))


def _lost(cell: Cell, why: str) -> dict[str, Any]:
    fault, method, seed = cell
    return {"fault": fault, "method": method, "seed": seed, "outcome": "lost", "lost": True, "times": 1, "why": why}


class _Worker:
    """A process at work on a trial."""

    def __init__(self) -> None:
        self.pipe, other = multiprocessing.Pipe()
        self._process = preloaded().Process(target=_work, args=(other,))
        self._process.start()
        other.close()
        self.cell: Cell | None = None
        self._until = 0.0

    def take(self, cell: Cell) -> None:
        """Begin a trial."""
        self.cell, self._until = cell, time.monotonic() + FAULTS[cell[0]].seconds
        self.pipe.send(cell)

    def ended(self) -> dict[str, Any] | None:
        """The record of its trial, or None while it is at work; a worker that has no cell then is dead."""
        assert self.cell is not None
        cell = self.cell
        try:
            if self.pipe.poll():
                return dict(self.pipe.recv())
        except (EOFError, OSError):
            self._process.join()
            self.cell = None
            return _lost(cell, f"its process ended with {self._process.exitcode}")
        if time.monotonic() > self._until:
            self.stop()
            self.cell = None
            return _lost(cell, f"no end after {FAULTS[cell[0]].seconds:.0f} s")
        return None

    def stop(self) -> None:
        """End it, and what it has started."""
        try:
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it had not begun
            self._process.kill()
        self._process.join()


def run(wanted: Iterable[Cell], report: Callable[[dict[str, Any]], None], jobs: int) -> None:
    """All trials, some at a time; ``report`` is given the record of each."""
    left, workers = deque(wanted), list[_Worker]()
    try:
        while left or workers:
            while left and len(workers) < jobs:
                workers.append(_Worker())
                workers[-1].take(left.popleft())
            wait([worker.pipe for worker in workers], timeout=0.5)
            for worker in workers[:]:
                record = worker.ended()
                if record is None:
                    continue
                report(record)
                # What a trial leaves behind, above all one that was lost, must not spoil one of another kind.
                if left and worker.cell and left[0][0] == worker.cell[0] and not record["lost"]:
                    worker.take(left.popleft())
                else:
                    worker.stop()
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.stop()
