"""What tables of all studies say of runs: marks, settings, seeds, machines, and which method is ahead."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

from experiments.common.records import Run

NONE = "–"
BySeed = Mapping[str, Mapping[int, float]]  # label, seed


def marks(runs: Sequence[Run]) -> str:
    """Of any seed: § not finished, † no finite loss at the end, ∎ no step found; ◊ settings that differ."""
    unfinished, diverged = any(run.end is None for run in runs), any(run.diverged for run in runs)
    ended = any(run.end == "finished" for run in runs)
    return " §" * unfinished + " †" * diverged + " ∎" * ended + " ◊" * mixed(runs)


def mixed(runs: Sequence[Run]) -> bool:
    """Whether the settings differ between seeds."""
    return any(run.settings != runs[0].settings for run in runs)


def settings(run: Run, digits: str = "") -> str:
    """Key and value of all that is set to something; numbers in a format, or with all their digits."""
    return " ".join(
        f"{key}={value:{digits}}" if isinstance(value, float) else f"{key}={value}"
        for key, value in run.settings.items()
        if value is not None and value is not False
    )


def all_settings(runs: Iterable[Run]) -> str:
    """Those of runs, where they differ with a mark between them."""
    return " ◊ ".join(dict.fromkeys(settings(run) or NONE for run in runs))


def seeds(runs: Iterable[Run]) -> str:
    """In order."""
    return " ".join(map(str, sorted({run.seed for run in runs})))


def sizes(run: Run) -> str:
    """Of the sets: training, evaluated and held-out."""
    return f"{run.samples:,} / {run.evaluated_samples or run.samples:,} / {run.held_out_samples:,}"


def distinct(values: Iterable[str]) -> str:
    """All different values: more than one says that the runs were not alike."""
    return "; ".join(dict.fromkeys(values)) or NONE


def lowest(values: Mapping[str, float]) -> str | None:
    """The one name with the lowest value, where there are at least two finite ones to compare."""
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    best = [name for name, value in finite.items() if value == min(finite.values())]
    return best[0] if len(best) == 1 and len(finite) > 1 else None


def ahead(found: BySeed, main: Collection[str] = ()) -> tuple[str | None, set[int]]:
    """The label with the lowest mean, and the seeds that it is taken over; None if there is none, or two share it.

    Those are the seeds that the ``main`` labels have in common, or all. A method that lacks some of them is only ahead
    if it has the lowest mean over the seeds that all have.
    """
    if not found:
        return None, set()
    every = set.intersection(*map(set, found.values()))
    mains = [set(values) for label, values in found.items() if label in main]
    common = set.intersection(*mains) if mains else every
    full = {label: values for label, values in found.items() if common <= set(values)}
    best = _lowest_mean(found, every)
    return (best, every) if best is not None and best not in full else (_lowest_mean(full, common), common)


def _lowest_mean(found: BySeed, seeds: set[int]) -> str | None:
    if not seeds:
        return None
    return lowest({label: statistics.fmean(values[s] for s in seeds) for label, values in found.items()})
