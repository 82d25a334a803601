"""The file of ``python -m reliability``: a line of JSON for each trial, or packed, for all that ended alike."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Record = dict[str, Any]

#: Parts of a record that neither the table nor the figure reads; those of trials that were lost are kept.
_UNREAD = ("seed", "seconds")


def read(path: Path) -> list[Record]:
    """The records of a file, of each trial the last; a line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]
    return list({key(each): each for record in found for each in _trials(record)}.values())


def key(record: Record) -> tuple[str, str, int]:
    """Fault, method and seed."""
    return record["fault"], record["method"], record["seed"]


def pack(path: Path) -> None:
    """Write a file anew with one line, and all seeds, for trials that differ in nothing which is read."""
    alike: dict[str, tuple[Record, list[int]]] = {}
    for record in read(path):
        kept = record if record["lost"] else {k: value for k, value in record.items() if k not in _UNREAD}
        _, seeds = alike.setdefault(json.dumps(kept), (kept, []))
        seeds.append(record["seed"])
    _replace(path, "".join(_line({**kept, "seeds": seeds}) for kept, seeds in alike.values()))


def _trials(record: Record) -> list[Record]:
    """The records of a line, one for each seed."""
    seeds = record.get("seeds", [record.get("seed")])
    return [{**{k: value for k, value in record.items() if k != "seeds"}, "seed": seed} for seed in seeds]


@contextmanager
def appending(path: Path) -> Iterator[Callable[[Record], None]]:
    """What adds a record to a file, with the day, at once; a line that was cut off before is dropped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        _replace(path, text[: text.rfind(b"\n") + 1].decode())
    with path.open("a", encoding="utf-8") as file:

        def append(record: Record) -> None:
            dated = {**record, "date": datetime.date.today().isoformat()}
            file.write(_line(dated))
            file.flush()

        yield append


def _line(record: Record) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
