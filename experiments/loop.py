"""The loop that drives every method: advances, evaluates, writes JSONL, checkpoints, and continues where it was cut.

A run is one file of JSON lines: a header, then a point whenever an evaluation is due, then an end. The clock and the
cost counter run inside ``advance`` alone: evaluations and files are on the house.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.budget import CLOCKS, Budget, Clock
from experiments.files import finished, machine, opened, require_same
from experiments.interface import Method
from experiments.methods import KINDS
from experiments.problems import Problem

#: Points are evaluated on the first training samples, at most this many: passes over all would double the cost.
EVALUATED = 10_000


@dataclasses.dataclass(frozen=True)
class Pace:
    """When points are due: close together at first, when most happens, and farther apart as the budget is spent.

    Attributes:
        growth: distance to the next point, as a share of what is spent.
        least: the shortest distance, as a share of the budget.
        most: the longest one.
        marks: amounts that runs are compared at. A point is due before the step that is likely to pass one, since a
            step of a second-order method may be long, and after it.
    """

    growth: float = 0.1
    least: float = 0.01
    most: float = 0.04
    marks: tuple[float, ...] = ()

    def next(self, spent: float, amount: float) -> float:
        """What will be spent when the next point is due."""
        return spent + min(max(self.growth * spent, self.least * amount), self.most * amount)

    def passing(self, before: float, spent: float) -> bool:
        """Whether the last step passed a mark, or one as long as that would."""
        return any(before < mark <= spent + (spent - before) for mark in self.marks)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What a run is, apart from its problem.

    Attributes:
        method: a name of ``KINDS``.
        settings: of that method.
        budget: where it ends.
        seed: of initial weights, sample sets and mini-batches.
        clock: whose seconds count.
        label: of the run in files and tables.
        patience: evaluations without a better held-out error after which it ends; None for never.
        pace: when points are due.
    """

    method: str
    settings: Any
    budget: Budget
    seed: int = 0
    clock: Clock = "wall"
    label: str = ""
    patience: int | None = None
    pace: Pace = Pace()


@dataclasses.dataclass
class _Progress:
    """Where a run is; all of it goes into a checkpoint."""

    step: int = 0
    seconds: float = 0.0
    sample_gradients: float = 0.0
    due: float = 0.0
    best: float = math.inf
    since_best: int = 0
    lines: int = 1  # of the file, the header among them
    reason: str | None = None  # why it is to end, if it is


Watch = Callable[[dict[str, Any] | None, float], None]
"""Called after every advance with the share of the budget that is spent, and with the point where there is one."""


