"""Tables of recorded runs as Markdown, padded so that they read as plain text too. Nothing here trains.

Errors are those of the early-stopped point (lowest held-out error), as in the paper; losses are the lowest that the
budget bought. Over seeds: mean [min, max], for ratios of times median [min, max].
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from experiments import paper
from experiments.records import LABELS, Axis, Run, best_held_out, by_label, final, lowest, read_runs, relative_times

NOT_RUN = "not run"
_MARKS = {
    "‡": "The paper's own data are not public: same kind of task, other data.",
    "§": "A seed that is not finished.",
    "†": "A seed whose loss was not finite at the end.",
}
_HESSIAN = ("ksd", "ksd-hessian", "hf", "hf-hessian")
_OVER = 1.025
_Grouped = dict[str, dict[str, list[Run]]]  # problem, label


def table(results: Path) -> str:
    """All tables of a folder of results, every problem in them, run or not."""
    runs = read_runs(results)
    names = [*paper.PROBLEMS, *sorted({run.problem for run in runs} - set(paper.PROBLEMS))]
    grouped = {name: by_label(runs, name) for name in names}
    parts = [_paper_table(grouped), _methods_table(grouped), _loss_table(grouped)]
    if any("-hessian" in label for found in grouped.values() for label in found):
        parts.append(_hessian_table(grouped))
    return "\n".join([*parts, _setup_table(grouped)])


def _paper_table(grouped: _Grouped) -> str:
    head = ["problem", "paper's data"]
    head += ["paper: HF", "paper: KSD", "paper: KSD time"]
    head += ["here: HF", "here: KSD", "here: KSD time, seconds", "here: KSD time, gradients", "at loss"]
    rows = []
    for name, found in grouped.items():
        row = paper.row(name)
        cells = [name, "–", "–", "–", "–"]
        if row:
            other = " ‡" if row.dataset in paper.OTHER_DATA else ""
            unit = " %" if row.percent else ""
            hf, ksd = (
                f"{train}{unit} / {_bold(f'{cv}{unit}', cv == min(row.hf_cv, row.ksd_cv))}"
                for train, cv in ((row.hf_train, row.hf_cv), (row.ksd_train, row.ksd_cv))
            )
            cells = [name, row.dataset + other, hf, ksd, str(row.time)]
        pair = {label: found.get(label, []) for label in ("hf", "ksd")}
        best = _ahead({label: _held_out(runs) for label, runs in pair.items() if runs})
        cells += [_errors(runs, bold=label == best) for label, runs in pair.items()]
        rows.append([*cells, *_times(pair["ksd"], pair["hf"])])
    note = (
        "Errors: training / held-out, at the point of lowest held-out error. Bold: the lower held-out error. KSD time: "
        "that of KSD over that of HF to the lowest training loss that both reach (column *at loss*), in seconds and in "
        "gradients over the training set; below 1, KSD is faster. The paper's is the time to its early stop."
    )
    return _section("KSD and HF, the paper's figures and ours", head, rows, note)


def _methods_table(grouped: _Grouped) -> str:
    labels = _present(grouped, skip=_HESSIAN, always=("lbfgs", "sgd", "adam"))
    rows = []
    for name, found in grouped.items():
        compared = {label: found[label] for label in ("ksd", "hf", *labels) if label in found}
        best = _ahead({label: _held_out(runs) for label, runs in compared.items()})
        rows.append([name, *(_errors(found.get(label, []), bold=label == best) for label in labels)])
    head = ["problem", *(LABELS[label] for label in labels)]
    note = "Training / held-out error at the point of lowest held-out error. Bold: lower than KSD and HF as well."
    return _section("The other methods", head, rows, note)


def _loss_table(grouped: _Grouped) -> str:
    labels = _present(grouped, skip=(), always=("ksd", "hf", "lbfgs", "sgd", "adam"))
    rows = []
    for name, found in grouped.items():
        axis, until = _budget([run for label in labels for run in found.get(label, [])])
        reached = {
            label: {run.seed: lowest(run, axis, until * _OVER) for run in found[label]}
            for label in labels
            if label in found
        }
        best = _ahead({label: list(losses.values()) for label, losses in reached.items()})
        cells = [_losses(found.get(label, []), axis, until * _OVER, bold=label == best) for label in labels]
        budget = f"{until:.4g} {axis}" if math.isfinite(until) else "–"
        rows.append([name, budget, *cells, _verdict(reached, best)])
    head = ["problem", "budget", *(LABELS[label] for label in labels), "ahead"]
    note = (
        "Lowest training loss, weight decay included, within the shortest budget that a run has spent (and a fortieth "
        "more, since steps are whole). Bold: the lowest mean. *Ahead*: on how many of the seeds that all the methods "
        "have it is the lowest."
    )
    return _section("Training loss after equal budgets", head, rows, note)


def _hessian_table(grouped: _Grouped) -> str:
    rows = [
        [name, LABELS[label], _losses(found[label]), _errors(found[label])]
        for name, found in grouped.items()
        if any("-hessian" in label for label in found)
        for label in _HESSIAN
        if label in found
    ]
    head = ["problem", "method", "lowest training loss", "training / held-out error"]
    note = "KSD and HF without a word more use the Gauss–Newton matrix. Errors: at the point of lowest held-out error."
    return _section("Gauss–Newton matrix or Hessian", head, rows, note)


def _setup_table(grouped: _Grouped) -> str:
    rows = []
    for name, found in grouped.items():
        runs = [run for several in found.values() for run in several]
        sizes = (f"{r.samples:,} / {r.evaluated_samples or r.samples:,} / {r.held_out_samples:,}" for r in runs)
        clocks = (f"{r.budget}, {r.clock}, {r.threads} thread{'s' if r.threads > 1 else ''}" for r in runs)
        cells = (
            sizes,
            (f"{r.parameters:,}" for r in runs),
            (f"{r.weight_decay:g}" for r in runs),
            clocks,
            (str(r.machine.get("cpu", "–")) for r in runs),
            (f"torch {r.machine.get('torch', '–')}" for r in runs),
            (r.started for r in runs),
        )
        seeds = ", ".join(f"{label} {' '.join(str(run.seed) for run in several)}" for label, several in found.items())
        if runs:
            rows.append([name, *map(_distinct, cells), seeds])
    head = ["problem", "samples: training / evaluated / held-out", "parameters", "weight decay"]
    head += ["budget and clock", "processor", "software", "started", "seeds"]
    return _section("What was run", head, rows, "")


def _times(ksd: Sequence[Run], hf: Sequence[Run]) -> list[str]:
    """KSD's time over HF's in seconds and in gradients, and the level it is taken at."""
    if not ksd or not hf:
        return [NOT_RUN] * 2 + ["–"]
    pairs = relative_times(ksd, hf)
    seeds = len({run.seed for run in ksd} & {run.seed for run in hf})
    if not pairs:
        return ["none comparable"] * 2 + ["–"]
    left = f" ({len(pairs)} of {seeds} seeds)" if len(pairs) < seeds else ""
    seconds = _spread([p.seconds for p in pairs], middle=statistics.median, digits=2)
    gradients = _spread([p.gradients for p in pairs], middle=statistics.median, digits=2)
    level = _spread([p.loss for p in pairs], middle=statistics.median)
    return [seconds + left, gradients + left, level]


def _errors(runs: Sequence[Run], *, bold: bool = False) -> str:
    """Training / held-out error at the early-stopped points."""
    if not runs:
        return NOT_RUN
    points = [best_held_out(run) for run in runs]
    unit = " %" if runs[0].percent else ""
    train = _spread([math.nan if p is None else p.error for p in points], unit=unit, digits=3)
    return f"{train} / {_bold(_spread(_held_out(runs), unit=unit, digits=3), bold)}{_marks(runs)}"


def _losses(runs: Sequence[Run], axis: Axis = "seconds", until: float = math.inf, *, bold: bool = False) -> str:
    return _bold(_spread([lowest(run, axis, until) for run in runs]), bold) + _marks(runs) if runs else NOT_RUN


def _held_out(runs: Sequence[Run]) -> list[float]:
    return [math.nan if (p := best_held_out(run)) is None else p.held_out_error for run in runs]


def _ahead(found: dict[str, list[float]]) -> str | None:
    """The label with the lowest mean, where there are at least two to compare; None if two share it."""
    means = {label: statistics.fmean(v) for label, v in found.items() if not math.isnan(statistics.fmean(v))}
    best = [label for label, mean in means.items() if mean == min(means.values())]
    return best[0] if len(best) == 1 and len(means) > 1 else None


def _verdict(reached: Mapping[str, Mapping[int, float]], best: str | None) -> str:
    """Who has the lowest mean, and on how many seeds it is the lowest."""
    if best is None:
        return "–"
    common = set.intersection(*(set(losses) for losses in reached.values()))
    wins = sum(all(not losses[s] < reached[best][s] for losses in reached.values()) for s in common)
    return f"{LABELS[best]}, {wins} of {len(common)} seeds" if common else f"{LABELS[best]}, no seed in common"


def _present(grouped: _Grouped, *, skip: Sequence[str], always: Sequence[str]) -> list[str]:
    """Labels that get a column: those always shown, and the others that were run."""
    run = {label for found in grouped.values() for label in found}
    return [label for label in LABELS if label not in skip and (label in always or label in run)]


def _budget(runs: Sequence[Run]) -> tuple[Axis, float]:
    """The budget that all have: the shortest at which one ended because it was spent."""
    axis = runs[0].axis if runs else "seconds"
    spent = [getattr(p, axis) for p in (final(run) for run in runs if run.end == "budget") if p is not None]
    return axis, min(spent, default=math.inf)


def _distinct(values: Iterable[str]) -> str:
    """All different values: more than one says that the runs were not alike."""
    return "; ".join(dict.fromkeys(values)) or "–"


def _spread(
    values: Sequence[float],
    *,
    unit: str = "",
    middle: Callable[[Sequence[float]], float] = statistics.fmean,
    digits: int = 4,
) -> str:
    valid = [v for v in values if math.isfinite(v)]
    if not valid:
        return "not finite"
    centre, low, high = (f"{v:.{digits}g}" for v in (middle(valid), min(valid), max(valid)))
    some = f" ({len(valid)} of {len(values)} seeds)" if len(valid) < len(values) else ""
    return f"{centre}{unit}" + (f" [{low}, {high}]" if low != high else "") + some


def _marks(runs: Sequence[Run]) -> str:
    """§ not finished, † no finite loss at the end, on any of the seeds."""
    diverged = any(not math.isfinite(p.loss) for p in map(final, runs) if p is not None)
    return " §" * any(run.end is None for run in runs) + " †" * diverged


def _bold(text: str, bold: bool) -> str:
    return f"**{text}**" if bold else text


def _section(title: str, head: list[str], rows: list[list[str]], note: str) -> str:
    """A heading, the table with its columns padded, and its note; marks are explained where they occur."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in [head, ["-" * w for w in widths], *rows]]
    notes = [note, *(f"{mark} {meaning}" for mark, meaning in _MARKS.items() if any(mark in line for line in lines))]
    return "\n".join([f"## {title}", "", *lines, "", *(f"{text}\n" for text in notes if text)])
