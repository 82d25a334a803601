"""Parsing of the command line, dispatch of its commands, and exit statuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from krylov_descent.cli.options import Check, Doctor, Plot, Train
from krylov_descent.cli.screen import complain, say
from krylov_descent.cli.target import Target, UsageError, load

Command = (
    Annotated[Check, tyro.conf.subcommand("check")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Plot, tyro.conf.subcommand("plot")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def run(arguments: Sequence[str]) -> int:
    """Run the command of the arguments and return the exit status."""
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
    except SystemExit as end:  # tyro has printed the reason
        return end.code if isinstance(end.code, int) else 2
    try:
        if isinstance(command, Train):
            from krylov_descent.cli.training import train_target  # other commands need no optimizer

            return train_target(command)
        if isinstance(command, Doctor):
            from krylov_descent.cli.doctor import examine

            return examine(command)
        return _check(command) if isinstance(command, Check) else _plot(command)
    except UsageError as error:
        complain(error.what, error.remedy)
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\nInterrupted.\n")
        return 130


def _check(command: Check) -> int:
    from krylov_descent import plot
    from krylov_descent.checking import check

    target = load(command.target)
    if command.ranks is not None:
        return _memory(command, target, command.ranks)
    try:
        seconds = None if command.try_for is None else float(command.try_for.removesuffix("s"))
        report = check(
            target.closure,
            target.model,
            target.sets,
            krylov_dim=command.krylov_dim,
            curvature=command.curvature,
            try_seconds=seconds,
        )
    except ValueError as error:
        raise UsageError(str(error), "krylov-descent check --help") from error
    say(json.dumps(report.as_dict(), indent=2, ensure_ascii=False) if command.json else str(report))
    if report.trial:
        try:
            figure: Any = plot.trial(report).figure
            figure.savefig(command.picture)
            sys.stderr.write(f"\n{command.picture}: the losses of the trial\n")
        except (ImportError, ValueError, OSError) as error:
            sys.stderr.write(f"\nThe trial could not be drawn: {error}\n")
    return 0 if report.ok else 1


def _memory(command: Check, target: Target, ranks: int) -> int:
    from krylov_descent import DEEP, KSD, GaussNewtonFlow
    from krylov_descent.checking import memory_of

    try:
        params = [p for p in target.model.parameters() if p.requires_grad]
        ksd = KSD(params, krylov_dim=command.krylov_dim, curvature=command.curvature)
        methods = {"KSD": ksd, "KSD(**DEEP)": KSD(params, **DEEP), "GaussNewtonFlow": GaussNewtonFlow(params)}
        found = {name: memory_of(optimizer, ranks=ranks) for name, optimizer in methods.items()}
    except ValueError as error:
        raise UsageError(str(error), "krylov-descent check --help") from error
    if command.json:
        say(json.dumps({name: {"phase": x.phase, "bytes": dict(x.owners)} for name, x in found.items()}, indent=2))
    else:
        say("\n\n".join(f"{name}: {x}" for name, x in found.items()) + "\n\nActivations and graphs come on top.")
    return 0


def _plot(command: Plot) -> int:
    from krylov_descent import plot

    log = command.log / "log.jsonl" if command.log.is_dir() else command.log
    if not log.is_file():
        raise UsageError(f"There is no log {log}.", "Give the log.jsonl of `krylov-descent train`, or its directory.")
    try:
        reports = plot.read(log)
        figure = plot.overview(reports)
        command.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(command.out)
    except (ImportError, ValueError, OSError) as error:
        raise UsageError(f"{log} could not be drawn: {error}", "krylov-descent plot --help") from error
    say(f"{command.out}: {len(reports)} step{'' if len(reports) == 1 else 's'} of {log}")
    return 0
