"""``krylov-descent plot``."""

from __future__ import annotations

from pathlib import Path

from krylov_descent.checking.finding import counted
from krylov_descent.cli.screen import say
from krylov_descent.cli.target import UsageError


def plot_log(log: Path, out: Path) -> int:
    """Draw a log; returns the exit status."""
    log = log / "log.jsonl" if log.is_dir() else log
    if not log.is_file():
        raise UsageError(f"There is no log {log}.", "Give the log.jsonl of `krylov-descent train`, or its directory.")
    from krylov_descent import plot

    try:
        reports = plot.read(log)
        figure = plot.overview(reports)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out)
    except (ImportError, ValueError, OSError) as error:
        raise UsageError(f"{log} could not be drawn: {error}", "krylov-descent plot --help") from error
    say(f"{out}: {counted(len(reports), 'step')} of {log}")
    return 0
