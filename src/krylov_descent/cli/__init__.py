"""The command line, ``krylov-descent check|train|plot|doctor``; needs the extra [cli]."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: the arguments of the command line; by default those of the process.

    Returns:
        The exit status: 0 success; 1 a check or the training failed; 2 wrong usage; 130 interrupted.

    Example:
        >>> main(["--version"])  # doctest: +ELLIPSIS
        krylov-descent ...
        0
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        from krylov_descent.cli.commands import run
    except ImportError as error:
        if error.name != "tyro":
            raise
        sys.stderr.write("The command line needs tyro: pip install 'krylov-descent[cli]'\n")
        return 2
    return run(arguments)
