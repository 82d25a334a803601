"""The checkpoint of a run on the command line: model and optimizer, written so that it is whole or not there.

It has a checksum, as ``torch.load`` does not notice a bit that was flipped. Files of version 0 had neither.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from krylov_descent.cli.target import UsageError
from krylov_descent.optimizer import KSD
from krylov_descent.sealing import checksum

VERSION = 1

_SHARE = 0.05  # of a run's time that may go into checkpoints


def save_whole(what: Any, path: Path) -> None:
    """torch.save, to a file that has its name only once it is complete."""
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb") as file:
            torch.save(what, file)
            file.flush()
            os.fsync(file.fileno())  # otherwise a crash of the machine may leave the name with nothing behind it
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


class Checkpoints:
    """Saves after a step, unless that would take too much of the time; all that is in them loads with weights_only."""

    def __init__(self, path: Path, model: nn.Module, optimizer: KSD) -> None:
        self._path, self._model, self._optimizer = path, model, optimizer
        self._steps = self._saved = 0
        self._took, self._last = 0.0, 0.0

    def load(self) -> int:
        """Go on from the checkpoint, if there is one; returns the steps that it has behind it.

        Raises:
            UsageError: it is of another model, of a newer version, or damaged.
        """
        if not self._path.exists():
            return 0
        kept = self._read()
        try:
            self._model.load_state_dict(kept["model"])
            self._optimizer.load_state_dict(kept["optimizer"])
            torch.set_rng_state(kept["generator"])
            self._steps = self._saved = int(kept["steps"])
        except Exception as error:
            what = str(error).strip().splitlines()[0]
            raise UsageError(
                f"{self._path} does not fit the model: {what}",
                "Resume with the function that began the run, or begin anew in another --out.",
            ) from error
        return self._steps

    def _read(self) -> dict[str, Any]:
        """What the file holds, if that is what was written."""
        anew = "Copy it again if you can, or begin anew in another --out."
        try:
            kept = torch.load(self._path, weights_only=True)
        except Exception as error:  # torch's own message may advise weights_only=False
            raise UsageError(
                f"{self._path} cannot be read ({type(error).__name__}): it is damaged, or no checkpoint. Nothing of it "
                "was run.",
                anew,
            ) from None
        if not isinstance(kept, dict):
            raise UsageError(f"{self._path} holds a {type(kept).__name__}, and no checkpoint.", anew)
        version, crc = kept.pop("version", 0), kept.pop("crc32", None)
        if version not in range(VERSION + 1):
            raise UsageError(
                f"{self._path} is of version {version!r}, and this krylov-descent reads versions up to {VERSION}.",
                "Resume with the version that wrote it, or a newer one.",
            )
        if version and crc != checksum(kept):
            raise UsageError(f"{self._path} is damaged: its contents do not have their checksum {crc}.", anew)
        return kept

    def step_taken(self, *, last: bool) -> None:
        """Save, if it is time."""
        self._steps += 1
        if last or time.perf_counter() - self._last >= self._took / _SHARE:
            self.save()

    def save(self) -> None:
        """Save, unless the present state is saved already."""
        if self._saved == self._steps:
            return
        start = time.perf_counter()
        kept = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "steps": self._steps,
            "generator": torch.get_rng_state(),
        }
        save_whole({**kept, "version": VERSION, "crc32": checksum(kept)}, self._path)
        self._saved = self._steps
        self._last = time.perf_counter()
        self._took = self._last - start

    @property
    def saved(self) -> int:
        """The steps behind the checkpoint that is on disk."""
        return self._saved


def forget_after(log: Path, steps: int) -> None:
    """Drop the lines of a log that were written after the checkpoint: those steps are taken again."""
    if not log.exists():
        return
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if _iteration(line) < steps]
    if len(kept) < len(lines):
        part = log.with_name(f"{log.name}.part")
        part.write_text("".join(kept), encoding="utf-8")
        os.replace(part, log)


def _iteration(line: str) -> float:
    """Of a line; a line that was cut off is after everything."""
    try:
        return float(json.loads(line)["iteration"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
