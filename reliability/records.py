"""The files of ``python -m reliability``: one line of JSON for each trial, by kind."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """The records of a file, of each seed the last; a line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]
    return list({record["seed"]: record for record in found}.values())


def read_all(results: Path) -> list[Record]:
    """The records of all kinds.

    Raises:
        ValueError: there are none.
    """
    found = [record for path in sorted(results.glob("*.jsonl")) for record in read(path)]
    if not found:
        raise ValueError(f"There are no records in {results}: make some with `python -m reliability all`.")
    return found


@contextmanager
def appending(path: Path) -> Iterator[Callable[[Record], None]]:
    """What adds a record to a file, with the day, at once; a line that was cut off before is dropped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(text[: text.rfind(b"\n") + 1])
        os.replace(part, path)
    with path.open("a", encoding="utf-8") as file:

        def append(record: Record) -> None:
            dated = {**record, "date": datetime.date.today().isoformat()}
            file.write(json.dumps(dated, ensure_ascii=False, separators=(",", ":")) + "\n")
            file.flush()

        yield append
