"""The directory of a run's checkpoints: a new one appears whole or not at all, and old ones go one by one.

    step-00000012     a checkpoint; ``step-00000012-2`` if that iteration was saved again
    latest            a file with the name of the one to load, and its checksum unless it was written by hand
    .tmp-…            what is being written or removed; left over if the run was killed

Only rank 0 calls what is here, ``seen`` excepted.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
import warnings
import zlib
from pathlib import Path

from krylov_descent.distributed.manifest import MANIFEST, short

_NAME = re.compile(r"step-(\d{8,18})(?:-(\d{1,9}))?")
_LATEST, _TEMPORARY = "latest", ".tmp-"


def start(root: Path) -> str:
    """A new temporary directory, by name; those that killed runs left behind are removed."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.glob(f"{_TEMPORARY}*"):
        _remove(path)
    name = f"{_TEMPORARY}{uuid.uuid4().hex}"
    (root / name).mkdir()
    return name


def seen(temporary: Path) -> None:
    """A directory that rank 0 made must be there for every rank.

    Raises:
        ValueError: it is not.
    """
    if not temporary.is_dir():
        raise ValueError(
            f"{temporary} was made by rank 0 and is not seen here. Checkpoints need a directory on a file system that "
            "all ranks share."
        )


def publish(root: Path, temporary: Path, iteration: int, keep: int) -> str:
    """Give a complete checkpoint its name, let ``latest`` say it, and remove those beyond ``keep``."""
    _sync(temporary)
    again = [attempt for found, attempt, _ in _checkpoints(root) if found == iteration]
    # The one of the same iteration stays until ``latest`` names the new one: no moment is without a checkpoint.
    name = f"step-{iteration:08d}" + (f"-{max(again) + 1}" if again else "")
    os.rename(temporary, root / name)
    _sync(root)
    pointer = root / f"{_TEMPORARY}{_LATEST}"
    with open(pointer, "w", encoding="utf-8") as file:
        file.write(pointer_to(name))
        file.flush()
        os.fsync(file.fileno())
    os.replace(pointer, root / _LATEST)
    _sync(root)
    others = [(found, attempt, path) for found, attempt, path in _checkpoints(root) if path.name != name]
    # A run that was set back leaves checkpoints ahead of it, which are the older ones.
    others.sort(key=lambda other: (other[0] <= iteration, other[:2]))
    left = keep - 1
    for found, _, path in reversed(others):
        if found == iteration or left == 0:
            gone = root / f"{_TEMPORARY}{path.name}"  # renamed first, so that what is half removed is not found
            _remove(gone)
            os.rename(path, gone)
            _remove(gone)
        else:
            left -= 1
    return name


def choose(root: Path) -> str | None:
    """The name of the checkpoint to load, or None if there is none at all.

    Raises:
        FileNotFoundError: ``latest`` names one that is not there, and there is no other.
        ValueError: ``latest`` holds something else.

    Example:
        >>> choose(Path("no such directory")) is None
        True
    """
    complete = [path.name for *_, path in _checkpoints(root) if (path / MANIFEST).is_file()]
    newest = complete[-1] if complete else None
    try:
        latest = (root / _LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return newest  # killed between the first checkpoint and its pointer
    text, latest = latest, latest.partition(" ")[0]
    if not _NAME.fullmatch(latest) or text not in (latest, pointer_to(latest).strip()):
        raise ValueError(
            f"{root / _LATEST} says {short(text)}, which is no name of a checkpoint, such as step-00000012, with its "
            "checksum or without. Write the name of the one to load into it, or remove it to load the newest."
        )
    if latest in complete:
        return latest
    if newest is None:
        raise FileNotFoundError(
            f"{root / _LATEST} names {latest}, which is not there or not complete, and {root} holds no other. "
            "Copy it back, or remove the file to begin anew."
        )
    warnings.warn(
        f"{root / _LATEST} names {latest}, which is not there or not complete; loading {newest}, the newest that is.",
        stacklevel=2,
    )
    return newest


def _checkpoints(root: Path) -> list[tuple[int, int, Path]]:
    """Iteration, attempt and path of all that are named like a checkpoint, in this order."""
    if not root.exists():
        return []
    found = [(match, path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return sorted((int(match[1]), int(match[2] or 1), path) for match, path in found)


def pointer_to(name: str) -> str:
    """What ``latest`` says; without the checksum, a flipped bit would name another checkpoint."""
    return f"{name} crc32={zlib.crc32(name.encode()):08x}\n"


def _remove(path: Path) -> None:
    """Remove a file or directory if possible; what cannot be removed now is tried again by the next save."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    """Make names in a directory last, where the system can."""
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
