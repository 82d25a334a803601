"""The loss around the end of a step, in the plane in which the step moved furthest."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from krylov_descent.data import Subsets
from krylov_descent.optimizer import KSD
from krylov_descent.parameters import ParameterVector
from krylov_descent.plot.records import Record, Report, number, numbers, records_of
from krylov_descent.plot.style import BLANK, BLUE, MAP, ORANGE, axes_of, frame, legend, log_ticks, nothing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEVELS = 24
_LOG_FROM = 10.0  # the largest value beside the smallest
_NARROW = 0.02  # of the wider axis, the least that the narrower one shows


def plane(
    optimizer: KSD,
    closure: Callable[..., Any],
    sets: Subsets | None = None,
    *,
    report: Report,
    points: int = 31,
    reach: float = 1.5,
    ax: Axes | None = None,
) -> Axes:
    """The loss that the search saw, in a plane through the point where the last step ended.

    The plane is spanned by the two basis vectors along which the step moved furthest; each axis has a scale of its own.
    The axes count from the step's start, whose projection is at (0, 0): the start itself lies off the plane by what the
    step moved along the other vectors. Points where the loss is not finite are blank. A step with one basis vector
    gives a curve along it.

    It costs ``points``² evaluations of the closure on C, by forward passes (``points`` for a curve). The parameters are
    put back bit for bit. With several ranks, all call it alike.

    Args:
        optimizer: whose last step is looked at.
        closure: that of the step.
        sets: those of the step: the loss is that on the C of the step.
        report: of the step; call this before the next one.
        points: along each axis; odd, so that the end of the step is one of them.
        reach: how far the picture goes from the end of the step, along each axis, in parts of the step's length
            along it: more than 1 to have the start in the picture.
        ax: where to draw; a new figure without.

    Raises:
        ValueError: the report is not that of the last step, or that step had no basis.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD, plot
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0, 1.0]))
        >>> optimizer = KSD([w])
        >>> closure = lambda: ((w**4).mean(), w)
        >>> report = optimizer.step(closure)
        >>> ax = plot.plane(optimizer, closure, report=report, points=11)
        >>> ax.get_xlabel()
        'along Krylov vector 1'
    """
    if points < 3 or points % 2 == 0:
        raise ValueError(f"points={points!r}: must be an odd number ≥ 3, so that the end of the step is one of them.")
    if not reach > 0:
        raise ValueError(f"reach={reach!r}: must be a number > 0; 1.5 has the step's start in the picture.")
    (record,) = records_of([report])
    c, V = numbers(record, "coefficients"), optimizer.basis()
    if len(c) != len(V):
        raise ValueError(
            f"The report has {len(c)} coefficients, and the basis of the optimizer's last step {len(V)} vectors: it is "
            "not that step's report, or that step had no basis. Call plane with what step returned, before the next."
        )
    chosen = sorted(range(len(c)), key=lambda k: -abs(c[k]))[:2]  # the furthest first
    widths = _half_widths([c[k] for k in chosen], reach, record)
    offsets = [[width * (2 * i / (points - 1) - 1) for i in range(points)] for width in widths]
    values = _values(optimizer, closure, sets, V[chosen], offsets)
    here = values[len(values) // 2][points // 2]
    _compare(here, record, optimizer)
    ax = axes_of(ax, (6.4, 5.0))
    places = [[c[k] + offset for offset in row] for k, row in zip(chosen, offsets, strict=True)]
    names = [f"along {_name(k, record)}" for k in chosen]
    what = "loss" if sets is None else "loss on C"
    if len(chosen) == 1:
        _curve(ax, places[0], values[0], what)
        frame(ax, f"The {what} along step {record.get('iteration')}", names[0], what)
    else:
        _contours(ax, places, values, what)
        _arrow(ax, [c[k] for k in chosen], f"end: {what} {here:.4g}")
        title = f"The {what} around the end of step {record.get('iteration')}"
        if any(c):
            share = math.hypot(*(c[k] for k in chosen)) / math.hypot(*c)
            title += f"\nin a plane that holds {share:.0%} of its length"
        frame(ax, title, *names, grid=False)
    return ax


def _half_widths(moved: Sequence[float], reach: float, record: Record) -> list[float]:
    """Of the picture along each axis, from the step's length along it."""
    largest = max(map(abs, moved))
    if largest == 0:  # the search found nothing: as far as steepest descent might go
        top = max(map(abs, numbers(record, "ritz_values")), default=0.0)
        return [reach * (number(record.get("grad_norm")) / top if top > 0 else 1.0)] * len(moved)
    return [reach * max(abs(x), _NARROW * largest) for x in moved]


