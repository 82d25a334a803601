"""Tables of recorded runs as Markdown, padded so that they read as plain text too. Nothing here trains.

Errors are those of the early-stopped point (lowest held-out error), as in the paper; losses are the lowest that the
budget bought. Both are taken within the budget of the row, and runs of another budget are listed, but not compared.
Over seeds: mean [min, max], for ratios of times median [min, max]; who is ahead is decided on common seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.common.markdown import bold, section, spread
from experiments.common.records import Run, read_runs
from experiments.common.table import NONE, BySeed, ahead, distinct, marks, mixed, seeds, settings, sizes
from experiments.paper import published as paper
from experiments.paper.plan import LONG, LONG_RUNS, MAIN
from experiments.paper.reach import duration, reached
from experiments.paper.records import (
    best_held_out,
    by_label,
    lowest,
    of_row,
    relative_times,
    row_budget,
    within_budget,
)
from experiments.paper.style import LABELS

NOT_RUN = "not run"
_AIMED = {
    "ksd-long": "KSD",
    "ksd-k80-long": "KSD, K = 80",
    "ksd-paper-long": "KSD, paper's settings",
    "ksd-raised-long": "the same, K raised to 80",
    "deep-long": "DEEP",
    "hf-long": "HF",
    "adam": "Adam",
}
_HESSIAN = ("ksd", "ksd-hessian", "hf", "hf-hessian")
_Grouped = dict[str, dict[str, list[Run]]]  # problem, label; an empty list where all runs are of another budget
_FIGURES = ("seeds", "lowest training loss", "training / held-out error")
_COMMON = "Means are compared over the seeds that all main methods have."


def table(results: Path) -> str:
    """All tables of a folder of results, every problem in them, run or not."""
    runs = read_runs(results)
    names = [*paper.PROBLEMS, *sorted({run.problem for run in runs} - set(paper.PROBLEMS))]
    recorded = {name: by_label(runs, name) for name in names}
    grouped = {}
    for name, found in recorded.items():
        kept = of_row(found)
        grouped[name] = {label: [within_budget(run) for run in kept.get(label, [])] for label in found}
    times = {name: _times(*(_whole(found, label) for label in ("ksd", "hf"))) for name, found in recorded.items()}
    parts = [
        _paper_table(grouped, times),
        _distance_table(recorded, grouped),
        _methods_table(grouped),
        _loss_table(grouped),
    ]
    if any("-hessian" in label for found in grouped.values() for label in found):
        parts.append(_hessian_table(grouped))
    return "\n".join([*parts, *_others_table(grouped), _setup_table(recorded)])


def _whole(found: dict[str, list[Run]], label: str) -> list[Run] | None:
    """All of the runs of the row's budget, a step beyond it included; None if there is no run of any."""
    return of_row(found).get(label, []) if label in found else None


def _paper_table(grouped: _Grouped, times: Mapping[str, list[str]]) -> str:
    head = ["problem", "paper's data"]
    head += ["paper: HF", "paper: KSD", "paper: KSD time"]
    head += [
        "here: HF",
        "here: KSD",
        "here: KSD time, seconds",
        "here: KSD time, gradients",
        "at loss",
        "seconds, HF half-way",
    ]
    rows = []
    for name, found in grouped.items():
        row = paper.row(name)
        cells = [name, NONE, NONE, NONE, NONE]
        if row:
            other = " ‡" if row.dataset in paper.OTHER_DATA else ""
            unit = " %" if row.percent else ""
            hf, ksd = (
                f"{train}{unit} / {bold(f'{cv}{unit}', cv == min(row.hf_cv, row.ksd_cv))}"
                for train, cv in ((row.hf_train, row.hf_cv), (row.ksd_train, row.ksd_cv))
            )
            cells = [name, row.dataset + other, hf, ksd, str(row.time)]
        pair = {label: found.get(label) for label in ("hf", "ksd")}
        best, _ = ahead({label: _held_out(runs) for label, runs in pair.items() if runs}, MAIN)
        cells += [_errors(runs, best=label == best) for label, runs in pair.items()]
        rows.append([*cells, *times[name]])
    note = (
        "Errors are training / held-out, at the point of lowest held-out error. Bold marks the lower held-out error. "
        "KSD time is KSD's time divided by HF's time to the lowest training loss that both reach (*at loss*); below 1, "
        "KSD is faster. The last column is this ratio if HF ends after half of its budget. The paper's ratio is taken "
        "at its early stop."
    )
    return section("KSD and HF, the paper's figures and ours", head, rows, note)


