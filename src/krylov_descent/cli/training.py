"""The command ``krylov-descent train``."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import torch
from torch import nn

from krylov_descent import checkpoint
from krylov_descent.base import CurvatureOptimizer
from krylov_descent.checking.finding import counted
from krylov_descent.checking.problem import first_line, raised_at
from krylov_descent.cli.options import Train
from krylov_descent.cli.screen import complain, say
from krylov_descent.cli.target import UsageError, load
from krylov_descent.flow.optimizer import GaussNewtonFlow
from krylov_descent.optimizer import KSD
from krylov_descent.plot.records import lines, parsed
from krylov_descent.run import EndReason, Run
from krylov_descent.safety.tensor_file import replacing
from krylov_descent.writers import JSONLWriter

_SHARE = 0.05  # the largest part of a run's time for checkpoints


def train_target(command: Train) -> int:
    """Train a target, write its results, and return the exit status."""
    out = command.out
    path, log = out / "checkpoint.safetensors", out / "log.jsonl"
    if path.exists() and not command.resume:
        raise UsageError(f"{out} has a run already.", "Go on with it by --resume, or give another --out.")
    if command.method == "flow" and (command.krylov_dim, command.curvature) != (Train.krylov_dim, Train.curvature):
        raise UsageError(
            "--method flow goes with neither --krylov-dim nor --curvature: the flow has no Krylov vectors, and its "
            "curvature is Gauss–Newton.",
            "Leave out one or the other.",
        )
    target = load(command.target)
    out.mkdir(parents=True, exist_ok=True)
    try:
        optimizer = _optimizer(command, target.model)
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
    _forget_after(log, before)
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
        sys.stderr.write("\n")
        kept = f"{path} has {counted(checkpoints.saved, 'step')}: to go on, add --resume to the same command."
        say(f"Interrupted. {kept if checkpoints.saved else 'There is no checkpoint: no step was done.'}")
        return 130
    except Exception as error:
        checkpoints.save()  # a failed step has been undone
        complain(_told(error), f"krylov-descent check {command.target} looks for all causes.")
        return 1
    if run.steps == 0 and before > 0:
        optimizer.settle(target.closure, target.sets)  # as at the end of a run
    else:
        checkpoints.save()
    with replacing(out / "model.pt") as file:
        torch.save(target.model.state_dict(), file)
    _say_ended(run, before, out)
    return 0


def _optimizer(command: Train, model: nn.Module) -> CurvatureOptimizer:
    if command.method == "flow":
        return GaussNewtonFlow(model.parameters(), weight_decay=command.weight_decay)
    return KSD(
        model.parameters(),
        krylov_dim=command.krylov_dim,
        curvature=command.curvature,
        weight_decay=command.weight_decay,
    )


class Checkpoints:
    """The checkpoint of a run, saved after steps for at most 5 % of the time.

    Attributes:
        saved: the number of steps before the checkpoint on disk.
    """

    def __init__(self, path: Path, model: nn.Module, optimizer: CurvatureOptimizer) -> None:
        self._path, self._model, self._optimizer = path, model, optimizer
        self._steps = self.saved = 0
        self._took, self._last = 0.0, 0.0

    def load(self) -> int:
        """Load the checkpoint, if there is one, and return the number of steps before it.

        Raises:
            UsageError: it is damaged, or of another run.
        """
        anew = "Resume with the function and the options that began the run, or begin anew in another --out."
        try:
            extra = checkpoint.load(self._path, self._model, self._optimizer)
        except ValueError as error:
            raise UsageError(str(error), anew) from error
        if extra is None:
            return 0
        try:
            steps = extra["steps"]
            if type(steps) is not int or not 0 <= steps < 1 << 63:
                raise ValueError(f"steps = {str(steps)[:80]}")
            torch.set_rng_state(torch.tensor([*bytes.fromhex(extra["generator"])], dtype=torch.uint8))
            self._steps = self.saved = steps
        except (ValueError, LookupError, RuntimeError, TypeError) as error:
            raise UsageError(f"{self._path} was not written by krylov-descent train.", anew) from error
        return self._steps

    def step_taken(self, *, last: bool) -> None:
        """Count a step, and save if it is time."""
        self._steps += 1
        if last or time.perf_counter() - self._last >= self._took / _SHARE:
            self.save()

    def save(self) -> None:
        """Save, unless the current state is already saved."""
        if self.saved == self._steps:
            return
        start = time.perf_counter()
        extra = {"steps": self._steps, "generator": bytes(torch.get_rng_state().tolist()).hex()}
        checkpoint.save(self._path, self._model, self._optimizer, extra=extra)
        self.saved = self._steps
        self._last = time.perf_counter()
        self._took = self._last - start


def _forget_after(log: Path, steps: int) -> None:
    """Drop the lines of a log after the checkpoint: those steps are taken again."""
    if not log.exists():
        return
    if not log.is_file():
        raise UsageError(f"{log} is no file.", "Remove it, or begin anew in another --out.")
    try:
        kept = [line for line in lines(log) if _iteration(line) < steps]
    except ValueError as error:
        raise UsageError(str(error), "Remove it, or begin anew in another --out.") from error
    text = "".join(kept).encode()
    if len(text) != log.stat().st_size:
        with replacing(log) as file:
            file.write(text)


def _iteration(line: str) -> float:
    """Return the iteration of a line; infinity for a line that was cut off or is no report."""
    record = parsed(line)
    iteration = record.get("iteration") if isinstance(record, dict) else None
    return iteration if isinstance(iteration, (int, float)) else math.inf


def _say_ended(run: Run, before: int, out: Path) -> None:
    assert run.reason is not None
    if run.steps == 0:
        say(f"No step was taken: {run.reason.value} after {counted(before, 'step')}. {run.reason.remedy}")
    else:
        say(f"Ended after {counted(before + run.steps, 'step')} at loss {run.loss:.6g}: {run.reason.value}.")
        cut = run.reason in (EndReason.MAX_STEPS, EndReason.SECONDS)
        more = "For more: --resume, with more --max-steps or --seconds."
        say(f"{run.reason.remedy.partition('. ')[0]}. {more}" if cut else run.reason.remedy)
    say(f"{out / 'model.pt'} has the model, {out / 'log.jsonl'} the steps.")


def _told(error: Exception) -> str:
    """Return the message of an error: the package's own with its remedy, the closure's with its line."""
    where = raised_at(error)
    return f"{first_line(error)} ({where})" if where else str(error)
