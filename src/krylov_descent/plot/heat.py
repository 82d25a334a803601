"""Which basis vectors the steps were made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from krylov_descent.plot.records import Record, Report, edges, numbers, records_of, steps
from krylov_descent.plot.style import BLANK, MAP, axes_of, frame, nothing, whole_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DECADES = 6  # of the colour scale at most: what is smaller than that beside the largest looks the same


def coefficients(reports: Iterable[Report], ax: Axes | None = None) -> Axes:
    """The size of the coefficients that made each step, a row for each basis vector.

    Rows are the Krylov vectors in the order in which they were built, then the previous step (its part that is
    orthogonal to them), and those before it where there are some. The basis is orthonormal, so a coefficient is the
    length of the step along that vector. Cells are blank where a step had no such vector, or did not move along it.

    Args:
        reports: ``StepReport``s, or dicts as of ``read``.
        ax: where to draw; a new figure without.

    Raises:
        ValueError: there are no reports.

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
    ax = axes_of(ax)
    from matplotlib.colors import LogNorm

    frame(ax, "Size of each step along the vectors of its basis", "step", "basis vector", grid=False)
    table = _table(records)
    sizes = [x for row in table for x in row if x > 0]
    if not sizes:
        nothing(ax, "these reports have no coefficients")
        return ax
    K = _krylov_dim(records)
    previous = len(table) - K
    top = max(sizes)
    bottom = max(min(sizes), top * 10.0**-_DECADES)
    # Cells that are as large as the smallest one shown, and no larger, still need a scale that has some length.
    norm = LogNorm(bottom if bottom < top else top / 10, top, clip=True)
    borders = edges(steps(records))
    rows = [k - 0.5 for k in range(1, len(table) + 2)]
    mesh = ax.pcolormesh(borders, rows, table, norm=norm, cmap=MAP, rasterized=True)
    ax.set_facecolor(BLANK)
    ax.axhline(K + 0.5, color="#FFFFFF", linewidth=2.0)
    ax.set_xlim(borders[0], borders[-1])
    ax.set_ylim(len(table) + 0.5, 0.5)
    shown = _ticks(K)
    names = ["previous", *(f"… {k} before" for k in range(1, previous))]
    ax.set_yticks([*shown, *range(K + 1, len(table) + 1)], [*map(str, shown), *names])
    whole_steps(ax)
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.02, extend="min" if min(sizes) < bottom else "neither")
    bar.set_label("|coefficient|", fontsize=9)
    bar.ax.tick_params(labelsize=8.5)
    return ax


def _table(records: Sequence[Record]) -> list[list[float]]:
    """Rows 1 … K and those of previous steps, a column for each step; NaN where there is nothing to show."""
    K = _krylov_dim(records)
    own = [int(record.get("krylov_dim") or 0) for record in records]
    found = [numbers(record, "coefficients") for record in records]
    previous = max(1, *(len(cs) - k for cs, k in zip(found, own, strict=True)))
    table = [[math.nan] * len(records) for _ in range(K + previous)]
    for i, cs in enumerate(found):
        for k, c in enumerate(cs):
            if math.isfinite(c) and c != 0:
                table[k if k < own[i] else K + k - own[i]][i] = abs(c)
    return table


def _krylov_dim(records: Sequence[Record]) -> int:
    return max(int(record.get("krylov_dim") or 0) for record in records)


def _ticks(K: int) -> list[int]:
    """Some of 1 … K: all if few, else 1 and multiples of a round number that leave room for the row below."""
    if K <= 10:
        return list(range(1, K + 1))
    every = next(step for step in (5, 10, 20, 50, 100, 200, 500, 1000, K) if K / step <= 8)
    return [1, *range(every, K + 1, every)]