def _distance_table(recorded: _Grouped, grouped: _Grouped) -> str:
    head = ["problem", "paper: KSD", "method", "budget", "lowest error", "paper's error", "time ÷ HF's", "at error"]
    rows = []
    for name, found in recorded.items():
        row = paper.row(name)
        if row is None or name not in LONG:
            continue
        target, unit = float(row.ksd_cv), " %" if row.percent else ""
        of = {label: found.get(label, []) if label in LONG_RUNS else grouped[name].get(label, []) for label in _AIMED}
        hf = next(iter(of["hf-long"]), None)
        for label, runs in of.items():
            for run in runs[:1]:
                compared = _sooner(run, hf, target, unit) if hf and run is not hf else [NONE, NONE]
                cells = [name, f"{row.ksd_cv}{unit}", _AIMED[label], run.budget]
                rows.append([*cells, *_nearest(run, target, unit), *compared])
    note = (
        "The rows whose data are the paper's: each method's lowest held-out error and when it was reached, and after "
        "what time it had the error of the paper's KSD. KSD and DEEP have their defaults, and HF its tuned settings; "
        "Adam's runs are those of the other tables. The ratio is of times to the paper's error, or to the lowest error "
        "that both reach."
    )
    return section("How far from the paper's errors", head, rows, note)


def _nearest(run: Run, target: float, unit: str) -> list[str]:
    """The lowest held-out error with its time, and the time of the target."""
    best = best_held_out(run)
    if best is None:
        return [NONE, NONE]
    when = reached(run, target)
    lowest = f"{spread([best.held_out_error], unit=unit, digits=3)} after {duration(best.seconds)}"
    return [lowest, "not reached" if when is None else f"after {duration(when)}"]


def _sooner(run: Run, hf: Run, target: float, unit: str) -> list[str]:
    """The run's time over HF's to the target, or to the lowest held-out error that both reach, and that error."""
    level = max(target, *(min((p.held_out_error for p in r.points), default=math.inf) for r in (run, hf)))
    mine, other = reached(run, level), reached(hf, level)
    if not mine or not other:
        return [NONE, NONE]
    return [spread([mine / other], digits=2), spread([level], unit=unit, digits=3)]


def _methods_table(grouped: _Grouped) -> str:
    labels = _present(grouped, skip=_HESSIAN, always=("lbfgs", "sgd", "adam"))
    rows = []
    for name, found in grouped.items():
        compared = {label: found[label] for label in ("ksd", "hf", *labels) if found.get(label)}
        best, _ = ahead({label: _held_out(runs) for label, runs in compared.items()}, MAIN)
        rows.append([name, *(_errors(found.get(label), best=label == best) for label in labels)])
    head = ["problem", *(LABELS[label] for label in labels)]
    note = (
        "Training / held-out error at the point of lowest held-out error. Bold marks the lowest held-out error of a "
        f"row, with KSD and HF in the comparison. {_COMMON}"
    )
    return section("The other methods", head, rows, note)


def _loss_table(grouped: _Grouped) -> str:
    labels = _present(grouped, skip=(), always=("ksd", "hf", "lbfgs", "sgd", "adam"))
    rows = []
    for name, found in grouped.items():
        compared = {label: found[label] for label in labels if found.get(label)}
        reached = {label: {run.seed: lowest(run) for run in runs} for label, runs in compared.items()}
        best, common = ahead(reached, MAIN)
        cells = [_losses(found.get(label), best=label == best) for label in labels]
        budget = row_budget(found)
        spent = f"{budget.amount:g} {budget.unit}" if budget else NONE
        rows.append([name, spent, *cells, _verdict(reached, best, common)])
    head = ["problem", "budget", *(LABELS[label] for label in labels), "ahead"]
    note = (
        "Lowest training loss, weight decay included, within the budget plus 1/40, since steps are whole. Bold marks "
        f"the lowest. {_COMMON} *Ahead* says on how many of these seeds the method has the lowest loss."
    )
    return section("Training loss after equal budgets", head, rows, note)


def _hessian_table(grouped: _Grouped) -> str:
    rows = [
        [name, LABELS[label], *_figures(found[label])]
        for name, found in grouped.items()
        if any("-hessian" in label for label in found)
        for label in _HESSIAN
        if found.get(label)
    ]
    note = "Methods use the Gauss–Newton matrix unless *Hessian* is said."
    return section("Gauss–Newton matrix or Hessian", ["problem", "method", *_FIGURES], rows, note)


def _others_table(grouped: _Grouped) -> list[str]:
    rows = [
        [name, label, *_figures(runs)]
        for name, found in grouped.items()
        for label, runs in found.items()
        if label not in LABELS and label not in LONG_RUNS and runs
    ]
    note = "These runs differ from the tuned ones in their settings, which the last table lists."
    return [section("Other runs", ["problem", "label", *_FIGURES], rows, note)] if rows else []


