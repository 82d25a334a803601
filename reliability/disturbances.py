"""Faults that come from outside into a training of one process: Ctrl-C, another thread, a lost worker, a full disk.

Each trial knows the digests of the undisturbed training after each step. After a fault everything must be as before
the step, bit for bit, and the steps that follow must have those digests.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from krylov_descent import checkpoint
from reliability.methods import KINDS, Training
from reliability.outcome import Outcome
from reliability.snapshot import Snapshot

STEPS = 4
#: Interrupts of one trial.
INTERRUPTS = 10


@contextmanager
def signals() -> Iterator[Callable[[float], None]]:
    """A function that raises KeyboardInterrupt after some seconds, by a real signal; 0 for no longer."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    handler, hook = signal.signal(signal.SIGALRM, interrupt), sys.unraisablehook
    sys.unraisablehook = lambda _: None  # Python swallows what is raised where an object is collected
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)  # type: ignore[misc]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        sys.unraisablehook = hook


def ctrl_c(method: str, seed: int) -> Outcome:
    """Interrupts at random times of steps, up to three in one step, from the start again until there are ten."""
    draw, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    outcome = Outcome("same bits", times=0, told={"data": kind})
    reference = Training(method, seed, kind)
    began = time.perf_counter()
    expected = reference.trajectory(STEPS)
    seconds = (time.perf_counter() - began) / STEPS
    for _ in range(3 * INTERRUPTS):
        training = Training(method, seed, kind)
        for number in range(STEPS):
            _interrupted(training, expected[number], draw, seconds, outcome)
            if outcome.lost:
                outcome.lost[-1] += f" (step {number}, {kind})"
                return outcome
            if outcome.times >= INTERRUPTS and number:
                return outcome
    return outcome


def _interrupted(training: Training, after: str, draw: random.Random, seconds: float, outcome: Outcome) -> None:
    """One step, tried until no signal comes in between; compared with the undisturbed one."""
    before = Snapshot(training.model, training.optimizer)
    with signals() as interrupt_in:
        for _ in range(draw.randrange(4)):
            try:
                interrupt_in(draw.uniform(1e-5, 1.1 * seconds))
                training.step()
                interrupt_in(0)
            except KeyboardInterrupt:
                interrupt_in(0)
                outcome.times += 1
            except Exception as error:
                interrupt_in(0)
                outcome.lost.append(f"{type(error).__name__} after {outcome.times} interrupts: {error}")
                return
            if changed := before.changed():
                if training.digest() != after:  # a signal that comes last leaves the step done
                    outcome.lost.append(f"{', '.join(changed)} changed by a step that was interrupted")
                return
    try:
        training.step()
    except Exception as error:
        outcome.lost.append(f"{type(error).__name__} in the step after {outcome.times} interrupts: {error}")
        return
    if training.digest() != after:
        outcome.lost.append(f"other bits after {outcome.times} interrupts")


def other_thread(method: str, seed: int) -> Outcome:
    """Another thread trains a model with batch norm by SGD, or a model of its own by the same method."""
    draw = random.Random(seed)
    kind = KINDS[seed % 3]
    expected = Training(method, seed, kind).trajectory(STEPS)
    training, stop, errors = Training(method, seed, kind), threading.Event(), list[str]()
    other: _Norm | _Stepper = _Norm(seed) if seed % 2 else _Stepper(method, seed + 1)

    def work() -> None:
        try:
            while not stop.is_set():
                other.advance()
        except Exception as error:
            errors.append(f"the other thread met {type(error).__name__}: {error}")

    thread = threading.Thread(target=work)
    thread.start()
    outcome = Outcome("same bits", told={"data": kind})
    try:
        while not other.count and thread.is_alive():
            time.sleep(0.001)
        for number in range(STEPS):
            _with_error(training, draw, outcome)
            training.on_call = lambda call: None
            training.step()
            if training.digest() != expected[number]:
                outcome.lost.append(f"other bits after step {number}")
                break
    except Exception as error:
        outcome.lost.append(f"{type(error).__name__}: {error}")
    finally:
        stop.set()
        thread.join()
    alone = type(other)(*other.arguments)
    for _ in range(other.count):
        alone.advance()
    outcome.lost += errors + (
        [] if errors or alone.digest() == other.digest() else ["the other thread's model differs"]
    )
    return outcome


def _with_error(training: Training, draw: random.Random, outcome: Outcome) -> None:
    """A step whose closure raises at some call, which is undone while the other thread is at work."""
    at, before = draw.randrange(1, 3), Snapshot(training.model, training.optimizer)

    def fail(call: int) -> None:
        if call == at:
            raise OSError("the file is gone")

    training.on_call = fail
    with suppress(OSError):
        training.step()
        raise RuntimeError(f"a step has fewer than {at} calls")
    outcome.lost += [f"{what} changed by a step that failed" for what in before.changed()]


class _Norm:
    """What another thread may do: SGD with batch norm in train mode."""

    def __init__(self, seed: int) -> None:
        self.arguments, self.count = (seed,), 0
        self._draw = torch.Generator().manual_seed(seed)
        self._model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        with torch.no_grad():
            for p in self._model.parameters():
                p.copy_(torch.randn(p.shape, generator=self._draw))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)

    def advance(self) -> None:
        """One step."""
        self._optimizer.zero_grad()
        self._model(torch.randn(16, 4, generator=self._draw)).square().mean().backward()
        self._optimizer.step()
        self.count += 1
        time.sleep(0)

    def digest(self) -> str:
        """Parameters, buffers and gradients."""
        tensors = [*self._model.state_dict().values(), *(p.grad for p in self._model.parameters())]
        return str([None if x is None else x.tolist() for x in tensors])


