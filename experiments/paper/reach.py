"""When a run came down to an error."""

from __future__ import annotations

from experiments.common.records import Run


def reached(run: Run, target: float) -> float | None:
    """The seconds after which the held-out error is at the target for the first time, if ever."""
    return next((point.seconds for point in run.points if point.held_out_error <= target), None)


def duration(seconds: float) -> str:
    """A time in a unit fit for it, to two digits or to the unit.

    Example:
        >>> duration(45), duration(400), duration(6200), duration(9000), duration(500000)
        ('45 s', '6.7 min', '103 min', '2.5 h', '5.8 days')
    """
    units = {"days": 86400.0, "h": 3600.0, "min": 60.0}
    unit = next((name for name, size in units.items() if seconds >= 2 * size), "s")
    length = seconds / units.get(unit, 1.0)
    return f"{length:.0f} {unit}" if length >= 10 else f"{length:.2g} {unit}"
