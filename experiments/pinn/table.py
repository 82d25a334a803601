"""Tables of the PINN study as Markdown. Nothing here trains.

There is one table of errors for each network, budget and kind of problem: the equations that nothing was chosen on,
those that tuning uses, and the fits, which have no mean, since their errors have nothing in common. The other tables
cover all of these comparisons. A run that diverged counts with its last finite point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.common.markdown import bold, section
from experiments.common.records import Quantity, Run, ordered
from experiments.common.table import NONE, all_settings, lowest, seeds
from experiments.pinn.ablations import CHANGES
from experiments.pinn.fits import FITS
from experiments.pinn.problems import CHOOSING, PROBLEMS, SHOWN
from experiments.pinn.records import BEYOND, Group, compared, geometric_mean, middle, only, read_groups, read_runs
from experiments.pinn.style import BASE, NAMES

OURS = NAMES[BASE]

_KINDS = {"unseen equations": SHOWN, "": PROBLEMS, "fits": FITS}
_LOSSES: tuple[Quantity, ...] = ("loss", "held_out_loss")
_TIMES = (15.0, 30.0, 60.0, 150.0, 300.0, 900.0)
_FIRST_THEN = "adam-lbfgs"

#: Comparison, such as "3x32, 60 s" → its runs.
_Groups = Mapping[str, Group]


def table(results: Path, columns: Sequence[str] = ()) -> str:
    """Return all tables of a folder; only the columns named, or all methods. The flow alone makes no table."""
    groups = compared(read_groups(results, (*SHOWN, *PROBLEMS, *FITS), list(NAMES), columns))
    found = {
        ", ".join(part for part in (group.network, f"{group.seconds:g} s", kind) if part): some
        for kind, problems in _KINDS.items()
        for group in groups
        if (some := only(group, problems)) and (columns or list(some.columns) != [BASE])
    }
    parts = [_errors(name, group, first=not i) for i, (name, group) in enumerate(found.items())]
    parts += [*_best_rivals(found), *_course(found), *_losses(found)]
    if not columns:
        parts += [*_float32(results), *_longest(results), *_changes(results)]
    return "\n".join([*parts, _setup(found)])


def short(value: float) -> str:
    """Return two digits in as few letters as a narrow column needs."""
    if not math.isfinite(value):
        return "not finite"
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"


def _errors(name: str, group: Group, *, first: bool) -> str:
    """Return the errors at the end of runs; the first of these tables explains all of them."""
    medians = _medians(group.runs)
    rows = []
    for problem, by in group.runs.items():
        best = lowest(medians[problem])
        cells = [
            bold(short(medians[problem][column]), column == best) + _range(by[column]) if column in by else NONE
            for column in group.columns
        ]
        rows.append([problem, *cells])
    if _equations(group):
        rows.append(["geometric mean", *_means(group, medians)])
        if BASE in group.columns:
            rows.append([f"ratio to {OURS}", *(_ratio(group.runs, column) for column in group.columns)])
    note = (
        "Relative L2 error: median over seeds [lowest, highest]; bold: the lowest median of the row. Ratio: error of "
        f"the method ÷ error of {OURS}, over the seeds that both have, geometric mean over the problems."
    )
    return section(f"Error: {name}", ["problem", *map(_head, group.columns)], rows, note if first else "")


def _best_rivals(groups: _Groups) -> list[str]:
    """Return by how much the base leads the best rival, on equations that nothing was chosen on."""
    having = {name: group for name, group in groups.items() if set(group.runs) <= set(SHOWN) and _compares(group)}
    rows = []
    for problem in ordered((problem for group in having.values() for problem in group.runs), SHOWN):
        cells = []
        for group in having.values():
            medians = _medians(group.runs).get(problem, {})
            name = min(set(medians) - {BASE}, key=lambda column: medians[column], default=BASE)
            cells.append(f"{_number(_lead(medians), 2)} {_head(name)}" if name != BASE else NONE)
        rows.append([problem, *cells])
    rows.append(["geometric mean", *(_number(_mean_lead(group.runs), 2) for group in having.values())])
    note = f"Lowest median error of the other methods ÷ that of {OURS}. Above 1 {OURS} leads."
    return [section(f"Best rival ÷ {OURS}", ["problem", *having], rows, note)] if having else []


def _compares(group: Group) -> bool:
    return BASE in group.columns and len(group.columns) > 1 and _equations(group)


def _medians(runs: Mapping[str, Mapping[str, Sequence[Run]]]) -> dict[str, dict[str, float]]:
    return {problem: {column: middle(some) for column, some in by.items()} for problem, by in runs.items()}


def _lead(medians: Mapping[str, float]) -> float:
    """Return the lowest error of the rivals relative to that of the base; NaN if either is missing."""
    rivals = [error for column, error in medians.items() if column != BASE and math.isfinite(error)]
    return min(rivals) / medians[BASE] if rivals and BASE in medians else math.nan


def _mean_lead(runs: Mapping[str, Mapping[str, Sequence[Run]]]) -> float:
    return geometric_mean(lead for by in _medians(runs).values() if math.isfinite(lead := _lead(by)))


def _equations(group: Group) -> bool:
    return not set(group.runs) & set(FITS)


def _range(runs: Sequence[Run]) -> str:
    ends = [run.final.error for run in runs]
    return f" [{short(min(ends))}, {short(max(ends))}]" if len(ends) > 1 else ""


def _means(group: Group, medians: Mapping[str, Mapping[str, float]]) -> list[str]:
    have = {column: [by[column] for by in medians.values() if column in by] for column in group.columns}
    means = {column: geometric_mean(values) for column, values in have.items()}
    # Over other problems than the others' a mean cannot be the best.
    best = lowest({column: mean for column, mean in means.items() if len(have[column]) == len(medians)})
    return [
        bold(short(means[column]), column == best)
        + (f" ({len(values)} of {len(medians)})" if len(values) < len(medians) else "")
        for column, values in have.items()
    ]


def _ratio(runs: Mapping[str, Mapping[str, Sequence[Run]]], column: str) -> str:
    """Return the geometric mean over problems of ratios of medians over the seeds that both methods have."""
    pairs = []
    for by in runs.values():
        both = {run.seed for run in by.get(column, ())} & {run.seed for run in by.get(BASE, ())}
        if both:
            pairs.append([middle([run for run in by[name] if run.seed in both]) for name in (column, BASE)])
    return _number(geometric_mean(mine / base if base else math.nan for mine, base in pairs))


def _number(ratio: float, digits: int = 3) -> str:
    """Return so many digits, thousands with a comma.

    Example:
        >>> _number(1234.5), _number(34.27), _number(0.5, 2), _number(1234.5, 2)
        ('1,230', '34.3', '0.5', '1,200')
    """
    if not math.isfinite(ratio):
        return NONE
    rounded = float(f"{ratio:.{digits}g}")
    return f"{rounded:,.0f}" if rounded >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


def _course(groups: _Groups) -> list[str]:
    """Return how the lead changes with time, where anything is compared with the base."""
    rows = []
    for name, group in groups.items():
        if not _compares(group):
            continue
        known = [_cut(group, t) if t <= group.seconds else {} for t in _TIMES]
        rivals = [column for column in group.columns if column != BASE]
        rows += [[name, _head(column), *(_ratio(then, column) for then in known)] for column in rivals]
        if set(group.runs) <= set(SHOWN):
            rows.append([name, "best rival", *(_number(_mean_lead(then), 2) for then in known)])
    head = ["comparison", "method", *(f"{t:g} s" for t in _TIMES)]
    note = (
        f"Error of the method ÷ error of {OURS}, as in the tables above, after so many CPU seconds. Best rival: of "
        "each problem and time."
    )
    return [section("Ratios over time", head, rows, note)] if rows else []


def _cut(group: Group, seconds: float) -> dict[str, dict[str, list[Run]]]:
    return {
        name: {column: [_until(run, seconds) for run in runs] for column, runs in by.items()}
        for name, by in group.runs.items()
    }


def _until(run: Run, seconds: float) -> Run:
    """Return the run as if it had ended then: with its last finite point that is not much later."""
    then = run.cut(BEYOND * seconds)
    return then if seconds < run.seconds and any(point.finite for point in then.points) else run


def _losses(groups: _Groups) -> list[str]:
    """Return losses of the base on equations."""
    having = {name: group for name, group in groups.items() if BASE in group.columns and _equations(group)}
    rows = []
    for problem in ordered((problem for group in having.values() for problem in group.runs), (*SHOWN, *PROBLEMS)):
        found = [group.runs.get(problem, {}).get(BASE, ()) for group in having.values()]
        both = [[short(middle(runs, name)) for name in _LOSSES if runs] for runs in found]
        rows.append([problem, *(" / ".join(pair) or NONE for pair in both)])
    note = "Medians over seeds. A held-out loss far above the training loss means that the points are overfitted."
    return [section(f"Training / held-out loss of {OURS}", ["problem", *having], rows, note)] if rows else []


def _changes(results: Path) -> list[str]:
    """Return ratios of errors of the flow changed in one thing to the errors without the change, seed by seed."""
    groups = read_groups(results, CHOOSING, [], (BASE, *CHANGES), required=False)
    changed = [
        (group, column)
        for group in groups
        for column in group.columns
        if column != BASE and any(column in group.runs.get(name, ()) for name in CHOOSING)
    ]
    problems = [name for name in CHOOSING if any(column in group.runs.get(name, ()) for group, column in changed)]
    rows = []
    for group, column in changed:
        by_problem = []
        for problem in problems:
            by = group.runs.get(problem, {})
            mine, base = ({run.seed: run.final.error for run in by.get(name, ())} for name in (column, BASE))
            by_problem.append([mine[seed] / base[seed] for seed in mine if base.get(seed)])
        means = [geometric_mean(ratios) for ratios in by_problem if ratios]
        rows.append([f"{group.seconds:g} s", column, _ratios(means), *map(_ratios, by_problem)])
    note = (
        f"Error with the change ÷ error of {OURS} from the same seed: geometric mean over seeds, or over problems, "
        "[lowest, highest]. Above 1 the change does harm."
    )
    head = ["after", "change", "mean", *problems]
    return [section(f"{OURS} changed in one thing", head, rows, note)] if rows else []


def _float32(results: Path) -> list[str]:
    """Return errors in float32, beside those of the flow in float64 from the same seeds."""
    columns = [f"{BASE}-float32", f"{_FIRST_THEN}-float32"]
    rows, ratios = [], []
    for group in read_groups(results, SHOWN, [], [*columns, BASE], required=False):
        for problem, by in group.runs.items():
            if not all(by.get(column) for column in columns):
                continue
            seeds_of = {run.seed for run in by[columns[0]]}
            double = [run for run in by.get(BASE, ()) if run.seed in seeds_of]
            errors = [middle(by[column]) for column in columns] + ([middle(double)] if double else [])
            if double:
                ratios.append(errors[0] / errors[2])
            best = bold(short(errors[0]), errors[0] < errors[1]), bold(short(errors[1]), errors[1] < errors[0])
            rows.append([f"{group.network}, {group.seconds:g} s", problem, *best, short(errors[2]) if double else NONE])
    head = ["after", "problem", f"{OURS}, float32", f"{NAMES[_FIRST_THEN]}, float32", f"{OURS}, float64"]
    note = (
        "Relative L2 error; bold: the lower of both in float32. "
        f"{OURS} in float32 ÷ float64: {_number(geometric_mean(ratios))} in the geometric mean."
    )
    return [section("float32", head, rows, note)] if rows else []


def _longest(results: Path) -> list[str]:
    """Return how the error of the flow falls in the runs of a quarter of an hour, with any number of points."""
    runs = [run for run in read_runs(results) if run.method == BASE and run.seconds == _TIMES[-1]]
    rows = [
        [run.problem, f"{run.parameters:,}", f"{run.samples:,}", _points(run), *(_at(run, t) for t in _TIMES[2:])]
        for run in sorted(runs, key=lambda run: (run.problem, run.parameters))
    ]
    head = ["problem", "parameters", "residuals", "points", *(f"{t:g} s" for t in _TIMES[2:])]
    note = f"Relative L2 error of {OURS} after so many CPU seconds, seed 0. New points are drawn every ten steps."
    return [section("A quarter of an hour", head, rows, note)] if rows else []


def _points(run: Run) -> str:
    return "new" if "resampled" in run.label else "fixed"


def _at(run: Run, seconds: float) -> str:
    return short(_until(run, seconds).final.error)


def _ratios(values: Sequence[float]) -> str:
    if not values:
        return NONE
    mean, low, high = (_number(value, 2) for value in (geometric_mean(values), min(values), max(values)))
    return f"{mean} [{low}, {high}]" if len(values) > 1 else mean


def _setup(groups: _Groups) -> str:
    rows = []
    for name, group in groups.items():
        for column in group.columns:
            runs = [run for by in group.runs.values() for run in by.get(column, ())]
            steps = [run.final.step for run in runs]
            ends = [f"{n} {end}" for end in ("stopped", "diverged") if (n := sum(run.end == end for run in runs))]
            cells = [all_settings(runs), seeds(runs), str(len(runs)), f"{min(steps)} – {max(steps)}"]
            rows.append([name, _head(column), *cells, ", ".join(ends) or NONE])
    note = (
        "A run ends with the first step at or beyond its budget. One step of the loop may hold several cheap steps of "
        "a method. Settings that are not listed are the method's defaults. Where a method lacks a run of a budget, its "
        "longer run is read at that time."
    )
    head = ["comparison", "method", "settings", "seeds", "runs", "steps", "ended early"]
    return section("Runs", head, rows, note)


def _head(column: str) -> str:
    return NAMES.get(column, column)
