"""How far the longest runs are from the lowest published training errors, and what it would cost to get there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from experiments.common.markdown import section
from experiments.common.reach import Reach, reach_along
from experiments.common.records import Run
from experiments.deep.records import scheduled
from experiments.deep.style import NAMES

#: Task → squared error per training image: HF with momentum (Sutskever et al. 2013), saddle-free Newton (Dauphin et al.
#: 2014).
LOWEST: Mapping[str, float] = {"curves": 0.058, "mnist-ae": 0.57}

#: Of Nesterov's accelerated gradient to 0.074 and 0.73 (Sutskever et al. 2013): 750,000 updates of 200 samples.
NAG = 1.5e8


def published(tasks: Mapping[str, Sequence[Run]]) -> list[str]:
    """A section, if some task has a published error."""
    rows = []
    for task in LOWEST.keys() & tasks.keys():
        named = [run for run in tasks[task] if run.method in NAMES]
        longest = max((run.seconds for run in named), default=0.0)  # a law of shorter runs tells little
        by_method = {m: [run for run in named if run.method == m and run.seconds == longest] for m in NAMES}
        rows += [
            [task, NAMES[method], f"{longest:g}", *_cells(runs, LOWEST[task])]
            for method, runs in by_method.items()
            if runs
        ]
    if not rows:
        return []
    head = ["task", "method", "CPU s", "squared error", "sample gradients", "published", "cost to get there", "of NAG"]
    note = (
        "Squared error per training image at the end of the longest runs, mean over seeds, and the gradients of single "
        "samples that it took. Published: with other weight decay, and on CURVES with data of the same recipe. "
        "The cost to get there follows the power law of a run's second half, a lower bound more than a forecast; "
        f"median over seeds. NAG took {NAG:.2g} to 0.074 and 0.73. A run with a schedule has no law to follow."
    )
    return [section("How far from the lowest published", head, sorted(rows), note)]


def _cells(runs: Sequence[Run], target: float) -> list[str]:
    error = statistics.fmean(run.points[-1].error for run in runs)
    spent = statistics.fmean(run.points[-1].gradients * run.samples for run in runs)
    cells = [f"{error:.3g}", f"{spent:.2g}", f"{target:g}"]
    if scheduled(runs[0]):
        return [*cells, "–", "–"]
    laws = ([(point.gradients * run.samples, point.error) for point in run.points] for run in runs)
    return [*cells, *_cost([found for law in laws if (found := reach_along(law, target)) is not None])]


def _cost(found: Sequence[Reach]) -> list[str]:
    known = [r for r in found if not math.isnan(r.cost)]
    if not known:
        return ["falls ever faster" if found else "not finite", "–"]
    cost = statistics.median(r.cost for r in known)
    if math.isinf(cost):
        return ["no longer falls", "–"]
    least = "≥ " * any(r.extrapolated and r.cost <= cost for r in known)
    return [f"{least}{cost:.2g}", f"{least}{cost / NAG:.2g}"]
