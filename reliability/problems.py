"""Random problems by the thousand: a few steps of KSD on each, and a judgement.

A trial is well if the parameters are finite and the loss is no higher than before, beyond rounding (``relative_noise``
of the parameters' dtype); or if KSD refuses by a ValueError or TypeError of its own; or if an exception of the closure
comes out as it went in. After either kind of exception everything must be as before the step, bit for bit. Anything
else is lost. With sets, where a step is judged by the next one, the loss is compared after ``settle``.
"""

from __future__ import annotations

import math
import time
import traceback
import warnings
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import krylov_descent
from krylov_descent.objective.objective import relative_noise
from reliability.arguments import optimizer_of, sets_of, wide
from reliability.faults import Faulty
from reliability.losses import data_of, evaluate
from reliability.networks import build
from reliability.recipe import Problem
from reliability.snapshot import Snapshot

#: Faults after which losses of a step are no longer of one function, so that none can be compared.
INCOMPARABLE = ("random", "other parameters", "swapped", "weight zero")

_SOURCE = str(Path(krylov_descent.__file__).parent)


def run(count: int, seed: int, report: Callable[[dict[str, Any]], None], done: Container[int] = ()) -> None:
    """Trials of the seeds ``seed`` to ``seed + count - 1``, without those that are done."""
    for number in range(seed, seed + count):
        if number not in done:
            report(record(Problem.of_seed(number), number))


def record(problem: Problem, seed: int | None = None) -> dict[str, Any]:
    """One trial, as a flat record."""
    start = time.perf_counter()
    judged = trial(problem)
    return {
        "kind": "problem",
        "case": problem.case,
        "outcome": judged.outcome,
        "lost": bool(judged.lost),
        "seed": seed,
        "seconds": round(time.perf_counter() - start, 4),
        **({"why": "; ".join(judged.lost), "problem": repr(problem)} if judged.lost else {}),  # else the seed tells
    }


@dataclass
class Judgement:
    """How a trial ended.

    Attributes:
        outcome: "improved", "level", "unchanged", "refused" or "raised as given".
        lost: what was promised and not kept, one phrase each.
        message: of the refusal, or why the last search ended.
    """

    outcome: str = "unchanged"
    lost: list[str] = field(default_factory=list)
    message: str = ""


