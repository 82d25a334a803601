"""What the command line shows: results on standard output, complaints on standard error."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """One line or paragraph, at once; long lines are left to the terminal, so that they can be copied."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def complain(what: str, remedy: str) -> None:
    """What went wrong, and what to do."""
    sys.stderr.write(f"Error: {what}\n→ {remedy}\n")
