"""Where in a step a process is, for tests that let something go wrong there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from krylov_descent.distributed.comm import Comm
from krylov_descent.distributed.process_group import GroupComm
from krylov_descent.stepping.step_log import StepLog

#: Of a step, in their order; "check" is what comes before the first of them.
STEP = ("gradient", "basis", "search")

# What a save does to the file system.
_FILES = ("open", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


class Phases:
    """Follows the steps of a process; ``on_event(phase, n)`` is called before the nth thing that it does in a phase.

    Args:
        on_event: may raise, hang or kill.
        everything: whether collectives and changes of the file system count, too, and not only what calls ``event``.
    """

    def __init__(self, on_event: Callable[[str, int], None], *, everything: bool = False) -> None:
        self.phase = ""
        self.counts: Counter[str] = Counter()
        self._on_event, self._everything = on_event, everything

    def enter(self, phase: str) -> None:
        """A phase begins; its events are counted from 0."""
        self.phase = phase
        self.counts[phase] = 0

    def event(self) -> int:
        """Something happens in this phase; → its number."""
        n = self.counts[self.phase]
        self.counts[self.phase] += 1
        self._on_event(self.phase, n)
        return n

    @contextmanager
    def following(self) -> Iterator[None]:
        """Know the phases of all steps inside: a step's log starts with it and tells when a phase ends."""
        start, lap = StepLog.__init__, StepLog.lap

        def started(log: StepLog, comm: Comm) -> None:
            self.enter(STEP[0])
            start(log, comm)

        def lapped(log: StepLog, name: str) -> None:
            lap(log, name)
            if name == STEP[-1]:
                self.phase = "end"
            else:
                self.enter(STEP[STEP.index(name) + 1])

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(StepLog, "__init__", started))
            stack.enter_context(mock.patch.object(StepLog, "lap", lapped))
            if self._everything:
                stack.enter_context(mock.patch.object(GroupComm, "_call", self._counted(GroupComm._call)))
            yield

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A save."""
        self.enter("save")
        with ExitStack() as stack:
            for where, name in [(dist, "all_gather_object"), *((os, name) for name in _FILES)]:
                stack.enter_context(mock.patch.object(where, name, self._counted(getattr(where, name))))
            yield
        self.phase = "end"

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.event()
            return call(*args, **kwargs)

        return counted
