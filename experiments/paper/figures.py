"""Figures of recorded runs as PNG: the same runs give the same file. Nothing here trains.

convergence: training loss over seconds and over gradients. held-out: training and held-out error over seconds.
anatomy: what the time of a step goes into. ritz: the spectrum that every step of KSD sees.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from experiments.common.figures import band, legend, log_values, panels, save, seeds_of, styled, time_scale
from experiments.common.records import Axis, Quantity, Run, ordered, read_runs
from experiments.common.series import Series, series
from experiments.paper import published as paper
from experiments.paper.records import by_label, of_row
from experiments.paper.style import LABELS, LINES, PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Kind = Literal["convergence", "held-out", "anatomy", "ritz"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# Of Ritz values: steps that are drawn at most, and the smallest beside the largest: below is rounding.
_STEPS = 60
_SMALLEST = 1e-12

_Runs = Mapping[str, Sequence[Run]]  # by label


def figure(kind: Kind, results: Path, out: Path, problems: Sequence[str] = ()) -> list[Path]:
    """Draw one kind of figure for the problems named, or all that have runs; returns the files.

    Files are ``<kind>-<problem>.png``; several problems share one anatomy, ``anatomy-all``. A problem whose runs do
    not have what the kind shows is left out; so are runs of another budget than the row's, as in tables.

    Raises:
        ValueError: there is no such kind, no run at all, or none of a problem that was named.
    """
    if kind not in KINDS:
        raise ValueError(f"There is no figure {kind!r}: choose from {', '.join(KINDS)}.")
    runs = read_runs(results)
    found = {run.problem for run in runs if run.points}
    if not found:
        raise ValueError(
            f"There are no runs in {results}: make one with `python -m experiments run curves --optimizer ksd "
            f"--results {results}`."
        )
    missing = [name for name in problems if name not in found]
    if missing:
        raise ValueError(f"{results} has no run of {missing[0]}: there are runs of {', '.join(sorted(found))}.")
    grouped = {
        name: {label: several for label, several in of_row(by_label(runs, name)).items() if label in LABELS}
        for name in problems or ordered(found, list(paper.PROBLEMS))
    }
    out.mkdir(parents=True, exist_ok=True)
    with styled():
        if kind == "anatomy":
            name = next(iter(grouped)) if len(grouped) == 1 else "all"
            return save(_anatomy(grouped), out / f"{kind}-{name}")
        draw: Mapping[Kind, Callable[[str, _Runs], Figure | None]] = {
            "convergence": _convergence,
            "held-out": _held_out,
            "ritz": _ritz,
        }
        return [path for name, by in grouped.items() for path in save(draw[kind](name, by), out / f"{kind}-{name}")]


def _convergence(name: str, by: _Runs) -> Figure | None:
    drawn, axes = panels(2, 2, 3.9, sharey=True)
    left = _lines(axes[0], by, "seconds", "loss")
    right = _lines(axes[1], by, "gradients", "loss")
    if not left or not right:
        return None
    _value_scale(axes[0], [*left, *right], _start(by, "loss"))
    axes[0].set(xlabel=_seconds(by), ylabel="training loss")
    axes[1].set(xlabel="gradients over the training set")
    _finish(drawn, name, by)
    return drawn


def _held_out(name: str, by: _Runs) -> Figure | None:
    drawn, axes = panels(2, 2, 3.9)
    first = next(run for several in by.values() for run in several) if by else None
    quantities: tuple[Quantity, Quantity] = ("error", "held_out_error")
    for axis, quantity in zip(axes, quantities, strict=True):
        shown = _lines(axis, by, "seconds", quantity)
        if not shown or first is None:
            return None
        cases = first.held_out_samples if quantity == "held_out_error" else first.evaluated_samples or first.samples
        _value_scale(axis, shown, _start(by, quantity), smallest=100 / max(cases, 1) if first.percent else None)
        axis.set(xlabel=_seconds(by), title="held-out set" if quantity == "held_out_error" else "training set")
        axes[0].set_ylabel(first.error_name)
    _finish(drawn, name, by)
    return drawn


def _lines(axis: Axes, by: _Runs, time: Axis, quantity: Quantity) -> list[Series]:
    """A line for every method, a band behind it where there are several seeds."""
    shown = []
    for number, (label, runs) in enumerate(by.items()):
        curve = series(runs, time, quantity)
        if curve is None:
            continue
        shown.append(curve)
        # Markers stand at different places on each line, so that lines on top of each other can be told apart.
        marked = (0.02 + 0.017 * number, 0.17)
        look = LINES[label].arguments()
        axis.plot(curve.times, curve.middle, label=LABELS[label], drawstyle="steps-post", markevery=marked, **look)
        if len(runs) > 1:
            band(axis, curve, look["color"], "post")
    if shown:
        time_scale(axis, shown)
    return shown


def _value_scale(axis: Axes, shown: Sequence[Series], start: float, smallest: float | None = None) -> None:
    """Logarithmic where values span a factor of three or more; what is worse than the start is cut off.

    ``smallest`` is the error of one wrong case: below it lies only zero, which gets a place on the axis if it occurs.
    """
    values = [v for curve in shown for v in curve.middle if math.isfinite(v)]
    lows = [v for curve in shown for v in curve.low if math.isfinite(v)]
    low, high = min(lows, default=0.0), min(max(values, default=1.0), start)
    if smallest is not None and low < smallest:
        axis.set_yscale("symlog", linthresh=smallest, linscale=0.4)
        axis.set_ylim(-0.1 * smallest, high * 1.2)
        decades = [10.0**k for k in range(math.ceil(math.log10(1.9 * smallest)), 3) if 10.0**k <= high * 1.2]
        axis.set_yticks([0.0, *decades], ["0", *(f"{value:g}" for value in decades)])
    elif low > 0 and high / low >= 3:
        log_values(axis, low, high)
    elif high > low:
        axis.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))


def _start(by: _Runs, quantity: Quantity) -> float:
    """The highest value before training."""
    values = [getattr(run.points[0], quantity) for several in by.values() for run in several]
    return max((v for v in values if math.isfinite(v)), default=math.inf)


def _seconds(by: _Runs) -> str:
    """What the seconds are, where all runs agree on it."""
    return f"seconds{_clock(run for several in by.values() for run in several)}"


def _clock(runs: Iterable[Run]) -> str:
    """Clock and threads in brackets, where all runs agree on them."""
    kinds = {(run.clock, run.threads) for run in runs}
    if len(kinds) != 1:
        return ""
    clock, threads = kinds.pop()
    return f" ({clock.replace('cpu', 'CPU')}, {threads} thread{'s' if threads > 1 else ''})"


def _finish(drawn: Figure, name: str, by: _Runs) -> None:
    """The legend and a title."""
    shown = {line.get_label() for axis in drawn.axes for line in axis.get_lines()}
    looks = {LABELS[label]: LINES[label].arguments() for label in by if LABELS[label] in shown}
    columns = 5 if len(looks) <= 5 else math.ceil(len(looks) / math.ceil(len(looks) / 4))
    legend(drawn, looks, columns, handlelength=3.2)
    drawn.suptitle(f"{name}: {seeds_of({len(several) for several in by.values()})}", fontsize=10)


def _anatomy(grouped: Mapping[str, _Runs]) -> Figure | None:
    """A bar of shares for every problem and method, and the seconds of a step beside it.

    Reports have the wall's seconds, which other work on the machine makes longer: of them only shares are shown. What
    a step takes is told by the run's own clock.
    """
    found = {(name, label): by[label] for name, by in grouped.items() for label in ("ksd", "hf") if label in by}
    bars = {key: parts for key, runs in found.items() if sum(parts := _phases(runs)) > 0}
    if not bars:
        return None
    drawn, (axis,) = panels(1, 1, 1.4 + 0.28 * len(bars))
    names = list(dict.fromkeys(name for name, _ in bars))
    places = [-i - 0.5 * names.index(name) for i, (name, _) in enumerate(bars)]  # half a bar between problems
    starts = [0.0] * len(bars)
    for number, phase in enumerate(PHASES):
        shares = [100 * parts[number] / sum(parts) for parts in bars.values()]
        painted = axis.barh(places, shares, 0.85, starts, color=phase.colour, edgecolor="white", label=phase.name)
        for bar in painted:
            bar.set(hatch=phase.hatch, linewidth=0.5)
        for place, share, start in zip(places, shares, starts, strict=True):
            if share >= 6:
                box = {"facecolor": phase.colour, "edgecolor": "none", "pad": 1.0}
                axis.text(start + share / 2, place, f"{share:.0f}", ha="center", va="center", fontsize=8.5, bbox=box)
        starts = [start + share for start, share in zip(starts, shares, strict=True)]
    for place, key in zip(places, bars, strict=True):
        axis.text(101, place, f"{_seconds_a_step(found[key]):.3g} s", va="center", fontsize=9)
    axis.set_yticks(places, [f"{name}, {LABELS[label]}" for name, label in bars])
    clock = _clock(run for key in bars for run in found[key])
    axis.set_xlabel(f"share of the wall time of a step, %\nat the right: mean seconds of a step{clock}")
    axis.set(xlim=(0, 110), xticks=range(0, 101, 20), axisbelow=True)
    axis.spines["bottom"].set_bounds(0, 100)
    axis.margins(y=0.02)
    axis.grid(visible=False, axis="y")
    drawn.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=len(PHASES), frameon=False)
    return drawn


def _seconds_a_step(runs: Sequence[Run]) -> float:
    """On the runs' own clock, over all steps from their first points to their last."""
    steps = sum(run.points[-1].step - run.points[0].step for run in runs)
    return sum(run.points[-1].seconds - run.points[0].seconds for run in runs) / steps if steps else math.nan


