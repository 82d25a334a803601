"""When a run came down to an error."""

from __future__ import annotations

from experiments.common.records import Run


def reached(run: Run, target: float) -> float | None:
    """The seconds after which the held-out error is at the target for the first time, if ever."""
    return next((point.seconds for point in run.points if point.held_out_error <= target), None)


def duration(seconds: float) -> str:
    """A time to two digits, in a unit fit for it.

    Example:
        >>> duration(45), duration(400), duration(9000), duration(500000)
        ('45 s', '6.7 min', '2.5 h', '5.8 days')
    """
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} s"
