"""Packed runs, which is what git keeps of a study: a file for each folder of runs, a line for each run.

A run is recorded in a file of its own, JSON lines with a header, points and an end:
``<problem>/<label>-seed<seed>.jsonl`` below the folder of a study, or ``<problem>/<network>/…`` in that of the PINN
study. Packed, it is one line of ``<problem>.jsonl``, or ``<network>.jsonl``, with its header, its points by column and
its end. Readers take both forms; of a run that has both, its own file counts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]

#: A line and where it stands, for messages.
Lines = list[tuple[str, Line]]

#: Folder of a study, below that of the results → the folders of its runs in it.
STUDIES = {"": "*", "deep": "*", "deep/ablations": "*", "pinn": "*/*"}

#: Parts of points that neither tables nor figures read.
_UNREAD = ("kind", "sample_gradients", "report")


def pack(results: Path) -> list[Path]:
    """Put the runs below a folder into its packed files, in place of the same runs there; returns the files.

    The runs' own files stay. Of the reports, figures read the seconds of a step and the Ritz values of the first seed,
    both of the paper's experiments: the others are left out.
    """
    packed: dict[Path, list[Lines]] = {}
    for study, below in STUDIES.items():
        folder = results / study
        for path in sorted(folder.glob(f"{below}/*-seed*.jsonl")):
            if found := lines(path):
                packed.setdefault(folder / f"{path.parent.name}.jsonl", []).append(found)
    for file, new in packed.items():
        before = read(file) if file.exists() else ()
        runs = {key_of(found): found for found in [*before, *new]}
        reports = file.parent == results
        text = "".join(_packed(runs[key], reports=reports) for key in sorted(runs))
        unfinished = file.with_suffix(".jsonl.tmp")
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, file)
    return list(packed)


def read(file: Path) -> Iterator[Lines]:
    """The lines of each run of a packed file, as its own file has them.

    Raises:
        ValueError: it is no packed file.
    """
    for where, line in lines(file):
        try:
            points, end = line["points"], line["end"]
            rows = zip(*points.values(), strict=True)
            unpacked = [line["run"], *({"kind": "point", **dict(zip(points, row, strict=True))} for row in rows)]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{where}, is no packed run ({error!r}): move the file out of the results.") from error
        yield [(where, each) for each in ([*unpacked, end] if end else unpacked)]


def find(folder: Path, path: Path) -> Lines | None:
    """The lines of the run that a file would hold, from the packed file of the study's folder; None if not there."""
    file = folder / f"{path.parent.name}.jsonl"
    found = read(file) if file.exists() else ()
    return next((run for run in found if path == path_of(folder, *key_of(run), run[0][1].get("network", ""))), None)


def path_of(folder: Path, problem: str, label: str, seed: int, network: str = "") -> Path:
    """The file of a run in the folder of its study; networks are told apart in the PINN study alone."""
    return folder / problem / network / f"{label}-seed{seed}.jsonl"


def lines(path: Path) -> Lines:
    """The lines of a file that hold something; a last one that is cut off is left out.

    Raises:
        ValueError: a line before the last is broken, or one is no JSON object.
    """
    raw = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found: Lines = []
    for number, text in enumerate(raw, 1):
        if not text.strip():
            continue
        where = f"{path}, line {number}"
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            if number < len(raw):
                raise ValueError(f"{where}, is not JSON ({error}): remove the run and repeat it.") from error
            continue
        if not isinstance(line, dict):
            raise ValueError(f"{where}, is no JSON object ({text[:60]}): remove the run and repeat it.")
        found.append((where, line))
    return found


def key_of(run: Lines) -> tuple[str, str, int]:
    """Problem, label and seed."""
    where, header = run[0]
    if header.get("kind") != "run":
        raise ValueError(f'{where}, is not of kind "run": is it a record of a run? Move it out of the results.')
    return header["problem"], header["label"], header["seed"]


def _packed(run: Lines, *, reports: bool) -> str:
    """The line of a packed file."""
    (_, header), *rest = run
    points = [line for _, line in rest if line["kind"] == "point"]
    columns = {name: [point[name] for point in points] for name in (points[0] if points else ()) if name not in _UNREAD}
    kept = ("seconds", "ritz_values") if header["seed"] == 0 else ("seconds",)
    reported = [_reduced(point.get("report"), kept) for point in points] if reports else []
    if any(reported):
        columns["report"] = reported
    end = rest[-1][1] if rest and rest[-1][1]["kind"] == "end" else None
    line = {"run": header, "points": columns, "end": end}
    return json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n"


def _reduced(report: Line | None, kept: Iterable[str]) -> Line | None:
    return {name: report[name] for name in kept if report.get(name)} if report else None
