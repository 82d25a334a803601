"""Real processes for the tests, started once: each test sends a function to as many of them as it has ranks."""

from __future__ import annotations

import multiprocessing
import pickle
import queue
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

WORLD = 4


def _serve(rank: int, store: str, inbox: Any, outbox: Any) -> None:
    warnings.simplefilter("error")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in range(1, WORLD + 1)}
    while True:
        task = inbox.get()
        if task is None:
            break
        number, function, ranks, arguments = pickle.loads(task)
        try:
            outbox.put((number, rank, True, pickle.dumps(function(groups[ranks], *arguments))))
        except BaseException as error:
            told = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            outbox.put((number, rank, False, pickle.dumps(told)))
    dist.destroy_process_group()


class RanksFailedError(AssertionError):
    """A function raised on some rank: what each of them said."""

    def __init__(self, said: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in said.items()))
        self.said = said


class Pool:
    """Four processes that wait for work; new ones after a test that lost some."""

    def __init__(self) -> None:
        self._number = 0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = Path(tempfile.mkdtemp()) / "store"
        self._inboxes = [context.Queue() for _ in range(WORLD)]
        self._outbox = context.Queue()
        self._processes = [
            context.Process(target=_serve, args=(rank, str(store), inbox, self._outbox), daemon=True)
            for rank, inbox in enumerate(self._inboxes)
        ]
        for process in self._processes:
            process.start()

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """function(group, *arguments) on the first ``ranks`` processes; what each returned."""
        self._number += 1
        task = pickle.dumps((self._number, function, ranks, arguments))
        for inbox in self._inboxes[:ranks]:
            inbox.put(task)
        results: dict[int, tuple[bool, Any]] = {}
        ends = time.monotonic() + 300
        while len(results) < ranks:
            try:
                number, rank, fine, result = self._outbox.get(timeout=1)
            except queue.Empty:
                self._require_alive(ends)
                continue
            if number == self._number:  # not of a test that gave up waiting
                results[rank] = fine, pickle.loads(result)
        failed = {rank: text for rank, (fine, text) in sorted(results.items()) if not fine}
        if failed:
            raise RanksFailedError(failed)
        return [results[rank][1] for rank in range(ranks)]

    def _require_alive(self, ends: float) -> None:
        codes = [process.exitcode for process in self._processes]
        if any(code is not None for code in codes) or time.monotonic() > ends:
            for process in self._processes:
                process.kill()
            self._start()
            raise AssertionError(f"Ranks ended, or did not in time: their exit codes are {codes}.")

    def close(self) -> None:
        """End the processes."""
        for inbox in self._inboxes:
            inbox.put(None)
        for process in self._processes:
            process.join(timeout=20)
