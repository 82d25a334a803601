"""The file of a run: JSON lines, a header first; opened anew, it goes on after the line that a checkpoint remembers."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from experiments.common import packed
from experiments.common.budget import Budget


def finished(folder: Path, path: Path, budget: Budget, **expected: Any) -> bool:
    """Whether a file, or the packed one of the study's folder, holds a run to its end, of this budget or a longer one.

    One whose header has other than the expected values is not the run that was asked for.
    """
    lines = packed.lines(path) if path.exists() else packed.find(folder, path)
    if not lines or lines[-1][1].get("kind") != "end":
        return False
    header, point, end = (lines[i][1] for i in (0, -2, -1))
    if any(header.get(key) != value for key, value in _plain(expected).items()):
        return False
    return end["reason"] != "budget" or budget.spent(point["seconds"], point.get("gradients", 0.0)) >= budget.amount


def require_same(path: Path, header: dict[str, Any], *, scheduled: bool) -> str:
    """A file may be continued by the same run only; a longer budget is no other run, unless a schedule follows it.

    Returns:
        The day on which it was started.
    """
    with path.open() as lines:
        first = lines.readline()
    found = json.loads(first) if first.endswith("\n") else {}
    header = _plain(header)  # as it would be written
    free = {"started", "machine"}
    if not scheduled and found and found["budget"][-1] == header["budget"][-1]:
        free.add("budget")
    different = [key for key in header if key not in free and found and found.get(key) != header[key]]
    if different:
        raise ValueError(
            f"{path} holds a run with other {', '.join(different)}: "
            + "; ".join(f"{key} {found.get(key)!r}, now {header[key]!r}" for key in different)
            + ". Give this one another --label or --results, or delete that file."
        )
    return str(found.get("started", header["started"]))


@contextmanager
def opened(path: Path, header: dict[str, Any], lines: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Open a file after its first ``lines`` lines, the header among them; what follows will be written again.

    The header is written anew, as the budget may be longer now.

    Raises:
        ValueError: another process has it open.
    """
    if path.exists():
        with path.open("rb") as before:
            _lock(before, path)
    kept = path.read_bytes().splitlines(keepends=True)[1:lines] if path.exists() else []
    with replacing(path) as unfinished:
        unfinished.write_bytes(b"".join([encoded(header), *kept]))
    with path.open("ab") as file:
        _lock(file, path)

        def write(line: dict[str, Any]) -> None:
            file.write(encoded(line))
            file.flush()

        yield write


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write a file under, which takes the place of the other once it is whole; else nothing stays."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _lock(file: BinaryIO, path: Path) -> None:
    """Until the file is closed, where the system knows such locks; two processes would write over each other."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path} is being written by another process. Wait for it, or give another --label.") from None


def encoded(line: dict[str, Any]) -> bytes:
    """A line of a JSONL file."""
    return json.dumps(_plain(line), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Numbers to six digits, and none that JSON does not have."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return value


def machine() -> dict[str, Any]:
    """The facts that timings depend on."""
    model = platform.processor() or platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        names = [line.partition(":")[2] for line in information.read_text().splitlines() if "model name" in line]
        model = names[0].strip() if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
