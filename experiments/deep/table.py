"""Tables of the study of deep networks as Markdown, a set for each budget. Nothing here trains.

Figures are those at the end of a budget: mean [min, max] over seeds. Bold is the lowest mean over the seeds that all
methods of the row have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.common.markdown import bold, section, spread
from experiments.common.records import OVER, Quantity, Run
from experiments.common.table import NONE, ahead, all_settings, distinct, marks, seeds, sizes
from experiments.deep.plan import ABLATIONS
from experiments.deep.published import published
from experiments.deep.records import budgets_of, by_task, serving
from experiments.deep.study import ABLATIONS as ABLATED
from experiments.deep.style import NAMES

_ByColumn = Mapping[str, Sequence[Run]]  # method or label


def table(results: Path) -> str:
    """All tables of a folder.

    Raises:
        ValueError: it has no runs.
    """
    ablated = by_task(results / ABLATED, required=False) if (results / ABLATED).is_dir() else {}
    tasks = by_task(results, required=not ablated)
    parts: list[str] = []
    for seconds in budgets_of([run for runs in tasks.values() for run in runs]):
        served = {task: serving(runs, seconds) for task, runs in tasks.items()}
        parts += _tables({task: by for task, by in served.items() if by}, f"after {seconds:g} CPU seconds", NAMES)
    if tasks:
        parts += [*published(tasks), _setup(tasks)]
    return "\n".join([*parts, *(_ablations(ablated) if ablated else ())])


def _tables(rows: Mapping[str, _ByColumn], where: str, names: Mapping[str, str]) -> list[str]:
    columns = [name for name in names if any(name in by for by in rows.values())]
    head = ["task", *(names[column] for column in columns)]
    losses = "Weight decay included. Mean [lowest, highest] over seeds; bold: the lowest mean over the seeds all have."
    errors = (
        "Training / held-out error, at the same points: of autoencoders the squared error per image, of the others the "
        "share of wrong answers, of the characters that of wrong characters. Bold: the lowest held-out error."
    )
    return [
        section(f"Training loss {where}", head, [[task, *_losses(by, columns)] for task, by in rows.items()], losses),
        section(f"Errors {where}", head, [[task, *_errors(by, columns)] for task, by in rows.items()], errors),
    ]


def _losses(by: _ByColumn, columns: Sequence[str]) -> list[str]:
    best = _best(by, "loss")
    return [
        bold(spread(_ends(by[column], "loss")), column == best) + marks(by[column]) if column in by else NONE
        for column in columns
    ]


def _errors(by: _ByColumn, columns: Sequence[str]) -> list[str]:
    best = _best(by, "held_out_error")
    cells = []
    for column in columns:
        unit = " %" if column in by and by[column][0].percent else ""
        train, held_out = (
            spread(_ends(by.get(column, ()), name), unit=unit, digits=3) for name in ("error", "held_out_error")
        )
        cells.append(f"{train} / {bold(held_out, column == best)}" if column in by else NONE)
    return cells


def _best(by: _ByColumn, quantity: Quantity) -> str | None:
    """The lowest mean over common seeds."""
    return ahead({column: {run.seed: _end(run, quantity) for run in runs} for column, runs in by.items()})[0]


def _ends(runs: Sequence[Run], quantity: Quantity) -> list[float]:
    return [_end(run, quantity) for run in runs]


def _end(run: Run, quantity: Quantity) -> float:
    """At the end of the budget that a run was cut to."""
    return float(getattr(run.points[-1], quantity))


def _setup(tasks: Mapping[str, Sequence[Run]]) -> str:
    rows = []
    for task, runs in tasks.items():
        labels = dict.fromkeys(run.label for run in sorted(runs, key=_order))
        several = {label: [run for run in runs if run.label == label] for label in labels}
        rows.append(
            [
                task,
                distinct(map(sizes, runs)),
                distinct(f"{r.parameters:,}" for r in runs),
                distinct(f"{r.weight_decay:g}" for r in runs),
                distinct(_facts(r) for r in runs),
                distinct(f"{r.machine.get('cpu', NONE)}, torch {r.machine.get('torch', NONE)}" for r in runs),
                "; ".join(f"{label} (seeds {seeds(some)}): {all_settings(some)}" for label, some in several.items()),
            ]
        )
    head = ["task", "samples: training / evaluated / held-out", "parameters", "weight decay", "data", "machine", "runs"]
    note = "Every run has one thread; its seconds are those of its own process, evaluations not counted."
    return section("What was run", head, rows, note)


def _ablations(ablated: Mapping[str, Sequence[Run]]) -> list[str]:
    names = {label: label for label in ABLATIONS}
    parts = []
    for seconds in sorted({run.seconds for runs in ablated.values() for run in runs}):
        rows: dict[str, dict[str, list[Run]]] = {}
        for task, runs in ablated.items():
            for run in runs:
                if run.seconds == seconds and run.label in names:
                    rows.setdefault(task, {}).setdefault(run.label, []).append(run.cut(OVER * seconds))
        parts += _tables(rows, f"of ablations after {seconds:g} CPU seconds", names)
    return [*parts, _setup(ablated).replace("## What was run", "## What was run of ablations")]


def _order(run: Run) -> tuple[int, float, str]:
    methods = list(NAMES)
    return methods.index(run.method) if run.method in methods else len(methods), run.seconds, run.label


def _facts(run: Run) -> str:
    return ", ".join(f"{key} {str(value)[:12]}" for key, value in run.facts.items()) or NONE
