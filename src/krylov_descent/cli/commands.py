"""Reads the command line, has the command done, and turns what went wrong into words and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from krylov_descent.cli.options import Check, Plot, Train
from krylov_descent.cli.screen import complain, say
from krylov_descent.cli.target import UsageError

Command = (
    Annotated[Check, tyro.conf.subcommand("check")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Plot, tyro.conf.subcommand("plot")]
)


def run(arguments: Sequence[str]) -> int:
    """Do what the arguments say; returns the exit status."""
    from krylov_descent import __version__

    if list(arguments) == ["--version"]:
        say(f"krylov-descent {__version__}")
        return 0
    try:
        command = tyro.cli(
            Command,
            prog="krylov-descent",
            args=list(arguments),
            description=f"Krylov Subspace Descent for PyTorch, version {__version__} (--version prints it).",
        )
    except SystemExit as end:  # tyro has told why
        return end.code if isinstance(end.code, int) else 2
    try:
        return _do(command)
    except UsageError as error:
        complain(error.what, error.remedy)
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        return 130


def _do(command: object) -> int:
    # Imported when needed: a picture needs no optimizer, nor a run the plots.
    if isinstance(command, Check):
        from krylov_descent.cli.checking import check_target

        return check_target(command.target, command.krylov_dim, command.curvature, as_json=command.json)
    if isinstance(command, Train):
        from krylov_descent.cli.training import train_target

        return train_target(command)
    assert isinstance(command, Plot)
    from krylov_descent.cli.plotting import plot_log

    return plot_log(command.log, command.out)
