"""Pictures of recorded trials, as PNG: their matrix, and the memory of long runs. Nothing here trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from reliability.matrix import FAULTS
from reliability.methods import METHODS
from reliability.records import Record, read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# How the picture names faults, by what is counted, and methods.
_COUNTED = {
    "odd problem": "odd problems",
    "exception": "failing closures",
    "NaN region": "NaN regions",
    "other thread": "other busy threads",
    "worker loss": "killed workers",
    "SIGKILL": "killed processes",
    "rank loss": "killed ranks",
    "held-up process": "stopped processes",
    "full disk": "full disks",
    "damaged file": "damaged files",
    "lying file": "malicious files",
    "long run": "steps of a long run",
}
_NAMED = {
    "PAPER": "KSD,\nPAPER",
    "default": "KSD,\ndefault",
    "DEEP + Growing": "KSD,\nDEEP",
    "flow": "GaussNewton-\nFlow",
}
_DASHES = ("-", "--", "-.", ":")  # tell lines apart without colour


def figure(results: Path, out: Path) -> list[Path]:
    """Draw ``reliability.png``, ``reliability-dark.png`` and ``reliability-memory.png``; returns the files.

    Raises:
        ValueError: no long run was recorded.
    """
    from experiments.common.figures import draw

    records = read(results)
    long = [record for record in records if "resident" in record]
    if not long:
        raise ValueError(f"There are no long runs in {results}: make them with `python -m reliability`.")
    return [
        *draw(lambda: _matrix(records), out / "reliability", dark=True),
        *draw(lambda: _memory(long), out / "reliability-memory"),
    ]


def _matrix(records: Sequence[Record]) -> Figure:
    """A cell for each fault and method: how often it was tried; orange if a trial was lost."""
    from experiments.common.figures import panels
    from matplotlib.patches import Rectangle

    from krylov_descent.plot.style import theme

    drawn, (axis,) = panels(1, 1, 6.2)
    for y, fault in enumerate(FAULTS):
        lost = 0
        for x, method in enumerate(METHODS):
            own = [record for record in records if (record["fault"], record["method"]) == (fault, method)]
            times, here = sum(record["times"] for record in own), sum(record["lost"] for record in own)
            colour, alpha = theme().orange if here else theme().blue, 0.1 + 0.12 * math.log10(max(times, 1))
            axis.add_patch(Rectangle((x - 0.48, y - 0.45), 0.96, 0.9, linewidth=0, color=colour, alpha=alpha))
            axis.text(x, y, f"{times:,}" if own else "–", ha="center", va="center")
            lost += here
        axis.text(len(METHODS), y, f"{lost:,} lost", ha="center", va="center", fontweight="bold")
    axis.set_xticks(range(len(METHODS)), [_NAMED[method] for method in METHODS])
    axis.set_yticks(range(len(FAULTS)), [_COUNTED.get(fault, fault) for fault in FAULTS])
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.grid(visible=False)
    axis.set(xlim=(-0.5, len(METHODS) + 0.4), ylim=(len(FAULTS) - 0.5, -0.5))
    return drawn


def _memory(records: Sequence[Record]) -> Figure:
    """Resident memory of long runs over their steps."""
    from experiments.common.figures import panels

    from krylov_descent.plot.style import theme

    drawn, (axis,) = panels(1, 1, 3.4)
    for record, colour, dashes in zip(records, theme().colours, _DASHES, strict=False):
        axis.plot(record["at"], _change(record), color=colour, linestyle=dashes, linewidth=2, label=record["method"])
    axis.set(xlabel="step", ylabel="change of resident\nmemory, MiB", xlim=(0, None))
    axis.legend(loc="upper right")
    changes = [change for record in records for change in _change(record)]
    axis.set_ylim(min(-10.0, 1.1 * min(changes)), max(10.0, 1.1 * max(changes)))
    return drawn


def _change(record: Record) -> list[float]:
    """Since a tenth of the steps."""
    warm = record["resident"][len(record["resident"]) // 10]
    return [(value - warm) / 2**20 for value in record["resident"]]
