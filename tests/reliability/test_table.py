"""The table of docs/appendix/reliability.md is that of the results."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_what_was_tried_is_that_of_the_results() -> None:
    """``python -m reliability table --into docs/appendix/reliability.md`` was run after the last change of results."""
    from reliability.__main__ import MARKS
    from reliability.tables import table

    page = (ROOT / "docs" / "appendix" / "reliability.md").read_text()
    inside = page.partition(MARKS[0])[2].partition(MARKS[1])[0]
    assert inside.strip() == table(ROOT / "results" / "reliability" / "matrix.jsonl").strip()
