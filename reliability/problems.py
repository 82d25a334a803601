"""Random problems by the thousand: a few steps of a method on each, and a judgement.

A trial is well if the parameters are finite and the loss is no higher than before, beyond rounding (``relative_noise``
of the parameters' dtype); or if the method refuses by a ValueError or TypeError of its own; or if an exception of the
closure comes out as it went in. After either kind of exception everything must be as before the step, bit for bit.
Anything else is lost: a refusal in a later step, too, of a point that the method itself has gone to. With ``Subsets``,
where a step is judged by the next one, the loss is compared after ``settle``.
"""

from __future__ import annotations

import math
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import krylov_descent
from krylov_descent import KSD, GaussNewtonFlow, Growing, Search, Storage, Subsets
from krylov_descent.objective.objective import relative_noise
from reliability.closures import Faulty
from reliability.losses import data_of, evaluate
from reliability.methods import METHODS, optimizer_of
from reliability.models import CHANGING, build
from reliability.outcome import Outcome
from reliability.recipe import Problem
from reliability.snapshot import Snapshot

#: Faults after which losses of a step are no longer of one function, so that none can be compared.
INCOMPARABLE = ("random", "other parameters", "swapped", "weight zero")
#: Models that keep their own dtypes.
_OWN_DTYPES = ("complex", "mixed dtypes")
_SOURCE = str(Path(krylov_descent.__file__).parent)


def odd_problem(method: str, seed: int) -> Outcome:
    """Nothing is planned to go wrong; the model, the data, the loss or a setting may be odd."""
    return trial(Problem.drawn(method, seed))


def exception(method: str, seed: int) -> Outcome:
    """The closure raises, or returns the wrong thing, from some call on."""
    return trial(Problem.drawn(method, seed, "exception"))


def nan_region(method: str, seed: int) -> Outcome:
    """The loss is not finite in a part of the space, or infinitely steep where it is best."""
    return trial(Problem.drawn(method, seed, "NaN region"))


