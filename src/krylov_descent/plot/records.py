"""Reports as plain records, from an optimizer or from a file."""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from krylov_descent.report import StepReport

Report: TypeAlias = StepReport | Mapping[str, Any]
Record: TypeAlias = Mapping[str, Any]

_LONGEST = 1 << 20  # characters of a line
_LOSSES = ("loss", "search_loss_before", "search_loss_after")
_NUMBERS = (*_LOSSES, "iteration", "grad_norm", "krylov_dim", "sample_gradients")
_LISTS, _TABLES = ("ritz_values", "coefficients"), ("seconds", "set_sizes", "details")


def read(path: str | Path) -> list[dict[str, Any]]:
    """Return the reports in a file of ``krylov_descent.writers.JSONLWriter`` as dicts; None for non-finite numbers.

    A last line that was cut off when a run was killed is skipped with a warning.

    Raises:
        ValueError: another line is no report.

    Example:
        >>> import tempfile, pathlib, torch
        >>> from krylov_descent import KSD, plot
        >>> from krylov_descent.writers import JSONLWriter
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> log = pathlib.Path(tempfile.mkdtemp()) / "log.jsonl"
        >>> with JSONLWriter(log) as write:
        ...     write(KSD([w]).step(lambda: (w.square().mean(), w)))
        >>> [report["loss"] for report in plot.read(log)]
        [6.5]
    """
    found: list[dict[str, Any]] = []
    cut, before = 0, ""
    for number, line in enumerate(lines(path), start=1):
        if not line.strip():
            continue
        if cut:
            raise ValueError(_no_report(path, cut, before))
        record = parsed(line)
        if record is None:
            cut, before = number, line
        elif (wrong := _wrong(record)) is not None:
            raise ValueError(_no_report(path, number, line, wrong))
        else:
            found.append(record)
    if cut:
        what = "the last line was cut off and is skipped. The run was killed while it wrote, or is writing now."
        warnings.warn(f"{path}, line {cut}: {what}", stacklevel=2)
    return found


def lines(path: str | Path) -> Iterator[str]:
    """Yield the lines of a log.

    Raises:
        ValueError: a line is longer than that of any report.
    """
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        while line := file.readline(_LONGEST + 1):
            if len(line) > _LONGEST:
                raise ValueError(
                    f"{path} has a line of more than {_LONGEST:,} characters: {line[:60]!r}…. Remove the line, or pass "
                    "a file that krylov_descent.writers.JSONLWriter wrote."
                )
            yield line


def parsed(line: str) -> Any:
    """Return the value of a line; None if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _no_report(path: str | Path, number: int, line: str, wrong: str = "") -> str:
    return (
        f"{path}, line {number}: this is no report of a step{wrong}: {line.strip()[:60]!r}. Remove the line, "
        "or pass a file that krylov_descent.writers.JSONLWriter wrote."
    )


def _wrong(record: Any) -> str | None:
    """Return what is wrong with a record, or None."""
    if not isinstance(record, dict) or "loss" not in record:
        return ""
    values: dict[str, Any] = {key: [record.get(key)] for key in _NUMBERS}
    for key in _LISTS:
        values[key] = record.get(key) or []
    for key in _TABLES:
        table = record.get(key) or {}
        named = isinstance(table, dict) and all(name.isprintable() for name in table)
        values[key] = list(table.values()) if named else table
    for key, found in values.items():
        if not isinstance(found, list) or not all(map(_is_number, found)):
            return f" ({key} = {str(record.get(key))[:40]!r})"
    return None


def _is_number(x: Any) -> bool:
    return x is None or isinstance(x, float) or (isinstance(x, int) and abs(x) < 1 << 64)


def records_of(reports: Iterable[Report]) -> list[Record]:
    """Return reports as dicts.

    Raises:
        ValueError: there are no reports.
    """
    records = [report.as_dict() if isinstance(report, StepReport) else report for report in reports]
    if not records:
        raise ValueError("There are no reports to draw: take a step first, or pass a log that has some.")
    return records


def number(x: Any) -> float:
    """Return a value as a float, NaN for None."""
    return math.nan if x is None else float(x)


def column(records: Sequence[Record], key: str) -> list[float]:
    """Return one number of each record."""
    return [number(record.get(key)) for record in records]


def numbers(record: Record, key: str) -> list[float]:
    """Return a list of numbers of one record."""
    return [number(x) for x in record.get(key) or ()]


def steps(records: Sequence[Record]) -> list[float]:
    """Return the number of each step, or its place if numbers do not rise (reports of two optimizers in a row)."""
    found = column(records, "iteration")
    if all(a < b for a, b in itertools.pairwise(found)) and math.isfinite(found[0]):
        return found
    return [float(i) for i in range(len(records))]


def edges(places: Sequence[float]) -> list[float]:
    """Return the start of each step's cell and the end of the last, half way between neighbours."""
    between = [(a + b) / 2 for a, b in itertools.pairwise(places)]
    return [places[0] - 0.5, *between, places[-1] + 0.5]


def seconds(records: Sequence[Record]) -> dict[str, list[float]]:
    """Return the seconds of each step by phase, in the order of phases; 0 for a missing number."""
    laps = [record.get("seconds") or {} for record in records]
    names = dict.fromkeys(name for lap in laps for name in lap)
    return {name: [_finite_or_zero(lap.get(name)) for lap in laps] for name in names}


def cost(records: Sequence[Record], by: str) -> list[float]:
    """Return the cost of each step: 1, its seconds, or its gradients of one sample."""
    if by == "seconds":
        return [math.fsum(laps) for laps in zip(*seconds(records).values(), strict=True)] or [0.0] * len(records)
    if by == "gradients":
        return [_finite_or_zero(record.get("sample_gradients")) for record in records]
    return [1.0] * len(records)


def undone(records: Sequence[Record]) -> list[bool]:
    """Return for each step whether it rolled back the one before it."""
    return [record.get("accepted") is False for record in records]


def has_search_set(records: Sequence[Record]) -> bool:
    """Whether the search used a set of another size than the gradient."""
    sizes = [record.get("set_sizes") or {} for record in records]
    return any("C" in size and size["C"] != size.get("A") for size in sizes)


def _finite_or_zero(x: Any) -> float:
    value = number(x)
    return value if math.isfinite(value) else 0.0
