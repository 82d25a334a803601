"""Pages of the documentation, into which tables are put between two marks."""

from __future__ import annotations

from pathlib import Path


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
