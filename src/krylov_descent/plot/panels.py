"""A run at a glance: four pictures on one page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from krylov_descent.plot.curves import convergence, phases, ritz
from krylov_descent.plot.heat import coefficients
from krylov_descent.plot.records import Report, cost, records_of, undone
from krylov_descent.plot.style import pyplot

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def overview(reports: Iterable[Report]) -> Figure:
    """Loss, time, Ritz values and coefficients of a run, two by two.

    Args:
        reports: ``StepReport``s, or dicts as of ``read``.

    Returns:
        The figure, a new one of pyplot's: ``figure.savefig("overview.png", dpi=150)``.

    Raises:
        ValueError: there are no reports.

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
    figure: Figure
    figure, ((a, b), (c, d)) = pyplot().subplots(2, 2, figsize=(11.5, 7.6), layout="constrained")
    convergence(records, a)
    phases(records, b)
    ritz(records, c)
    coefficients(records, d)
    back = sum(undone(records))
    words = [
        f"{len(records)} step{'s' if len(records) > 1 else ''}",
        f"{math.fsum(cost(records, 'seconds')):.3g} s",
        f"{math.fsum(cost(records, 'gradients')):,.0f} gradients of one sample",
        *([f"{back} undone"] if back else []),
    ]
    figure.suptitle(" · ".join(words), fontsize=11)
    return figure
