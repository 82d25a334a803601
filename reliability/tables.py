"""The matrix of what was tried, how often and what was lost, from recorded trials. Nothing here tries anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from reliability.matrix import FAULTS
from reliability.methods import METHODS
from reliability.records import Record, read


def table(results: Path) -> str:
    """Markdown: a row for each fault, a column for each method; in the cells, how often it was tried, and lost.

    Raises:
        ValueError: there are no records.
    """
    records = read(results)
    if not records:
        raise ValueError(f"There are no records in {results}: make some with `python -m reliability`.")
    rows = [
        f"| fault | counted | {' | '.join(METHODS)} | outcomes of trials |",
        f"| --- | --- |{' ---: |' * len(METHODS)} --- |",
    ]
    for fault, row in FAULTS.items():
        own = [record for record in records if record["fault"] == fault]
        counts = [_cell([record for record in own if record["method"] == method]) for method in METHODS]
        rows.append(f"| {fault} | {row.unit} | {' | '.join(counts)} | {_outcomes(own)} |")
    dates = sorted({record["date"] for record in records})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    lost = sum(record["lost"] for record in records)
    return "\n".join(rows) + f"\n\n{len(records):,} trials, {lost:,} lost ({when}).\n"


def _cell(records: Sequence[Record]) -> str:
    if not records:
        return "not tried"
    lost = sum(record["lost"] for record in records)
    return f"{sum(record['times'] for record in records):,}, {f'**{lost}**' if lost else 0} lost"


def _outcomes(records: Sequence[Record]) -> str:
    outcomes = Counter(record["outcome"] for record in records)
    return ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.most_common())
