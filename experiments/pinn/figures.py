"""Figures of the PINN study: relative L2 error over CPU seconds. Nothing here trains."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.figures import Panel, draw, multiples
from experiments.common.records import Run
from experiments.common.series import Series, series
from experiments.pinn.problems import SHOWN
from experiments.pinn.records import Group, read_groups
from experiments.pinn.style import LINES, NAMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The network and the seconds of the figures on the first pages; on the first a clear win, a usual case and the loss.
_FIRST = ("3x32", 60.0)
_README = ("reaction-diffusion", "burgers01", "helmholtz-fourier")


def figures(results: Path, out: Path) -> list[Path]:
    """Draw ``readme`` and ``pinn``, light and dark.

    Raises:
        ValueError: there are no runs.
    """
    paths = []
    for group in read_groups(results, SHOWN, list(NAMES)):
        if (group.network, group.seconds) == _FIRST:
            four = [name for name in LINES if name != "soap"]
            paths += draw(functools.partial(_error, group, _README, four), out / "readme", dark=True)
            paths += draw(functools.partial(_error, group, SHOWN, list(LINES)), out / "pinn", dark=True)
    return paths


def _error(group: Group, problems: Sequence[str], methods: Sequence[str]) -> Figure | None:
    shown = [Panel(name, _curves(group.runs[name], methods)) for name in problems if name in group.runs]
    return multiples(shown, LINES, "relative error", log_time=False)


def _curves(by: Mapping[str, Sequence[Run]], methods: Sequence[str]) -> dict[str, Series]:
    found = {name: series(by[name], "seconds", "error", exact=True) for name in methods if name in by}
    return {name: curve for name, curve in found.items() if curve is not None}