def trial(problem: Problem) -> Judgement:
    """A few steps on one problem."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # KSD warns of what it cannot refuse
        torch.manual_seed(problem.seed)
        return _Trial(problem).judge()


class _Trial:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.model = build(problem)
        self.data = data_of(problem)
        self.closure = Faulty(self._right, problem.fault, problem.fault_call)
        self.sets = sets_of(problem, self.data)
        self.judgement = Judgement()

    def _right(self, batch: tuple[Tensor, Tensor] | None = None) -> tuple[Any, ...]:
        return evaluate(self.problem, self.model, *(self.data if batch is None else batch))

    def judge(self) -> Judgement:
        problem, judgement = self.problem, self.judgement
        try:
            self.optimizer = optimizer_of(problem, self.model)
        except ValueError as error:
            return Judgement("refused", message=str(error))
        start = self.loss()
        first = Snapshot(self.model, self.optimizer)
        for _ in range(problem.steps):
            if not self._step() or judgement.lost:
                break
        if judgement.lost or judgement.outcome == "refused":
            return judgement
        end = self.loss() if self.sets is None else self._settled(start)
        if judgement.outcome != "raised as given" and "parameters" in first.changed():
            judgement.outcome = "improved" if start is not None and end is not None and end < start else "level"
        return judgement

    def _step(self) -> bool:
        """One step, judged; False if there is to be no other."""
        model, optimizer = self.model, self.optimizer
        before, snapshot = self.loss(), Snapshot(model, optimizer)
        try:
            report = optimizer.step(self.closure, *(() if self.sets is None else (self.sets,)))
        except BaseException as error:
            return self._judge_exception(error, snapshot)
        if self.closure.raised is not None and self.judgement.outcome != "raised as given":
            self.judgement.lost.append(f"{type(self.closure.raised).__name__} of the closure was swallowed")
        self.judgement.message = report.stop_reason.value
        self._judge_parameters(snapshot)
        after = self.loss()
        searched_all = self.sets is None or report.set_sizes["A"] == report.set_sizes["B"] == report.set_sizes["C"]
        if searched_all and report.accepted:
            self._compare(before, after, 1)
        return True

    def _judge_parameters(self, snapshot: Snapshot) -> None:
        lost = self.judgement.lost
        for p, was in zip(self.model.parameters(), snapshot.parameters, strict=True):
            if bool(was.isfinite().all()) and not bool(p.isfinite().all()):
                lost.append("a parameter is no longer finite")
            if not p.requires_grad and not torch.equal(p, was):
                lost.append("a frozen parameter has moved")
        allowed = {"parameters", "optimizer state", *self._moved_by_closure()}
        lost += [f"{what} changed by a step" for what in snapshot.changed() if what not in allowed]

    def _moved_by_closure(self) -> set[str]:
        """What the closure itself changes, and KSD cannot know of."""
        moved = {"grad"} if self.problem.fault == "backward" else set()
        return moved | {"random state"} if self.problem.fault == "random" else moved

    def _judge_exception(self, error: BaseException, snapshot: Snapshot) -> bool:
        changed = [what for what in snapshot.changed() if what not in self._moved_by_closure()]
        judgement, frames = self.judgement, traceback.extract_tb(error.__traceback__)
        own = frames[-1].filename.startswith(_SOURCE)
        raises = self._raises(error)
        if not raises and not isinstance(error, Exception):
            raise error  # Ctrl-C
        if raises:
            judgement.outcome = "raised as given"
        elif isinstance(error, (ValueError, TypeError)) and own:
            judgement.outcome = "refused"
        else:
            place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
            judgement.lost.append(f"{type(error).__name__} at {place}: {error}")
        judgement.message = str(error)
        judgement.lost += [f"{what} changed by a step that failed" for what in changed]
        return raises and self.closure.raised_by_fault

    def _raises(self, error: BaseException) -> bool:
        """Whether the error is the closure's own: made by its fault, or by the model on the same batch anywhere."""
        if error is not self.closure.raised or self.closure.raised_by_fault:
            return error is self.closure.raised
        try:
            self._right(*self.closure.given)
        except Exception as again:
            return type(again) is type(error)
        return False

    def _settled(self, start: float | None) -> float | None:
        """The loss on A after the last step was judged, as the next one would have."""
        assert self.sets is not None
        try:
            settlement = self.optimizer.settle(self._right, self.sets)
        except Exception as error:
            if self.loss() is not None:
                self.judgement.lost.append(f"settle: {type(error).__name__}: {error}")
            return None
        end = self.loss()
        # Passes with and without a graph may take other kernels, whose rounding a steep loss enlarges.
        apart = math.sqrt(torch.finfo(self.data[0].dtype).eps)
        if end is not None and math.isfinite(end) and abs(end - settlement.loss) > apart * abs(end):
            self.judgement.lost.append(f"settle says {settlement.loss!r}, and the loss is {end!r}")
        if self.problem.rollback:
            self._compare(start, end, self.problem.steps)
        return end

    def _compare(self, before: float | None, after: float | None, steps: int) -> None:
        """No higher than before, up to rounding."""
        if before is None or not math.isfinite(before) or self.problem.fault in INCOMPARABLE:
            return
        if after is None or not after <= before + steps * self._noise(before):
            self.judgement.lost.append(f"the loss rose from {before!r} to {after!r}")

    def _noise(self, loss: float) -> float:
        return relative_noise(next(self.model.parameters()).dtype) * abs(loss)

    def loss(self) -> float | None:
        """f on A, weight decay included; None where the right closure raises."""
        batches = [None] if self.sets is None else [(b.data, b.samples) for b in self._draw()]
        found: list[tuple[float, float]] = []
        generator = torch.get_rng_state()
        try:
            for batch in batches:
                value, _, *weight = self._right(*(() if batch is None else batch[:1]))
                w = float(weight[0]) if weight else 1.0 if batch is None else float(batch[1] or 0)
                found.append((float(value.detach()), w))
        except Exception:
            return None
        finally:
            torch.set_rng_state(generator)
        W = math.fsum(w for _, w in found)
        mean = sum(w * f for f, w in found if w > 0) / W if W > 0 else math.nan  # fsum raises for inf − inf
        return mean + sum(
            0.5 * self.problem.weight_decay * float(p.detach().to(wide(p)).square().sum(dtype=torch.float64))
            for p in self.model.parameters()
            if p.requires_grad and self.problem.weight_decay
        )

    def _draw(self) -> Any:
        assert self.sets is not None
        return self.sets.draw(0, krylov_dim=self.problem.krylov_dim).a
