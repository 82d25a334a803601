"""Markdown tables of the study of deep networks, one set per budget. Nothing here trains.

Each cell is the value at the end of the budget: mean [min, max] over seeds. Bold marks the lowest mean over the seeds
that all compared methods have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.common.markdown import bold, section, spread
from experiments.common.records import OVER, Quantity, Run
from experiments.common.table import NONE, ahead, all_settings, distinct, marks, seeds, sizes
from experiments.deep.plan import ABLATIONS
from experiments.deep.records import budgets_of, by_task, serving
from experiments.deep.study import ABLATIONS as ABLATED
from experiments.deep.style import NAMES

_Compared = Mapping[str, Sequence[Run]]  # by method or label

_LOSSES = "Weight decay included. Mean [lowest, highest] over seeds; bold: the lowest mean over the seeds all have."
_ERRORS = (
    "Training / held-out error at the same points. Autoencoders: squared error per image. Classifiers: wrong answers. "
    "Text: wrong characters. Bold: the lowest held-out error."
)


def table(results: Path) -> str:
    """All tables of a folder.

    Raises:
        ValueError: it has no runs.
    """
    ablated = by_task(results / ABLATED, required=False) if (results / ABLATED).is_dir() else {}
    tasks = by_task(results, required=not ablated)
    parts: list[str] = []
    for seconds in budgets_of([run for runs in tasks.values() for run in runs]):
        served = {task: by for task, runs in tasks.items() if (by := serving(runs, seconds))}
        parts += _tables(served, f"after {seconds:g} CPU seconds", explained=not parts)
    if tasks:
        parts += _setup(tasks)
    return "\n".join([*parts, *(_ablations(ablated) if ablated else ())])


def _tables(rows: Mapping[str, _Compared], where: str, *, explained: bool) -> list[str]:
    """Losses and errors, a row per task and a column per method."""
    columns = [name for name in NAMES if any(name in by for by in rows.values())]
    head = ["task", *(NAMES[column] for column in columns)]
    return [
        section(f"{title} {where}", head, [[task, *cells(by, columns)] for task, by in rows.items()], note * explained)
        for title, cells, note in (("Training loss", _losses, _LOSSES), ("Errors", _errors, _ERRORS))
    ]


def _losses(by: _Compared, columns: Sequence[str]) -> list[str]:
    best = _best(by, "loss")
    return [
        bold(spread(_ends(by[column], "loss")), column == best) + marks(by[column]) if column in by else NONE
        for column in columns
    ]


def _errors(by: _Compared, columns: Sequence[str]) -> list[str]:
    best = _best(by, "held_out_error")
    cells = []
    for column in columns:
        unit = " %" if column in by and by[column][0].percent else ""
        train, held_out = (
            spread(_ends(by.get(column, ()), name), unit=unit, digits=3) for name in ("error", "held_out_error")
        )
        cells.append(f"{train} / {bold(held_out, column == best)}" if column in by else NONE)
    return cells


def _best(by: _Compared, quantity: Quantity) -> str | None:
    """The lowest mean over common seeds."""
    return ahead({column: {run.seed: _end(run, quantity) for run in runs} for column, runs in by.items()})[0]


def _ends(runs: Sequence[Run], quantity: Quantity) -> list[float]:
    return [_end(run, quantity) for run in runs]


def _end(run: Run, quantity: Quantity) -> float:
    """At the end of the budget that a run was cut to."""
    return float(getattr(run.points[-1], quantity))


def _setup(tasks: Mapping[str, Sequence[Run]]) -> list[str]:
    """Tasks with their runs, and each setting with the runs that used it."""
    rows: list[list[str]] = []
    used: dict[tuple[str, str], list[str]] = {}
    for task, runs in tasks.items():
        labels = dict.fromkeys(run.label for run in sorted(runs, key=_order))
        several = {label: [run for run in runs if run.label == label] for label in labels}
        for label, some in several.items():
            method = NAMES.get(some[0].method, some[0].method)
            used.setdefault((method, all_settings(some)), []).append(f"{task} {label}")
        rows.append(
            [
                task,
                distinct(map(sizes, runs)),
                distinct(f"{r.parameters:,}" for r in runs),
                distinct(f"{r.weight_decay:g}" for r in runs),
                distinct(_facts(r) for r in runs),
                "; ".join(f"{label} (seeds {seeds(some)})" for label, some in several.items()),
            ]
        )
    every = [run for runs in tasks.values() for run in runs]
    machines = distinct(f"{run.machine.get('cpu', NONE)}, torch {run.machine.get('torch', NONE)}" for run in every)
    head = ["task", "samples: training / evaluated / held-out", "parameters", "weight decay", "data", "runs"]
    note = f"One thread per run; CPU seconds of its process, without evaluations. Machine: {machines}."
    chosen = [[*setting, "; ".join(names)] for setting, names in used.items()]
    return [section("What was run", head, rows, note), section("Settings", ["method", "settings", "runs"], chosen, "")]


def _ablations(ablated: Mapping[str, Sequence[Run]]) -> list[str]:
    """Losses and errors, a row per variant and two columns per task."""
    parts = []
    for seconds in sorted({run.seconds for runs in ablated.values() for run in runs}):
        found: dict[str, dict[str, list[Run]]] = {}
        for task, runs in ablated.items():
            for run in runs:
                if run.seconds == seconds and run.label in ABLATIONS:
                    found.setdefault(task, {}).setdefault(run.label, []).append(run.cut(OVER * seconds))
        labels = [label for label in ABLATIONS if any(label in by for by in found.values())]
        columns = [cells(by, labels) for by in found.values() for cells in (_losses, _errors)]
        head = ["variant", *(f"{task}: {name}" for task in found for name in ("loss", "errors"))]
        rows = [[label, *cells] for label, *cells in zip(labels, *columns, strict=True)]
        every = [run for by in found.values() for runs in by.values() for run in runs]
        note = f"Loss and errors as above. Seeds: {seeds(every)}."
        parts.append(section(f"Ablations after {seconds:g} CPU seconds", head, rows, note))
    return parts


def _order(run: Run) -> tuple[int, float, str]:
    methods = list(NAMES)
    return methods.index(run.method) if run.method in methods else len(methods), run.seconds, run.label


def _facts(run: Run) -> str:
    return ", ".join(f"{key} {str(value)[:12]}" for key, value in run.facts.items()) or NONE
