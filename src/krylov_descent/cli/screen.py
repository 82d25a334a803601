"""Output of the command line: results on standard output, errors on standard error."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print a line or paragraph and flush; long lines are not wrapped, so that they can be copied."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def complain(what: str, remedy: str) -> None:
    """Print an error and its remedy."""
    sys.stderr.write(f"Error: {what}\n→ {remedy}\n")