def _phases(runs: Sequence[Run]) -> list[float]:
    """Mean wall seconds of a step in each of ``PHASES``, over the steps that were reported."""
    reports = [p.report["seconds"] for run in runs for p in run.points if p.report and p.report.get("seconds")]
    if not reports:
        return []
    return [
        statistics.fmean(sum(seconds.get(key) or 0.0 for key in phase.keys) for seconds in reports) for phase in PHASES
    ]


def _ritz(name: str, by: _Runs) -> Figure | None:
    """The Ritz values of reported steps of the first seed; negative ones by their size, in another colour."""
    shown = {}
    for label in ("ksd", "ksd-hessian"):
        reports = [(p.step, p.report) for p in by[label][0].points if p.report] if label in by else []
        thinned = reports[:: math.ceil(len(reports) / _STEPS)] if reports else []
        dots = [(step, v) for step, report in thinned for v in report.get("ritz_values", ()) if v]
        if dots:
            shown[label] = dots
    if not shown:
        return None
    drawn, axes = panels(len(shown), len(shown), 3.6, sharey=True)
    top = max(abs(v) for dots in shown.values() for _, v in dots)
    looks = ((1, "positive", "#0072B2", "o", 2.0), (-1, "negative, by its size", "#D55E00", "x", 3.0))
    for axis, (label, dots) in zip(axes, shown.items(), strict=True):
        for sign, word, colour, marker, size in looks:
            some = [(step, abs(v)) for step, v in dots if v * sign > 0 and abs(v) > _SMALLEST * top]
            if some:
                steps, sizes = zip(*some, strict=True)
                axis.plot(steps, sizes, marker, color=colour, markersize=size, label=word)
        axis.set_yscale("log")
        matrix = "Hessian" if label == "ksd-hessian" else "Gauss–Newton matrix"
        axis.set(xlabel="step", title=f"{matrix}, seed {by[label][0].seed}")
    axes[0].set_ylabel("Ritz value")
    handles = {word: handle for axis in axes for handle, word in zip(*axis.get_legend_handles_labels(), strict=True)}
    if len(handles) > 1:
        drawn.legend([*handles.values()], [*handles], loc="outside lower center", ncols=2, frameon=False, markerscale=2)
    drawn.suptitle(f"{name}: the curvature that the gradient sees (Ritz values, step by step)", fontsize=10)
    return drawn
