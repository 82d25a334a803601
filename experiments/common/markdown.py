"""Markdown tables that read as plain text too, and the pages that they are put into."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

_MARKS = {
    "‡": "The paper's own data are not public: same kind of task, other data.",
    "§": "A seed that is not finished.",
    "†": "A seed whose loss was not finite at the end.",
    "∎": "A seed that ended before its budget, as the method found no step any more.",
    "◊": "Mixed settings: the seeds were not run with the same ones.",
    "¶": "Run with another budget than the row's, and so not compared: a schedule would be half-way where others end.",
}


def spread(
    values: Sequence[float],
    *,
    unit: str = "",
    middle: Callable[[Sequence[float]], float] = statistics.fmean,
    digits: int = 4,
) -> str:
    """The middle of some values, with the lowest and the highest of several."""
    valid = [v for v in values if math.isfinite(v)]
    if not valid:
        return "not finite"
    centre, low, high = (f"{v:.{digits}g}" for v in (middle(valid), min(valid), max(valid)))
    some = f" ({len(valid)} of {len(values)} seeds)" if len(valid) < len(values) else ""
    return f"{centre}{unit}" + (f" [{low}, {high}]" if low != high else "") + some


def bold(text: str, wanted: bool) -> str:
    """Bold, if wanted."""
    return f"**{text}**" if wanted else text


def section(title: str, head: list[str], rows: list[list[str]], note: str) -> str:
    """A heading, the table with its columns padded, and its note; marks are explained where they occur."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in [head, ["-" * w for w in widths], *rows]]
    notes = [note, *(f"{mark} {meaning}" for mark, meaning in _MARKS.items() if any(mark in line for line in lines))]
    return "\n".join([f"## {title}", "", *lines, "", *(f"{text}\n" for text in notes if text)])


def show(text: str, into: Path | None, marks: tuple[str, str]) -> None:
    """Print tables, or put them into a page."""
    if into is None:
        sys.stdout.write(text + "\n")
    else:
        put(text, into, marks)


def put(text: str, into: Path, marks: tuple[str, str]) -> None:
    """Replace what stands between two lines of a page.

    Raises:
        ValueError: the page lacks them.
    """
    before, found, rest = into.read_text().partition(marks[0])
    after = rest.partition(marks[1])
    if not found or not after[1]:
        raise ValueError(f"{into} lacks the lines {marks[0]} and {marks[1]}: write them where the table goes.")
    into.write_text(f"{before}{marks[0]}\n\n{text.strip()}\n\n{marks[1]}{after[2]}")
