"""The table of what was tried, how often and what was lost, from recorded trials. Nothing here tries anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from reliability.records import Record, read_all

#: Kinds in the order of the table, and what one of their trials is called.
KINDS = {
    "problem": "random problems",
    "checkpoint": "checkpoints",
    "kill": "trainings disturbed",
    "soak": "long runs",
}
#: A kind with more cases than these has one row alone.
MOST_CASES = 40


def table(results: Path) -> str:
    """Markdown: totals of each kind first, and then every case.

    Raises:
        ValueError: there are no records.
    """
    records = read_all(results)
    rows = ["| tried | how often | outcomes | lost | date |", "| --- | ---: | --- | ---: | --- |"]
    for kind, name in KINDS.items():
        own = [record for record in records if record["kind"] == kind]
        if not own:
            continue
        rows.append(_row(f"**{name}**", own, bold=True))
        cases = sorted({_case(record) for record in own})
        if len(cases) <= MOST_CASES:
            rows += [_row(case, [record for record in own if _case(record) == case]) for case in cases]
    lost = sum(record["lost"] for record in records)
    return "\n".join(rows) + f"\n\n{_summary(records)} Lost: {lost}.\n"


def _case(record: Record) -> str:
    """What a row is of: the trouble, and for checkpoints all forms together."""
    case: str = record["case"]
    return case.partition(", ")[0] if record["kind"] == "checkpoint" else case


def _row(name: str, records: Sequence[Record], *, bold: bool = False) -> str:
    outcomes = Counter(record["outcome"] for record in records)
    told = ", ".join(f"{count:,} {outcome}" for outcome, count in outcomes.most_common())
    dates = sorted({record.get("date", "?") for record in records})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    count = f"{len(records):,}"
    times = sum(record.get("times", 0) for record in records)
    if times > len(records):
        count += f" ({times:,} times)"
    lost = sum(record["lost"] for record in records)
    return f"| {name} | {count} | {told} | {f'**{lost}**' if bold else lost} | {when} |"


def _summary(records: Sequence[Record]) -> str:
    """The counts that were asked for."""
    problems = sum(record["kind"] == "problem" for record in records)
    damaged = [r for r in records if r["kind"] == "checkpoint" and not r["case"].startswith("round trip")]
    kills = sum(r["times"] for r in records if r["kind"] == "kill" and r["case"].startswith("kill"))
    steps = sum(2 * r["steps"] for r in records if r["kind"] == "soak")
    return (
        f"In all: {problems:,} random problems, {len(damaged):,} damaged or crafted checkpoints, {kills:,} kills by "
        f"SIGKILL, {steps:,} steps of long runs."
    )