def _values(
    optimizer: KSD,
    closure: Callable[..., Any],
    sets: Subsets | None,
    directions: Tensor,
    offsets: Sequence[Sequence[float]],
) -> list[list[float]]:
    """f on C at every point: rows along the second direction, one row if there is none; NaN where it is not finite."""
    parameters = ParameterVector(optimizer.param_groups)
    theta = parameters.read()
    loss = optimizer.search_loss(closure, sets)

    def value(x: float) -> float:
        parameters.write(start, directions[0], x)
        found = loss()
        return found if math.isfinite(found) else math.nan

    values = []
    try:
        with torch.enable_grad(), torch.autocast(parameters.device.type, enabled=False):
            for y in offsets[1] if len(offsets) > 1 else (0.0,):
                start = theta + y * directions[-1]
                values.append([value(x) for x in offsets[0]])
    finally:
        parameters.write(theta)
    return values


def _compare(value: float, record: Record, optimizer: KSD) -> None:
    """Warn if the loss here is not what the report says."""
    before, after = (number(record.get(f"search_loss_{when}")) for when in ("before", "after"))
    rounding = max(1e-3, 10 * torch.finfo(optimizer.trained()[0].dtype).eps)
    if not abs(value - after) <= rounding * max(abs(before), abs(after)):
        warnings.warn(
            f"The loss at the parameters is {value:.6g}, but the report says that its step ended at {after:.6g}: the "
            "parameters were moved since, or the closure, the sets or the report are those of another step. The arrow "
            "is not where the step was. Call plane right after step, with what it was called with.",
            stacklevel=3,
        )


def _name(k: int, record: Record) -> str:
    before = k - int(record.get("krylov_dim") or 0)
    if before < 0:
        return f"Krylov vector {k + 1}"
    return f"the step {before} before the previous" if before else "the previous step"


def _contours(ax: Axes, places: Sequence[Sequence[float]], values: Sequence[Sequence[float]], what: str) -> None:
    from matplotlib.colors import LogNorm, Normalize, PowerNorm
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    ax.set_facecolor(BLANK)
    ax.set(xlim=(places[0][0], places[0][-1]), ylim=(places[1][0], places[1][-1]))
    finite = [value for row in values for value in row if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    if not low < high:
        nothing(ax, f"the {what} is the same everywhere" if finite else f"the {what} is finite nowhere")
        return
    parts = [i / _LEVELS for i in range(_LEVELS + 1)]
    norm: Normalize
    if low > 0 and high / low >= _LOG_FROM:
        levels, norm = [low * (high / low) ** part for part in parts], LogNorm(low, high)
    else:
        # Evenly spaced on the slopes of a parabola.
        levels, norm = [low + (high - low) * part**2 for part in parts], PowerNorm(0.5, low, high)
    levels[0], levels[-1] = low, high  # not a rounding error inside the values
    filled = ax.contourf(*places, values, levels=levels, norm=norm, cmap=MAP)
    ax.contour(*places, values, levels=levels[1:-1:2], colors="#FFFFFF", linewidths=0.5, alpha=0.5)
    bar = ax.figure.colorbar(filled, ax=ax, pad=0.02)
    if isinstance(norm, LogNorm):
        log_ticks(bar.ax.yaxis, finite)
    else:
        bar.ax.yaxis.set_major_locator(MaxNLocator(8))
        bar.ax.yaxis.set_major_formatter(ScalarFormatter())
    bar.set_label(what, fontsize=9)
    bar.ax.tick_params(labelsize=8.5)


def _arrow(ax: Axes, end: Sequence[float], words: str) -> None:
    """From the start's projection to the end."""
    from matplotlib.patheffects import withStroke

    x, y = end
    ax.annotate(
        "",
        (x, y),
        (0.0, 0.0),
        arrowprops={
            "arrowstyle": "-|>",
            "color": "#FFFFFF",
            "linewidth": 1.6,
            "shrinkA": 4,
            "shrinkB": 5,
            "path_effects": [withStroke(linewidth=3, foreground="#333333")],
        },
    )
    look: dict[str, Any] = {"markeredgecolor": "#FFFFFF", "markeredgewidth": 1.2, "linestyle": "none", "zorder": 4}
    ax.plot([0.0], [0.0], marker="o", color=BLUE, markersize=8, label="start (projected)", **look)
    ax.plot([x], [y], marker="*", color=ORANGE, markersize=14, label=words, **look)
    # The end is in the middle, the start in one corner: the opposite one is free.
    legend(ax, loc=f"{'upper' if y > 0 else 'lower'} {'right' if x > 0 else 'left'}")


def _curve(ax: Axes, places: Sequence[float], values: Sequence[float], what: str) -> None:
    """Along the only basis vector; the start is on it."""
    ax.plot(places, values, color="#444444", linewidth=1.8)
    ax.axvline(0.0, color=BLUE, linestyle="--", linewidth=1.2, label="start")
    end, here = places[len(places) // 2], values[len(values) // 2]
    ax.plot([end], [here], "*", color=ORANGE, markersize=13, label=f"end: {what} {here:.4g}", zorder=4)
    legend(ax)
