"""Tables of the study of deep networks as Markdown, a set for each budget. Nothing here trains.

Figures are those at the end of a budget: mean [min, max] over seeds. Bold is the lowest mean over the seeds that all
methods of the row have.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from experiments.deep.plan import ABLATIONS
from experiments.deep.published import published
from experiments.deep.records import at_end, budgets_of, by_task, cut, serving
from experiments.deep.study import ABLATIONS as ABLATED
from experiments.deep.style import NAMES
from experiments.markdown import bold, section, spread
from experiments.records import Point, Run

_NONE = "–"
_Rows = Mapping[str, Mapping[str, Sequence[Run]]]  # task, method or label


def table(results: Path) -> str:
    """All tables of a folder.

    Raises:
        ValueError: it has no runs.
    """
    tasks = by_task(results)
    ablated = by_task(results / ABLATED) if (results / ABLATED).is_dir() else {}
    if not tasks and not ablated:
        raise ValueError(f"There are no runs in {results}: make some with `python -m experiments deep study`.")
    parts: list[str] = []
    for seconds in budgets_of([run for runs in tasks.values() for run in runs]):
        served = {task: serving(runs, seconds) for task, runs in tasks.items()}
        parts += _tables({task: by for task, by in served.items() if by}, f"after {seconds:g} CPU seconds", NAMES)
    if tasks:
        parts += [*published(tasks), _setup(tasks)]
    if ablated:
        parts += _ablations(ablated)
    return "\n".join(parts)


def _tables(rows: _Rows, where: str, names: Mapping[str, str]) -> list[str]:
    columns = [name for name in names if any(name in by for by in rows.values())]
    head = ["task", *(names[column] for column in columns)]
    losses = "Weight decay included. Mean [lowest, highest] over seeds; bold: the lowest mean over the seeds all have."
    errors = (
        "Training / held-out error, at the same points: of autoencoders the squared error per image, of the others the "
        "share of wrong answers, of the characters that of wrong characters. Bold: the lowest held-out error."
    )
    return [
        section(f"Training loss {where}", head, [_losses(task, by, columns) for task, by in rows.items()], losses),
        section(f"Errors {where}", head, [_errors(task, by, columns) for task, by in rows.items()], errors),
    ]


def _losses(task: str, by: Mapping[str, Sequence[Run]], columns: Sequence[str]) -> list[str]:
    best = _best(by, lambda point: point.loss)
    cells = [
        bold(spread([at_end(run).loss for run in by[column]]), column == best) + _marks(by[column])
        if column in by
        else _NONE
        for column in columns
    ]
    return [task, *cells]


def _errors(task: str, by: Mapping[str, Sequence[Run]], columns: Sequence[str]) -> list[str]:
    best = _best(by, lambda point: point.held_out_error)
    cells = []
    for column in columns:
        if column not in by:
            cells.append(_NONE)
            continue
        unit = " %" if by[column][0].percent else ""
        train, held_out = (
            spread([getattr(at_end(run), name) for run in by[column]], unit=unit, digits=3)
            for name in ("error", "held_out_error")
        )
        cells.append(f"{train} / {bold(held_out, column == best)}")
    return [task, *cells]


def _best(by: Mapping[str, Sequence[Run]], value: Callable[[Point], float]) -> str | None:
    """The lowest mean over common seeds, where there are two methods to compare; a seed that diverged is no best."""
    seeds = set.intersection(*({run.seed for run in runs} for runs in by.values()))
    if not seeds or len(by) < 2:
        return None
    means = {
        column: statistics.fmean(value(at_end(run)) for run in runs if run.seed in seeds) for column, runs in by.items()
    }
    finite = {column: mean for column, mean in means.items() if math.isfinite(mean)}
    return min(finite, key=lambda column: finite[column], default=None)


def _marks(runs: Sequence[Run]) -> str:
    """As in other tables: § not finished, † no finite loss at the end, ◊ settings that differ between seeds."""
    diverged = any(not math.isfinite(at_end(run).loss) for run in runs)
    mixed = any(run.settings != runs[0].settings for run in runs)
    return " §" * any(run.end is None for run in runs) + " †" * diverged + " ◊" * mixed


def _setup(tasks: Mapping[str, Sequence[Run]]) -> str:
    rows = []
    for task, runs in tasks.items():
        labels = dict.fromkeys(run.label for run in sorted(runs, key=_order))
        several = {label: [run for run in runs if run.label == label] for label in labels}
        rows.append(
            [
                task,
                _distinct(f"{r.samples:,} / {r.evaluated_samples:,} / {r.held_out_samples:,}" for r in runs),
                _distinct(f"{r.parameters:,}" for r in runs),
                _distinct(f"{r.weight_decay:g}" for r in runs),
                _distinct(_facts(r) for r in runs),
                _distinct(f"{r.machine.get('cpu', _NONE)}, torch {r.machine.get('torch', _NONE)}" for r in runs),
                "; ".join(f"{label} (seeds {_seeds(some)}): {_settings(some)}" for label, some in several.items()),
            ]
        )
    head = ["task", "samples: training / evaluated / held-out", "parameters", "weight decay", "data", "machine", "runs"]
    note = "Every run has one thread; its seconds are those of its own process, evaluations not counted."
    return section("What was run", head, rows, note)


def _ablations(ablated: Mapping[str, Sequence[Run]]) -> list[str]:
    names = {label: label for label in ABLATIONS}
    parts = []
    for seconds in sorted({run.allowed.amount for runs in ablated.values() for run in runs}):
        rows: dict[str, dict[str, list[Run]]] = {}
        for task, runs in ablated.items():
            for run in runs:
                if run.allowed.amount == seconds and run.label in names:
                    rows.setdefault(task, {}).setdefault(run.label, []).append(cut(run, seconds))
        parts += _tables(rows, f"of ablations after {seconds:g} CPU seconds", names)
    return [*parts, _setup(ablated).replace("## What was run", "## What was run of ablations")]


def _order(run: Run) -> tuple[int, float, str]:
    methods = list(NAMES)
    return methods.index(run.method) if run.method in methods else len(methods), run.allowed.amount, run.label


def _facts(run: Run) -> str:
    return ", ".join(f"{key} {str(value)[:12]}" for key, value in run.facts.items()) or _NONE


def _seeds(runs: Sequence[Run]) -> str:
    return " ".join(str(run.seed) for run in runs)


def _settings(runs: Sequence[Run]) -> str:
    found = (
        " ".join(f"{key}={value}" for key, value in run.settings.items() if value is not None and value is not False)
        for run in runs
    )
    return " ◊ ".join(dict.fromkeys(found)) or _NONE


def _distinct(values: Iterable[str]) -> str:
    """All different values: more than one says that the runs were not alike."""
    return "; ".join(dict.fromkeys(values))
