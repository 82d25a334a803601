"""Runs as processes of their own, a few at a time; one that fails is named and does not stop the others."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tqdm import tqdm

#: glibc keeps what it has instead of returning large blocks to the system at every pass: the page faults cost every
#: method about a fifth on the larger layers (docs/appendix/speed.md).
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(8 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}


class Task(NamedTuple):
    """A command, and the name it goes by in progress bars and messages."""

    name: str
    command: Sequence[str]


def run_all(tasks: Sequence[Task], jobs: int) -> list[str]:
    """Returns a line for each that failed. If this ends early, so do they."""
    waiting, failed = list(tasks), []
    running: dict[str, subprocess.Popen[str]] = {}
    with tqdm(total=len(tasks), desc="runs", unit="run") as bar, _ended_together(running):
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.pop(0)
                running[task.name] = subprocess.Popen(
                    task.command, stderr=subprocess.PIPE, text=True, env={**_ALLOCATOR, **os.environ}
                )
                bar.set_postfix_str(", ".join(running))
            time.sleep(0.2)
            for name, process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[name]
                bar.update()
                errors = process.communicate()[1].strip().splitlines()
                if process.returncode:
                    failed.append(f"{name}: {errors[-1] if errors else process.returncode}")
    return failed


@contextmanager
def _ended_together(running: dict[str, subprocess.Popen[str]]) -> Iterator[None]:
    """A second study would start the same runs again, so none may outlive the first."""

    def end(*_: object) -> None:
        raise SystemExit(1)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.communicate()