def _figures(runs: Sequence[Run]) -> list[str]:
    return [seeds(runs), _losses(runs), _errors(runs)]


def _setup_table(recorded: _Grouped) -> str:
    problems: list[list[str]] = []
    settings_of: list[list[str]] = []
    for name, found in recorded.items():
        runs = [run for several in found.values() for run in several]
        if not runs:
            continue
        clocks = (f"{r.budget}, {r.clock}, {r.threads} thread{'s' if r.threads > 1 else ''}" for r in runs)
        parameters, decay = (f"{r.parameters:,}" for r in runs), (f"{r.weight_decay:g}" for r in runs)
        machines = (f"{r.machine.get('cpu', NONE)}, torch {r.machine.get('torch', NONE)}" for r in runs)
        problems.append([name, *map(distinct, (map(sizes, runs), parameters, decay, clocks, machines))])
        budget = row_budget(found)
        for label, several in found.items():
            for mark in ("", " ¶"):
                some = [run for run in several if (run.allowed == budget) == (not mark)]
                if some:
                    settings_of.append([name, label + mark, seeds(some), _settings(some)])
    head = ["problem", "samples: training / evaluated / held-out", "parameters", "weight decay"]
    run = section("What was run", [*head, "budget and clock", "machine"], problems, "")
    return "\n".join([run, section("Settings", ["problem", "label", "seeds", "settings"], settings_of, "")])


def _settings(runs: Sequence[Run]) -> str:
    """Seed by seed, and said aloud, where seeds differ."""
    if not mixed(runs):
        return settings(runs[0], "g") or NONE
    return " ".join(["**mixed settings**", *(f"(seed {run.seed}: {settings(run, 'g') or NONE})" for run in runs)])


def _times(ksd: Sequence[Run] | None, hf: Sequence[Run] | None) -> list[str]:
    """KSD's time over HF's in seconds and in gradients, the level it is taken at, and the first of HF half-way."""
    if not ksd or not hf:
        return [_absent(None if None in (ksd, hf) else [])] * 2 + [NONE] * 2
    pairs = relative_times(ksd, hf)
    common = len({run.seed for run in ksd} & {run.seed for run in hf})
    if not pairs:
        return ["none comparable"] * 2 + [NONE] * 2
    half = relative_times(ksd, [within_budget(run, 0.5) for run in hf])
    left = f" ({len(pairs)} of {common} seeds)" if len(pairs) < common else ""
    seconds = spread([p.seconds for p in pairs], middle=statistics.median, digits=2)
    gradients = spread([p.gradients for p in pairs], middle=statistics.median, digits=2)
    level = spread([p.loss for p in pairs], middle=statistics.median)
    sooner = spread([p.seconds for p in half], middle=statistics.median, digits=2) if half else NONE
    return [seconds + left, gradients + left, level, sooner]


def _absent(runs: Sequence[Run] | None) -> str:
    """In place of a figure: there are no runs, or none of the row's budget."""
    return NOT_RUN if runs is None else "not compared ¶"


def _errors(runs: Sequence[Run] | None, *, best: bool = False) -> str:
    """Training / held-out error at the early-stopped points."""
    if not runs:
        return _absent(runs)
    points = [best_held_out(run) for run in runs]
    unit = " %" if runs[0].percent else ""
    train = spread([math.nan if p is None else p.error for p in points], unit=unit, digits=3)
    held_out = spread([*_held_out(runs).values()], unit=unit, digits=3)
    return f"{train} / {bold(held_out, best)}{marks(runs)}"


def _losses(runs: Sequence[Run] | None, *, best: bool = False) -> str:
    return bold(spread([lowest(run) for run in runs]), best) + marks(runs) if runs else _absent(runs)


def _held_out(runs: Sequence[Run]) -> dict[int, float]:
    return {run.seed: math.nan if (p := best_held_out(run)) is None else p.held_out_error for run in runs}


def _verdict(reached: BySeed, best: str | None, seeds: set[int]) -> str:
    """Who is ahead, and on how many of these seeds it is the lowest of all that have them."""
    if best is None:
        return NONE if seeds or len(reached) < 2 else "no seed in common"
    wins = sum(all(not v.get(s, math.inf) < reached[best][s] for v in reached.values()) for s in seeds)
    return f"{LABELS[best]}, {wins} of {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"


def _present(grouped: _Grouped, *, skip: Sequence[str], always: Sequence[str]) -> list[str]:
    """Labels that get a column: those always shown, and the others that were run."""
    run = {label for found in grouped.values() for label in found}
    return [label for label in LABELS if label not in skip and (label in always or label in run)]
