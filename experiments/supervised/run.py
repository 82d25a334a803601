"""One run: a method on a problem until its budget is spent, in a file with a checkpoint beside it; it can be continued.

The file has JSON lines: a header, then a point whenever an evaluation is due, then an end.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.common.budget import CLOCKS, Budget, Clock
from experiments.common.files import finished, machine, opened, replacing, require_same
from experiments.common.loop import Advance, Loop, Pace, Progress, Watch
from experiments.common.packed import path_of
from experiments.supervised.interface import Method
from experiments.supervised.methods import KINDS
from experiments.supervised.problems import Problem


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What a run is, apart from its problem.

    Attributes:
        method: a name of ``KINDS``.
        settings: all of that method's.
        budget: where it ends.
        seed: of initial weights, sample sets and mini-batches.
        clock: whose seconds count.
        label: of the run in files and tables.
        patience: evaluations without a better held-out error after which it ends; None for never.
        pace: when points are due.
    """

    method: str
    settings: Mapping[str, Any]
    budget: Budget
    seed: int = 0
    clock: Clock = "wall"
    label: str = ""
    patience: int | None = None
    pace: Pace = dataclasses.field(default_factory=Pace)

    @property
    def name(self) -> str:
        """The label, or the method's name."""
        return self.label or self.method


def run(problem: Problem, config: RunConfig, results: Path, watch: Watch | None = None) -> Path:
    """Run, or continue, until the budget is spent; returns the file of the run.

    Raises:
        ValueError: the file there belongs to a run of other settings.
    """
    path = path_of(results, problem.name, config.name, config.seed)
    checkpoint = path.with_suffix(".pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    model = problem.make_model(config.seed)
    kind = KINDS[config.method]
    training = _Training(problem, model, kind.make(problem, model, config.seed, **config.settings), checkpoint)
    header = _header(problem, config, model)
    if path.exists():
        header["started"] = require_same(path, header, scheduled=kind.scheduled)
        if finished(results, path, config.budget):
            return path
    else:
        checkpoint.unlink(missing_ok=True)  # of a run whose file was deleted
    progress = training.restored() if checkpoint.exists() else Progress()
    clock = CLOCKS[config.clock]
    with opened(path, header, progress.lines) as write:
        loop = Loop(training, config.budget, config.pace, write, clock, progress, watch, config.patience)
        write({"kind": "end", "reason": loop.run()})
    return path


@dataclasses.dataclass(eq=False)
class _Training:
    """A model in training, as the loop sees it."""

    problem: Problem
    model: nn.Module
    method: Method
    checkpoint: Path

    @property
    def samples(self) -> int:
        return len(self.problem.train[0])

    def advance(self, share: float) -> Advance:
        return self.method.advance(share)

    def point(self, progress: Progress, report: Any) -> dict[str, Any]:
        n = _evaluated(self.problem)
        loss, error = evaluate(self.problem, self.model, tuple(x[:n] for x in self.problem.train))
        held_out_loss, held_out_error = evaluate(self.problem, self.model, self.problem.held_out)
        return {
            "kind": "point",
            "step": progress.step,
            "seconds": progress.seconds,
            "sample_gradients": progress.sample_gradients,
            "gradients": progress.sample_gradients / self.samples,
            "loss": loss,
            "error": error,
            "held_out_loss": held_out_loss,
            "held_out_error": held_out_error,
            "report": None if report is None else report.as_dict(),
        }

    def save(self, progress: Progress) -> None:
        """Whole or not at all: a run cut off here continues from the checkpoint before."""
        parts = {"model": self.model.state_dict(), "method": self.method.state_dict()}
        with replacing(self.checkpoint) as unfinished:
            torch.save({**parts, "progress": dataclasses.asdict(progress)}, unfinished)

    def restored(self) -> Progress:
        """Take model and method from the checkpoint; returns where the run was."""
        state: Mapping[str, Any] = torch.load(self.checkpoint, weights_only=True)
        try:
            progress = Progress(**state["progress"])
        except TypeError:
            raise ValueError(
                f"{self.checkpoint} was written by another version. Delete it with its .jsonl to run anew."
            ) from None
        self.model.load_state_dict(state["model"])
        self.method.load_state_dict(state["method"])
        return progress


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
    """Points are evaluated on the first training samples: passes over all would double the cost."""
    return min(problem.evaluated, len(problem.train[0]))


def _header(problem: Problem, config: RunConfig, model: nn.Module) -> dict[str, Any]:
    return {
        "kind": "run",
        "problem": problem.name,
        "method": config.method,
        "label": config.name,
        "settings": dict(config.settings),
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