def trial(problem: Problem) -> Outcome:
    """A few steps on one problem."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # KSD warns of what it cannot refuse
        torch.manual_seed(problem.seed)
        outcome = _Trial(problem).judge()
    if outcome.lost:
        outcome.told["problem"] = repr(problem)
    return outcome


def _from_the_model(error: Exception) -> bool:
    """Whether a layer raised it, such as batch norm of a single sample."""
    return any(frame.filename.endswith("torch/nn/functional.py") for frame in traceback.extract_tb(error.__traceback__))


def _wide(p: Tensor) -> torch.dtype:
    """The dtype in which a method computes with a parameter."""
    return torch.float32 if p.dtype == torch.bfloat16 else p.dtype


def _sets(problem: Problem, data: tuple[Tensor, Tensor]) -> Subsets | None:
    """The data set cut in some way, or None for the full batch."""
    options: dict[str, dict[str, Any]] = {
        "subsets": {"batch_size": 4},
        "half": {"batch_size": 5, "fraction": 0.5},
        "tenth": {"batch_size": 100, "fraction": 0.1},
        "single batches": {"batch_size": 1, "fraction": 0.4},
    }
    if problem.method == "DEEP + Growing" and (problem.sets != "full" or problem.seed % 4):
        size = options.get(problem.sets, {"batch_size": 64})["batch_size"]
        return Growing(data, batch_size=size, start=500 if problem.seed % 2 else 4, seed=problem.seed)
    return None if problem.sets == "full" else Subsets(data, seed=problem.seed, **options[problem.sets])


def _optimizer(problem: Problem, model: nn.Module) -> KSD | GaussNewtonFlow:
    """The method of a problem; "default" stands for KSD with any settings, PAPER and DEEP keep most of theirs."""
    given: dict[str, Any] = {"weight_decay": problem.weight_decay, "seed": problem.seed}
    size = sum(p.numel() * _wide(p).itemsize for p in model.parameters() if p.requires_grad)
    budgets = {"rebuilt graphs": (problem.krylov_dim + 1) * size + 1, "no room": 1}
    if METHODS[problem.method] is None:
        given |= {"rows": problem.rows, "memory_budget": {"no room": 1}.get(problem.memory)}
    else:
        given["memory_budget"] = budgets.get(problem.memory)
    if problem.method in ("default", "flow"):
        given["rollback"] = problem.rollback
    if problem.method in ("default", "PAPER"):
        given["krylov_dim"] = problem.krylov_dim
    if problem.method == "default":
        stored = {"bfloat16 basis": torch.bfloat16, "float32 basis": torch.float32}
        searches = {"absolute": Search(negative="absolute"), "short": Search(2, 3), "tiny floor": Search(floor=1e-300)}
        given |= {
            "curvature": problem.curvature,
            "preconditioner": None if problem.preconditioner == "none" else problem.preconditioner,
            "previous": None if problem.previous == "none" else problem.previous,
            "search": searches.get(problem.search, Search()),
            "storage": Storage(stored.get(problem.memory)),
        }
    return optimizer_of(problem.method, model.parameters(), **given)


class _Trial:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        scale = 10.0**problem.weight_exponent
        model = build(problem.network, problem.width, problem.activation, problem.outputs, problem.oddity, scale)
        own = problem.network in _OWN_DTYPES
        self.model = model if own else model.to(getattr(torch, problem.dtype.split()[0]))
        for p in self.model.parameters() if problem.grad else ():
            p.grad = torch.ones_like(p)
        self.data = data_of(problem)
        self.closure = Faulty(self._right, problem.fault, problem.fault_call)
        self.sets = _sets(problem, self.data)
        self.outcome = Outcome()
        self.steps = 0
        self.first: float | None = None

    def _right(self, batch: tuple[Tensor, Tensor] | None = None) -> tuple[Any, ...]:
        return evaluate(self.problem, self.model, *(self.data if batch is None else batch))

    def judge(self) -> Outcome:
        problem, outcome = self.problem, self.outcome
        try:
            self.optimizer = _optimizer(problem, self.model)
        except ValueError as error:
            return Outcome("refused", told={"message": str(error)})
        start = self.first = self.loss()
        first = Snapshot(self.model, self.optimizer)
        for _ in range(problem.steps):
            if not self._step() or outcome.lost:
                break
        if outcome.lost or outcome.ended == "refused":
            return outcome
        end = self.loss() if self.sets is None else self._settled(start)
        if outcome.ended != "raised as given" and "parameters" in first.changed():
            outcome.ended = "improved" if start is not None and end is not None and end < start else "level"
        return outcome

    def _step(self) -> bool:
        """One step, judged; False if there is to be no other."""
        model, optimizer = self.model, self.optimizer
        before, snapshot = self.loss(), Snapshot(model, optimizer)
        try:
            report = optimizer.step(self.closure, *(() if self.sets is None else (self.sets,)))
        except BaseException as error:
            return self._judge_exception(error, snapshot)
        if self.closure.raised is not None and self.outcome.ended != "raised as given":
            self.outcome.lost.append(f"{type(self.closure.raised).__name__} of the closure was swallowed")
        self.outcome.told["message"] = report.stop_reason.value
        self._judge_parameters(snapshot)
        after = self.loss()
        if (self.sets is None or set(report.set_sizes.values()) == {self.problem.samples}) and report.accepted:
            self._compare(before, after)
        self._compare(report.search_loss_before, report.search_loss_after)
        self.steps += 1
        return True

    def _judge_parameters(self, snapshot: Snapshot) -> None:
        lost = self.outcome.lost
        for p, was in zip(self.model.parameters(), snapshot.parameters, strict=True):
            if bool(was.isfinite().all()) and not bool(p.isfinite().all()):
                lost.append("a parameter is no longer finite")
            if not p.requires_grad and not torch.equal(p, was):
                lost.append("a frozen parameter has moved")
        allowed = {"parameters", "optimizer state", *self._moved_by_closure()}
        if self.problem.network in CHANGING:
            allowed.add("buffers")
        lost += [f"{what} changed by a step" for what in snapshot.changed() if what not in allowed]

    def _moved_by_closure(self) -> set[str]:
        """What the closure itself changes, and KSD cannot know of."""
        moved = {"grad"} if self.problem.fault == "backward" else set()
        return moved | {"random state"} if self.problem.fault == "random" else moved

    def _judge_exception(self, error: BaseException, snapshot: Snapshot) -> bool:
        changed = [what for what in snapshot.changed() if what not in self._moved_by_closure()]
        outcome, frames = self.outcome, traceback.extract_tb(error.__traceback__)
        own = frames[-1].filename.startswith(_SOURCE)
        raises = self._raises(error)
        if not raises and not isinstance(error, Exception):
            raise error  # Ctrl-C
        if raises:
            outcome.ended = "raised as given"
        elif isinstance(error, (ValueError, TypeError)) and own:
            outcome.ended = "refused"
            if self.steps and self.sets is None and self.problem.fault == "none":
                outcome.lost.append(f"step {self.steps} is refused where the last one went to: {error}")
        else:
            place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
            outcome.lost.append(f"{type(error).__name__} at {place}: {error}")
        outcome.told["message"] = str(error)
        outcome.lost += [f"{what} changed by a step that failed" for what in changed]
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
            if self.loss() is not None and not _from_the_model(error):
                self.outcome.lost.append(f"settle: {type(error).__name__}: {error}")
            return None
        end = self.loss()
        if isinstance(self.sets, Growing):
            return end
        # Passes with and without a graph may take other kernels, whose rounding a steep loss enlarges.
        apart = math.sqrt(torch.finfo(self.data[0].dtype).eps)
        if end is not None and math.isfinite(end) and abs(end - settlement.loss) > apart * abs(end):
            self.outcome.lost.append(f"settle says {settlement.loss!r}, and the loss is {end!r}")
        if self.problem.rollback and self.problem.method != "PAPER":
            self._compare(start, end, self.problem.steps)
        return end

    def _compare(self, before: float | None, after: float | None, steps: int = 1) -> None:
        """No higher than before, up to rounding."""
        if before is None or not math.isfinite(before) or self.problem.fault in INCOMPARABLE:
            return
        if after is None or not after <= before + steps * self._noise(before):
            self.outcome.lost.append(f"the loss rose from {before!r} to {after!r}")

    def _noise(self, loss: float) -> float:
        """Of a loss, and of one that is the rounding of outputs, which differs with and without a graph."""
        noise = relative_noise(next(self.model.parameters()).dtype)
        first = abs(self.first) if self.first is not None and math.isfinite(self.first) else 0.0
        return noise * abs(loss) + (4 * noise) ** 2 * first

    def loss(self) -> float | None:
        """f on A, weight decay included; None where the right closure raises."""
        batches = self._batches()
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
            0.5 * self.problem.weight_decay * float(p.detach().to(_wide(p)).square().sum(dtype=torch.float64))
            for p in self.model.parameters()
            if p.requires_grad and self.problem.weight_decay
        )

    def _batches(self) -> list[Any]:
        if self.sets is None or isinstance(self.sets, Growing):
            return [None]
        return [(b.data, b.samples) for b in self.sets.draw(0, krylov_dim=self.problem.krylov_dim).a]
