"""The plots: the loss, the time by phase, the Ritz values, the coefficients, and all of them on one page."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from krylov_descent.plot import records as of
from krylov_descent.plot import style
from krylov_descent.plot.records import Record, Report, records_of, steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

By: TypeAlias = Literal["step", "seconds", "gradients"]

_XLABEL = {"step": "step", "seconds": "seconds in steps", "gradients": "gradients of one sample"}
_RUN = "krylov-descent run"  # the gid of lines of runs
_FEW = 40  # the largest number of steps with markers
_ROUNDING = 1e-12  # Ritz values below this part of a step's largest are rounding
_MOST_PHASES = 20
_MOST_CELLS = 1_000_000  # of the table of coefficients
_DETAILS = {  # of GaussNewtonFlow
    "fraction": "Step fraction η",
    "damping": "Damping λ",
    "rows": "Rows of the sketch",
}
_DECADES = 6  # the largest span of the colour scale; smaller coefficients share its lowest colour


def convergence(
    reports: Iterable[Report], ax: Axes | None = None, *, by: By = "step", label: str | None = None
) -> Axes:
    """Plot the loss on A before each step, on a logarithmic scale if it is positive.

    With sets, faint lines show the loss on C before and after each search. Crosses mark steps that rolled back the one
    before; triangles at the top mark losses that are not finite. A second call with the same axes adds another run in
    another colour.

    Args:
        reports: ``StepReport``s, or the dicts of ``read``.
        ax: the axes; None for a new figure.
        by: the horizontal axis: steps, seconds, or gradients of one sample.
        label: the label of this run in the legend.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD, plot
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> optimizer = KSD([w], krylov_dim=1)
        >>> reports = [optimizer.step(lambda: ((w**4).mean(), w)) for _ in range(4)]
        >>> ax = plot.convergence(reports, by="gradients")
        >>> ax.get_yscale()
        'log'
    """
    if by not in _XLABEL:
        raise ValueError(f"by={by!r}: must be one of {', '.join(_XLABEL)}.")
    records = records_of(reports)
    ax = style.axes_of(ax)
    earlier = [line for line in ax.get_lines() if line.get_gid() == _RUN]
    palette = style.theme_of(ax).colours
    colour = palette[len(earlier) % len(palette)]
    places, losses = _places(records, by), of.column(records, "loss")
    marker: dict[str, Any] = {"marker": "o", "markersize": 4} if len(records) <= _FEW else {}
    ax.plot(places[:-1], losses, color=colour, linewidth=1.8, label=label, gid=_RUN, zorder=3, **marker)
    if of.has_search_set(records):
        _searches(ax, records, places, colour)
    _undone(ax, [(x, y) for x, y, back in zip(places, losses, of.undone(records), strict=False) if back])
    _at_edge(ax, [x for x, y in zip(places, losses, strict=False) if not math.isfinite(y)], "v", 0.98, "not finite")
    _value_scale(ax)
    name = "loss on A" if any("A" in (record.get("set_sizes") or {}) for record in records) else "loss"
    style.frame(ax, f"L{name[1:]} before each step{'' if earlier else _from_to(losses)}", _XLABEL[by], name)
    if by == "step":
        style.whole_steps(ax)
    style.legend(ax)
    return ax


def phases(reports: Iterable[Report], ax: Axes | None = None) -> Axes:
    """Plot the seconds of each step, stacked by phase; the legend has the share of each phase.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD, plot
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> ax = plot.phases([KSD([w]).step(lambda: (w.square().mean(), w))])
        >>> [label.split()[0] for label in ax.get_legend_handles_labels()[1]]
        ['gradient', 'basis', 'search']
    """
    records = records_of(reports)
    ax = style.axes_of(ax)
    laps = of.seconds(records)
    total = math.fsum(itertools.chain(*laps.values()))
    style.frame(ax, f"Time of each step by phase: {total:.3g} s in all", "step", "seconds")
    if not total > 0:
        style.nothing(ax, "these reports have no times")
        return ax
    if len(laps) > _MOST_PHASES:
        style.nothing(ax, f"{len(laps):,} phases are too many to draw")
        return ax
    borders, floor, palette = of.edges(steps(records)), [0.0] * len(records), style.theme_of(ax).colours
    for number, (name, values) in enumerate(laps.items()):
        top = [a + b for a, b in zip(floor, values, strict=True)]
        share = 100 * math.fsum(values) / total
        words = f"{name} {share:.0f} %"
        colour = palette[number % len(palette)]
        ax.stairs(top, borders, baseline=floor, fill=True, color=colour, label=words, linewidth=0)
        floor = top
    ax.set_xlim(borders[0], borders[-1])
    ax.set_ylim(0, 1.25 * max(floor))  # room for the legend
    style.whole_steps(ax)
    style.legend(ax, loc="upper center", ncols=len(laps), columnspacing=1, handlelength=1, handletextpad=0.5)
    return ax


def ritz(reports: Iterable[Report], ax: Axes | None = None) -> Axes:
    """Plot the Ritz values of each step: the curvature in the gradient's Krylov space, not the whole spectrum.

    They are the eigenvalues of the curvature within the step's basis: the Krylov space of the gradient
    (preconditioned, if there is a preconditioner) and the previous step or steps. Directions without a component of
    the gradient do not appear. Negative values, which the Hessian has, are shown by their size with another marker.
    Values below 1e-12 of the step's largest are rounding, and are left out.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD, plot
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> report = KSD([w], curvature="hessian").step(lambda: w[0] ** 2 - w[1] ** 2 + w[1] ** 4)
        >>> ax = plot.ritz([report])
        >>> ax.get_title()
        'Ritz values: curvature in the Krylov space'
    """
    records = records_of(reports)
    ax = style.axes_of(ax)
    style.frame(
        ax,
        "Ritz values: curvature in the Krylov space",
        "step",
        "Ritz value (gradient-weighted,\nnot the whole spectrum)",
    )
    dots = _dots(records)
    if not dots:
        style.nothing(ax, "these reports have no Ritz values")
        return ax
    size, look = 4.0 if len(records) <= _FEW else 3.0 if len(records) <= 4 * _FEW else 2.0, style.theme_of(ax)
    for sign, marker, colour, word in ((1, "o", look.blue, "positive"), (-1, "x", look.orange, "negative: its size")):
        some = [(x, abs(value)) for x, value in dots if value * sign > 0]
        if some:
            xs, ys = zip(*some, strict=True)
            ax.plot(
                xs,
                ys,
                linestyle="none",
                marker=marker,
                color=colour,
                markersize=size if sign > 0 else size + 2.0,
                markeredgewidth=0 if sign > 0 else 1.2,
                alpha=0.75,
                label=word,
                rasterized=len(dots) > 2000,  # vector files stay small
            )
    ax.set_yscale("log")
    style.log_ticks(ax.yaxis, [abs(value) for _, value in dots])
    style.whole_steps(ax)
    if any(value < 0 for _, value in dots):
        style.legend(ax)
    return ax


def coefficients(reports: Iterable[Report], ax: Axes | None = None) -> Axes:
    """Plot the size of the coefficients of each step, one row for each basis vector.

    Rows are the Krylov vectors in their order, then the previous step (its part that is orthogonal to them), and any
    earlier ones. The basis is orthonormal, so a coefficient is the length of the step along that vector. A cell is
    blank if the step has no such vector, or did not move along it.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD, plot
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0, 1.0]))
        >>> optimizer = KSD([w], krylov_dim=2)
        >>> reports = [optimizer.step(lambda: ((w**4).mean(), w)) for _ in range(3)]
        >>> ax = plot.coefficients(reports)
        >>> [label.get_text() for label in ax.get_yticklabels()]
        ['1', '2', 'previous']
    """
    records = records_of(reports)
    ax = style.axes_of(ax)
    from matplotlib.colors import LogNorm

    style.frame(ax, "Step along each basis vector", "step", "basis vector", grid=False)
    if (cells := _rows(records)[1] * len(records)) > _MOST_CELLS:
        style.nothing(ax, f"{cells:,} coefficients are too many to draw:\npass fewer reports")
        return ax
    table = _table(records)
    sizes = [x for row in table for x in row if x > 0]
    if not sizes:
        style.nothing(ax, "these reports have no coefficients")
        return ax
    K = _rows(records)[0]
    previous = len(table) - K
    top = max(sizes)
    bottom = max(min(sizes), top * 10.0**-_DECADES)
    # If all cells are equal, the scale still needs some length.
    norm = LogNorm(bottom if bottom < top else top / 10, top, clip=True)
    borders = of.edges(steps(records))
    rows = [k - 0.5 for k in range(1, len(table) + 2)]
    mesh = ax.pcolormesh(borders, rows, table, norm=norm, cmap=style.MAP, rasterized=True)
    look = style.theme_of(ax)
    ax.set_facecolor(look.blank)
    ax.axhline(K + 0.5, color=look.background, linewidth=2.0)
    ax.set_xlim(borders[0], borders[-1])
    ax.set_ylim(len(table) + 0.5, 0.5)
    shown = _ticks(K)
    names = ["previous", *(f"… {k} before" for k in range(1, previous))]
    ax.set_yticks([*shown, *range(K + 1, len(table) + 1)], [*map(str, shown), *names])
    style.whole_steps(ax)
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.02, extend="min" if min(sizes) < bottom else "neither")
    bar.set_label("|coefficient|", fontsize=style.LABEL, color=look.text)
    bar.ax.tick_params(which="both", labelsize=style.TICK, colors=look.text)
    return ax


def trial(report: Any, ax: Axes | None = None) -> Axes:
    """Plot the losses of the trial of ``check(..., try_seconds=...)``; those of torch's optimizers are grey.

    Example:
        >>> import torch
        >>> from krylov_descent import check, plot
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> ax = plot.trial(check(lambda: ((w**4).mean(), w), [w], try_seconds=0.02))
        >>> ax.get_yscale()
        'log'
    """
    rows = sorted((row for row in report.trial if row.loss_after == row.loss_after), key=lambda row: row.loss_after)
    if not rows:
        raise ValueError(
            "There is no trial to draw, or none that ended: pass the report of check(..., try_seconds=20)."
        )
    ax, end = style.axes_of(ax), max(row.seconds for row in rows)
    look = style.theme_of(ax)
    ours = iter(look.colours)
    colours = [next(ours) if "krylov_descent" in row.line else look.grey for row in rows]
    for row, colour in zip(rows, colours, strict=True):
        xs, ys = zip(*row.curve[1:], strict=True)
        ax.plot(xs, ys, color=colour, linewidth=2, marker="o", markersize=3, zorder=2 if colour == look.grey else 3)
    ax.set(xscale="log", xlim=(None, end))
    style.log_ticks(ax.xaxis, [ax.get_xlim()[0], end])
    values = [y for row in rows for _, y in row.curve]
    if min(values) > 0:
        ax.set_yscale("log")
        style.log_ticks(ax.yaxis, values)
    style.end_labels(ax, [(row.name, row.loss_after, colour) for row, colour in zip(rows, colours, strict=True)])
    style.frame(ax, f"Losses of the trial, from {rows[0].loss_before:.3g}", "processor seconds", "loss")
    return ax


def overview(reports: Iterable[Report]) -> Figure:
    """Plot loss, time, Ritz values and coefficients of a run, two by two, in a new pyplot figure.

    A run of GaussNewtonFlow, which has no Krylov vectors, shows its steps' fraction, damping and rows in their place.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD, plot
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> optimizer = KSD([w], krylov_dim=1)
        >>> figure = plot.overview([optimizer.step(lambda: ((w**4).mean(), w)) for _ in range(4)])
        >>> figure.get_suptitle()[:7]
        '4 steps'
    """
    records = records_of(reports)
    flows = any(record.get("details") for record in records) and not _dots(records)
    figure: Figure
    figure, axes = style.pyplot().subplot_mosaic(
        "aaabbb;ccddee" if flows else "ab;cd", figsize=(10.5, 7.6), layout="constrained"
    )
    convergence(records, axes["a"])
    phases(records, axes["b"])
    if flows:
        for place, (name, title) in zip("cde", _DETAILS.items(), strict=True):
            _detail(records, axes[place], name, title)
    else:
        ritz(records, axes["c"])
        coefficients(records, axes["d"])
    back = sum(of.undone(records))
    words = [
        f"{len(records)} step{'s' if len(records) > 1 else ''}",
        f"{math.fsum(of.cost(records, 'seconds')):.3g} s",
        f"{math.fsum(of.cost(records, 'gradients')):,.0f} gradients of one sample",
        *([f"{back} undone"] if back else []),
    ]
    figure.suptitle(" · ".join(words), fontsize=style.TITLE, color=style.theme_of(axes["a"]).text)
    return figure


def _detail(records: Sequence[Record], ax: Axes, name: str, title: str) -> None:
    """Plot a number of the method, on a logarithmic scale if it spans a decade; zeros are marks at the bottom."""
    values = [of.number((record.get("details") or {}).get(name)) for record in records]
    dots = [(x, y) for x, y in zip(steps(records), values, strict=True) if 0 < y < math.inf]
    zeros = [x for x, y in zip(steps(records), values, strict=True) if y == 0]
    style.frame(ax, f"{title}: 0 at the marks" if zeros else title, "step", name)
    if not dots:
        style.nothing(ax, f"no step has a {name} above 0")
        return
    xs, ys = zip(*dots, strict=True)
    ax.plot(xs, ys, ".-", color=style.theme_of(ax).blue, linewidth=0.8, markersize=4)
    _at_edge(ax, zeros, "|", 0.02, "")
    if max(ys) >= 10 * min(ys):
        ax.set_yscale("log")
        style.log_ticks(ax.yaxis, ys)
    else:
        ax.set_ylim(bottom=0)
    style.whole_steps(ax)


def _places(records: Sequence[Record], by: By) -> list[float]:
    """Return the start of each step on the horizontal axis, and the end of the last."""
    if by == "step":
        found = steps(records)
        return [*found, found[-1] + 1]
    return list(itertools.accumulate(of.cost(records, by), initial=0.0))


def _searches(ax: Axes, records: Sequence[Record], places: Sequence[float], colour: str) -> None:
    """Draw a faint line for each step, from the loss on C before a search to that after it."""
    before, after = of.column(records, "search_loss_before"), of.column(records, "search_loss_after")
    xs = [x for a, b in itertools.pairwise(places) for x in (a, b, math.nan)]
    ys = [y for a, b in zip(before, after, strict=True) for y in (a, b, math.nan)]
    words = _once(ax, "search: loss on C, before → after")
    ax.plot(xs, ys, color=colour, linewidth=1.0, alpha=0.35, label=words, zorder=2)


def _undone(ax: Axes, places: Sequence[tuple[float, float]]) -> None:
    """Draw crosses on the line, or many as marks at the bottom, which do not hide it."""
    words = "previous step undone"
    if len(places) > _FEW:
        _at_edge(ax, [x for x, _ in places], "|", 0.02, words)
    elif places:
        xs, ys = zip(*places, strict=True)
        ax.plot(
            xs,
            ys,
            "x",
            color=style.theme_of(ax).text,
            markersize=7,
            markeredgewidth=1.5,
            label=_once(ax, words),
            zorder=4,
        )


def _at_edge(ax: Axes, xs: Sequence[float], marker: str, height: float, words: str) -> None:
    """Draw marks at a height of the axes, independent of the scale of losses."""
    if xs:
        place = ax.get_xaxis_transform()
        look: dict[str, Any] = {"color": style.theme_of(ax).text, "markersize": 6, "label": _once(ax, words)}
        ax.plot(xs, [height] * len(xs), linestyle="none", marker=marker, transform=place, **look)


def _once(ax: Axes, words: str) -> str | None:
    """Return a label, or None if the legend already has it."""
    return None if words in ax.get_legend_handles_labels()[1] else words


def _value_scale(ax: Axes) -> None:
    """Set a logarithmic scale if every loss of every run is positive."""
    values = [float(y) for line in ax.get_lines() if line.get_gid() == _RUN for y in _floats(line.get_ydata())]
    finite = [y for y in values if math.isfinite(y)]
    if finite and min(finite) > 0:
        ax.set_yscale("log")
        style.log_ticks(ax.yaxis, finite)
    else:
        ax.set_yscale("linear")


def _floats(data: object) -> list[float]:
    assert isinstance(data, Iterable)
    return [float(y) for y in data]


def _from_to(losses: Sequence[float]) -> str:
    finite = [loss for loss in losses if math.isfinite(loss)]
    return f": {finite[0]:.3g} → {finite[-1]:.3g}" if len(finite) > 1 else ""


def _dots(records: Sequence[Record]) -> list[tuple[float, float]]:
    """Return (step, Ritz value) pairs, without values that are not finite or rounding."""
    dots = []
    for x, record in zip(steps(records), records, strict=True):
        values = [value for value in of.numbers(record, "ritz_values") if math.isfinite(value)]
        least = _ROUNDING * max(map(abs, values), default=0.0)
        dots += [(x, value) for value in values if abs(value) > least]
    return dots


def _table(records: Sequence[Record]) -> list[list[float]]:
    """Return rows 1 … K and those of previous steps, with a column for each step; NaN for blank cells."""
    own = _krylov_dims(records)
    K, rows = _rows(records)
    table = [[math.nan] * len(records) for _ in range(rows)]
    for i, record in enumerate(records):
        for k, c in enumerate(of.numbers(record, "coefficients")):
            if math.isfinite(c) and c != 0:
                table[k if k < own[i] else K + k - own[i]][i] = abs(c)
    return table


def _rows(records: Sequence[Record]) -> tuple[int, int]:
    """Return K and the number of all basis vectors, those of previous steps included."""
    own = _krylov_dims(records)
    previous = (len(record.get("coefficients") or ()) - k for record, k in zip(records, own, strict=True))
    return max(own), max(own) + max(1, *previous)


def _krylov_dims(records: Sequence[Record]) -> list[int]:
    """Return the number of coefficients that belong to Krylov vectors."""
    dims = of.column(records, "krylov_dim")
    lengths = [len(record.get("coefficients") or ()) for record in records]
    return [int(min(k, length)) if k > 0 else 0 for k, length in zip(dims, lengths, strict=True)]


def _ticks(K: int) -> list[int]:
    """Return ticks among 1 … K: all if few, else 1 and multiples of a round number."""
    if K <= 10:
        return list(range(1, K + 1))
    every = next(step for step in (5, 10, 20, 50, 100, 200, 500, 1000, K) if K / step <= 8)
    return [1, *range(every, K + 1, every)]