class _Stepper:
    """What another thread may do: a training of the same method."""

    def __init__(self, method: str, seed: int) -> None:
        self.arguments, self.count = (method, seed), 0
        self._training = Training(method, seed)

    def advance(self) -> None:
        """One step."""
        self._training.step()
        self.count += 1

    def digest(self) -> str:
        """Of model and optimizer."""
        return self._training.digest()


def worker_loss(method: str, seed: int) -> Outcome:
    """A process that loads samples is killed at some call of the closure; torch says so, and the next step works."""
    draw, outcome = random.Random(seed), Outcome("same bits", told={"raised": 0})
    others = multiprocessing.active_children()
    expected = Training(method, seed, "workers").trajectory(STEPS)
    training = Training(method, seed, "workers")
    killed_at = draw.randrange(STEPS - 1)
    for number in range(STEPS):
        at = draw.randrange(1, 5)

        def kill(call: int, number: int = number, at: int = at) -> None:
            if number == killed_at and call == at and not outcome.told["raised"]:
                loading = [p.pid for p in multiprocessing.active_children() if p.pid and p not in others]
                os.kill(draw.choice(loading), signal.SIGKILL)

        training.on_call = kill
        _step_without_worker(training, expected[number], outcome)
        if outcome.lost:
            outcome.lost[-1] += f" at step {number}; a worker was killed in step {killed_at} at call {at}"
            return outcome
    return outcome


def _step_without_worker(training: Training, after: str, outcome: Outcome) -> None:
    """A step, and another one if torch says that a worker is gone."""
    before = Snapshot(training.model, training.optimizer)
    for again in (False, True):
        try:
            training.step()
            time.sleep(0.02)  # torch speaks where it hears of it, perhaps after the step
        except Exception as error:
            outcome.told["raised"] += 1
            said = f"{type(error).__name__}: {error}"
            if again or not ("DataLoader worker" in said or "worker process" in said):
                outcome.lost.append(said)
                return
        changed = before.changed()
        if changed and training.digest() != after:
            outcome.lost.append(f"{', '.join(changed)} changed by a step that lost a worker")
        if changed:
            return


# A full disk


def full_disk(method: str, seed: int) -> Outcome:
    """A save meets a disk with too few bytes left: the older file stays, and the training goes on with more room."""
    draw = random.Random(seed)
    expected = Training(method, seed).trajectory(STEPS)
    training, at = Training(method, seed), draw.randrange(1, STEPS)
    with small_disk() as (directory, fill):
        outcome = Outcome("same bits", told={"disk": fill.__name__})
        path = directory / "run.safetensors"
        for number in range(STEPS):
            training.step()
            if number == at:
                _save_on_full_disk(training, path, fill, draw, outcome)
                outcome.lost += [] if _kept(method, seed, path) == expected[number - 1] else ["the older file differs"]
            checkpoint.save(path, training.model, training.optimizer)
            if training.digest() != expected[number] or _kept(method, seed, path) != expected[number]:
                outcome.lost.append(f"other bits after step {number}")
    return outcome


def _kept(method: str, seed: int, path: Path) -> str:
    """The digest of what a file brings back."""
    fresh = Training(method, seed, start=1000)
    checkpoint.load(path, fresh.model, fresh.optimizer)
    return fresh.digest()


def _save_on_full_disk(
    training: Training, path: Path, fill: Callable[[int], Any], draw: random.Random, outcome: Outcome
) -> None:
    before = Snapshot(training.model, training.optimizer)
    left = draw.choice([0, draw.randrange(path.stat().st_size // 2)])
    with fill(left):
        try:
            checkpoint.save(path, training.model, training.optimizer)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG):
                outcome.lost.append(f"OSError of another kind: {error}")
        except Exception as error:
            outcome.lost.append(f"{type(error).__name__}: {error}")
        else:
            outcome.lost.append(f"a save with {left} bytes left says nothing")
        if beside := [p.name for p in path.parent.iterdir() if p.name not in (path.name, "ballast")]:
            outcome.lost.append(f"{beside} left on a full disk")
    outcome.lost += [f"{what} changed by a save that failed" for what in before.changed()]


@contextmanager
def small_disk() -> Iterator[tuple[Path, Callable[[int], Any]]]:
    """A directory, and a context in which it takes so many bytes: a file system of its own, or a limit on files."""
    with tempfile.TemporaryDirectory(prefix="reliability-disk-") as root:
        mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", root]
        if subprocess.run(mount, capture_output=True).returncode:
            yield Path(root), limit
            return
        try:

            @contextmanager
            def tmpfs(left: int) -> Iterator[None]:
                ballast = Path(root) / "ballast"
                free = os.statvfs(root).f_bavail * os.statvfs(root).f_bsize
                ballast.write_bytes(bytes(free - left - left % 4096))
                try:
                    yield
                finally:
                    ballast.unlink()

            yield Path(root), tmpfs
        finally:
            subprocess.run(["umount", "-l", root], check=True)


@contextmanager
def limit(left: int) -> Iterator[None]:
    """No file may be longer, as far as this process goes: where no file system can be mounted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
