"""``krylov-descent train``."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from krylov_descent.checking.finding import counted
from krylov_descent.checking.naming import first_line, raised_at
from krylov_descent.cli.checkpoint import Checkpoints, forget_after, save_whole
from krylov_descent.cli.options import Train
from krylov_descent.cli.screen import complain, say
from krylov_descent.cli.target import UsageError, load
from krylov_descent.optimizer import KSD
from krylov_descent.run import EndReason, Run
from krylov_descent.writers import JSONLWriter

_KEPT = ("krylov_dim", "basis", "curvature", "weight_decay")  # what makes a run that goes on the same run


def train_target(command: Train) -> int:
    """Train a target and write what comes of it; returns the exit status."""
    out = command.out
    path, log = out / "checkpoint.pt", out / "log.jsonl"
    if path.exists() and not command.resume:
        raise UsageError(f"{out} has a run already.", "Go on with it by --resume, or give another --out.")
    target = load(command.target)
    out.mkdir(parents=True, exist_ok=True)
    try:
        optimizer = KSD(
            target.model.parameters(),
            krylov_dim=command.krylov_dim,
            basis=command.basis,
            curvature=command.curvature,
            weight_decay=command.weight_decay,
        )
        checkpoints = Checkpoints(path, target.model, optimizer)
        before = checkpoints.load() if command.resume else 0
        bar = command.progress and sys.stderr.isatty()
        run = optimizer.run(
            target.closure,
            target.sets,
            max_steps=None if command.max_steps is None else max(0, command.max_steps - before),
            seconds=command.seconds,
            gtol=command.gtol,
            patience=command.patience,
            progress=bar,
        )
    except ValueError as error:
        raise UsageError(str(error), "krylov-descent train --help") from error
    forget_after(log, before)
    if command.resume:
        say(
            f"{path}: going on after {counted(before, 'step')}."
            if before
            else f"There is no {path} yet: from the start."
        )
    try:
        with JSONLWriter(log) as write:
            for report in run:
                write(report)
                checkpoints.step_taken(last=run.reason is not None)
                if command.progress and not bar:
                    say(str(report))
    except KeyboardInterrupt:
        _say_interrupted(command, checkpoints, path)
        return 130
    except Exception as error:
        checkpoints.save()  # a step that fails leaves everything as it was before
        _complain_of(error, command)
        return 1
    if run.steps == 0 and before > 0:
        optimizer.settle(target.closure, target.sets)  # what the end of the run would have done
    else:
        checkpoints.save()
    save_whole(target.model.state_dict(), out / "model.pt")
    _say_ended(run, before, out)
    return 0


def _say_ended(run: Run, before: int, out: Path) -> None:
    assert run.reason is not None
    if run.steps == 0:
        say(f"No step was taken: {run.reason.value} after {counted(before, 'step')}. {run.reason.remedy}")
    else:
        say(f"Ended after {counted(before + run.steps, 'step')} at loss {run.loss:.6g}: {run.reason.value}.", "bold")
        say(_remedy(run.reason))
    say(f"{out / 'model.pt'} has the model, {out / 'log.jsonl'} the steps.")


def _remedy(reason: EndReason) -> str:
    if reason in (EndReason.MAX_STEPS, EndReason.SECONDS):
        return f"{reason.remedy.partition('. ')[0]}. For more: --resume, with more --max-steps or --seconds."
    return reason.remedy


def _say_interrupted(command: Train, checkpoints: Checkpoints, path: Path) -> None:
    sys.stderr.write("\n")
    if checkpoints.saved == 0:
        say("Interrupted before the first step was done: there is no checkpoint.")
        return
    say(f"Interrupted. {path} has the run as it was after {counted(checkpoints.saved, 'step')}. To go on:")
    changed = [
        f" --{field.name.replace('_', '-')} {value}"
        for field in fields(command)
        if field.name in _KEPT and (value := getattr(command, field.name)) != field.default
    ]
    say(f"  krylov-descent train {command.target} --out {command.out}{''.join(changed)} --resume")


def _complain_of(error: Exception, command: Train) -> None:
    where = raised_at(error)
    # The package's own errors are ValueErrors that say what to do; anything else came from the closure.
    what = str(error) if isinstance(error, ValueError) and not where else first_line(error)
    complain(f"{what}{f' ({where})' if where else ''}", f"krylov-descent check {command.target} looks for all causes.")