def run(problem: Problem, config: RunConfig, results: Path, watch: Watch | None = None) -> Path:
    """Run, or continue, until the budget is spent; returns the file of the run.

    Raises:
        ValueError: the file there belongs to a run of other settings.
    """
    label = config.label or config.method
    path = results / problem.name / f"{label}-seed{config.seed}.jsonl"
    checkpoint = path.with_suffix(".pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    model = problem.make_model(config.seed)
    method = KINDS[config.method].make(problem, model, config.seed, config.settings)
    header = _header(problem, config, label, model)
    if path.exists():
        header["started"] = require_same(path, header, scheduled=KINDS[config.method].scheduled)
        if finished(path, config.budget):
            return path
    else:
        checkpoint.unlink(missing_ok=True)  # of a run whose file was deleted
    progress = _restore(checkpoint, model, method) if checkpoint.exists() else _Progress()
    with opened(path, header, progress.lines) as write:
        _Run(problem, config, model, method, progress, write, checkpoint, watch or (lambda _, __: None)).go()
    return path


class _Run:
    def __init__(
        self,
        problem: Problem,
        config: RunConfig,
        model: nn.Module,
        method: Method,
        progress: _Progress,
        write: Callable[[dict[str, Any]], None],
        checkpoint: Path,
        watch: Watch,
    ) -> None:
        self._problem, self._config, self._model, self._method = problem, config, model, method
        self._progress, self._write, self._checkpoint, self._watch = progress, write, checkpoint, watch

    def go(self) -> None:
        """Until an end; the first point is that of the initial weights."""
        reason = self._progress.reason if self._progress.step else self._evaluate(None)
        clock, amount = CLOCKS[self._config.clock], self._config.budget.amount
        if self._spent() >= amount:
            reason = "budget"
        while reason is None:
            began, before = clock(), self._spent()
            advance = self._method.advance(self._spent() / amount)
            self._progress.seconds += clock() - began
            self._progress.sample_gradients += advance.sample_gradients
            self._progress.step += 1
            self._watch(None, min(self._spent() / amount, 1.0))
            over = self._spent() >= amount
            due = self._spent() >= self._progress.due or self._config.pace.passing(before, self._spent())
            if over or advance.stuck or due:
                reason = self._evaluate(advance.report)
            if reason is None and (over or advance.stuck):
                reason = "budget" if over else "finished"
        self._write({"kind": "end", "reason": reason})

    def _spent(self) -> float:
        return self._config.budget.spent(self._progress.seconds, self._gradients())

    def _gradients(self) -> float:
        return self._progress.sample_gradients / len(self._problem.train[0])

    def _evaluate(self, report: Any) -> str | None:
        """Write a point and a checkpoint; returns why the run should end, if it should."""
        progress, amount = self._progress, self._config.budget.amount
        n = _evaluated(self._problem)
        loss, error = evaluate(self._problem, self._model, tuple(x[:n] for x in self._problem.train))
        held_out_loss, held_out_error = evaluate(self._problem, self._model, self._problem.held_out)
        point = {
            "kind": "point",
            "step": progress.step,
            "seconds": progress.seconds,
            "sample_gradients": progress.sample_gradients,
            "gradients": self._gradients(),
            "loss": loss,
            "error": error,
            "held_out_loss": held_out_loss,
            "held_out_error": held_out_error,
            "report": None if report is None else report.as_dict(),
        }
        self._write(point)
        progress.lines += 1
        improved = held_out_error < progress.best
        progress.best = min(held_out_error, progress.best)
        progress.since_best = 0 if improved else progress.since_best + 1
        spent = self._spent()
        progress.due = self._config.pace.next(spent, amount)
        if not math.isfinite(loss):
            progress.reason = "diverged"
        elif self._config.patience is not None and progress.since_best >= self._config.patience:
            progress.reason = "early stop"
        self._save()
        self._watch(point, min(spent / amount, 1.0))
        return progress.reason

    def _save(self) -> None:
        """Whole or not at all: a run cut off here continues from the checkpoint before."""
        state = {
            "model": self._model.state_dict(),
            "method": self._method.state_dict(),
            "progress": dataclasses.asdict(self._progress),
        }
        unfinished = self._checkpoint.with_suffix(".pt.tmp")
        torch.save(state, unfinished)
        os.replace(unfinished, self._checkpoint)


@torch.no_grad()
def evaluate(problem: Problem, model: nn.Module, data: tuple[Tensor, ...]) -> tuple[float, float]:
    """Mean loss, weight decay included, and mean error."""
    loss = error = 0.0
    n = len(data[0])
    for start in range(0, n, problem.batch_size):
        batch = tuple(x[start : start + problem.batch_size] for x in data)
        outputs = model(batch[0])
        loss += float(problem.loss(outputs, batch[-1])) * len(batch[0]) / n
        error += float(problem.error(outputs, batch[-1]).double().sum()) / n
    squares = sum(float(p.double().square().sum()) for p in model.parameters())
    return loss + 0.5 * problem.weight_decay * squares, error


def _evaluated(problem: Problem) -> int:
    return min(EVALUATED, problem.evaluated, len(problem.train[0]))


def _header(problem: Problem, config: RunConfig, label: str, model: nn.Module) -> dict[str, Any]:
    return {
        "kind": "run",
        "problem": problem.name,
        "method": config.method,
        "label": label,
        "settings": dataclasses.asdict(config.settings),
        "seed": config.seed,
        "budget": str(config.budget),
        "patience": config.patience,
        "clock": config.clock,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "samples": len(problem.train[0]),
        "evaluated_samples": _evaluated(problem),
        "held_out_samples": len(problem.held_out[0]),
        "error_name": problem.error_name,
        "weight_decay": problem.weight_decay,
        "started": datetime.date.today().isoformat(),
        "machine": machine(),
        **({"facts": dict(problem.facts)} if problem.facts else {}),
    }


def _restore(checkpoint: Path, model: nn.Module, method: Method) -> _Progress:
    state = torch.load(checkpoint, weights_only=True)
    try:
        progress = _Progress(**state["progress"])
    except TypeError:
        raise ValueError(
            f"{checkpoint} was written by another version. Delete it with its .jsonl to run anew."
        ) from None
    model.load_state_dict(state["model"])
    method.load_state_dict(state["method"])
    return progress
