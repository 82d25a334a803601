"""What test_faults.py asks of ranks: training in which something goes wrong on one of them.

Nothing is asserted here, where one rank that stops would leave the others waiting: what happened is returned.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from reliability.phases import STEP, Phases
from reliability.training import data_of
from torch import Tensor, nn
from torch.utils.data import Dataset

from krylov_descent import KSD, StepReport, Subsets
from krylov_descent.distributed import RankError
from tests.distributed.runs import model_of


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """A data set that tells of every sample that is loaded."""

    def __init__(self, data: tuple[Tensor, Tensor], event: Callable[[], object]) -> None:
        self._data, self._event = data, event

    def __len__(self) -> int:
        return len(self._data[0])

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self._event()
        return self._data[0][i], self._data[1][i]


class Run:
    """A small training whose closure, or whose data set, tells of every call.

    Args:
        group: of the ranks; None in a single process.
        on_event: as in ``Phases``.
        loader: whether it is the data set that tells.
        loss: changes the loss, given the number of the call in its phase.
        settings: of KSD.
    """

    def __init__(
        self,
        group: Any,
        on_event: Callable[[str, int], None] = lambda phase, n: None,
        *,
        loader: bool = False,
        loss: Callable[[str, int, Tensor], Tensor] = lambda phase, n, loss: loss,
        fraction: float = 0.2,
        **settings: Any,
    ) -> None:
        self.phases = Phases(on_event)
        self.model = model_of("mlp", torch.float64)
        self.optimizer = KSD(self.model.parameters(), **{"krylov_dim": 5, **settings}, process_group=group)
        data = data_of(103, 7, 3, torch.float64)
        samples = Slow(data, self.phases.event) if loader else data
        self.sets = Subsets(samples, batch_size=32, fraction=fraction, seed=3)
        self._loader, self._loss = loader, loss

    def closure(self, batch: Any) -> tuple[Tensor, Tensor]:
        n = 0 if self._loader else self.phases.event()
        z = self.model(batch[0])
        return self._loss(self.phases.phase, n, F.mse_loss(z, batch[1])), z

    def step(self) -> StepReport:
        for phase in STEP:
            self.phases.counts[phase] = 0
        self.phases.enter("check")
        with self.phases.following():
            return self.optimizer.step(self.closure, self.sets)

    def theta(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


def rank_of(group: Any) -> int:
    return 0 if group is None else int(group.rank())


def outcome(work: Callable[[], object]) -> tuple[str, str]:
    """The type and the text of what is raised."""
    try:
        work()
    except RankError as error:
        return f"RankError, {'connected' if error.connected else 'lost'}", str(error)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def delayed(group: Any, seconds: float) -> list[Tensor]:
    """In the second step, rank 1, 2 or 3 computes for long, each in another phase."""
    slow = dict(zip(STEP, (1, 2, 3), strict=True))
    taken: list[StepReport] = []

    def delay(phase: str, n: int) -> None:
        if len(taken) == 1 and n == 0 and slow.get(phase) == rank_of(group):
            time.sleep(seconds)

    run = Run(group, delay)
    taken += [run.step()]
    taken += [run.step()]
    taken += [run.step()]
    return [run.theta(), torch.tensor([report.loss for report in taken], dtype=torch.float64)]


def raising(group: Any, loader: bool, fraction: float, steps: int) -> dict[str, Any]:
    """Every step is tried with a failure on one rank in every phase, at its first and its last call, then without.

    Returns:
        Of every failure, (step, phase, the rank that fails, type, text, whether θ was as before); of every good step,
        whether θ was that of a run without failures; and whether that run had undone a step.
    """
    good = Run(group, loader=loader, fraction=fraction)
    thetas, counts, reports = [], [], []
    for _ in range(steps):
        reports.append(good.step())
        thetas.append(good.theta())
        counts.append(dict(good.phases.counts))

    aim: list[tuple[str, int]] = [("", 0)]

    def fail(phase: str, n: int) -> None:
        if aim[0] == (phase, n):
            raise OSError(f"boom at {n}")

    run = Run(group, fail, loader=loader, fraction=fraction)
    failures, same = [], []
    for step in range(steps):
        for i, phase in enumerate(("check", *STEP) if step == 0 else STEP):
            for last in (False, True):
                bad = (step + i + last) % group.size()
                before = run.theta()
                own = rank_of(group) == bad
                aim[0] = (phase, counts[step][phase] - 1 if last else 0) if own else ("", 0)
                failures.append((step, phase, bad, *outcome(run.step), torch.equal(run.theta(), before)))
        aim[0] = ("", 0)
        run.step()
        same.append(torch.equal(run.theta(), thetas[step]))
    return {"failures": failures, "same": same, "undone": not all(report.accepted for report in reports)}


def with_nan(group: Any, phase: str, calls: range, bad: int, steps: int, at: int) -> dict[str, Any]:
    """From step ``at`` on, the loss is NaN on one rank in some calls of a phase, or of all phases."""
    taken: list[StepReport] = []

    def spoil(now: str, n: int, loss: Tensor) -> Tensor:
        hit = len(taken) >= at and phase in (now, "all") and n in calls and rank_of(group) == bad
        return loss * math.nan if hit else loss

    run = Run(group, loss=spoil)
    said = ("nothing", "")
    for _ in range(steps):
        said = outcome(lambda: taken.append(run.step()))
        if said[0] != "nothing":
            break
    return {
        "theta": run.theta(),
        "said": said,
        "losses": [report.loss for report in taken],
        "after": [report.search_loss_after for report in taken],
        "evaluations": [report.inner_evaluations for report in taken],
        "stops": [report.stop_reason.name for report in taken],
        "accepted": [report.accepted for report in taken],
        "notes": [len(report.notes) for report in taken],
    }


def different(group: Any, what: str, settings: dict[str, Any]) -> tuple[str, str]:
    """Rank 2 has something else than the others."""
    odd = rank_of(group) == 2
    run = Run(group, **(settings if odd else {}))
    if what == "values" and odd:
        with torch.no_grad():
            next(iter(run.model.parameters()))[0, 0] += 1e-12
    if what == "number" and odd:
        run.model = nn.Sequential(*[*run.model.children()], nn.Linear(3, 3).double())
        run.optimizer = KSD(run.model.parameters(), krylov_dim=5, process_group=group)
    if what == "iteration":
        state = run.optimizer.whole_state()
        run.optimizer.load_whole_state(state._replace(numbers={**state.numbers, "iteration": 1 + odd}))
    if what in ("nan", "order"):
        x, y = data_of(103, 7, 3, torch.float64)
        if odd and what == "nan":
            x[1, 1] = math.nan  # in the shard of rank 0, where rank 2 never looks
        if odd and what == "order":
            x, y = x.flip(0), y.flip(0)
        run.sets = Subsets((x, y), batch_size=32, fraction=0.2, seed=3)
    return outcome(run.step)


def ending(group: Any, phase: str, bad: int, kill: bool, seen: str) -> tuple[float, str, str, bool]:
    """In the second step, one rank is killed or hangs for good; in the search, where parameters are at a trial point.

    Returns:
        Seconds from then on until this rank knew, what it said, and whether parameters and state were as before.
    """
    taken: list[StepReport] = []

    def end(now: str, n: int) -> None:
        if len(taken) == 1 and now == phase and n == 2 * (phase == "search") and rank_of(group) == bad:
            Path(seen).write_text(repr(time.monotonic()))
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(1)

    run = Run(group, end)
    taken.append(run.step())
    theta, before = run.theta(), run.optimizer.state_dict()["krylov_descent"]  # with a checksum of all of it
    kind, text = outcome(run.step)
    seconds = time.monotonic() - float(Path(seen).read_text())
    same: bool = run.optimizer.state_dict()["krylov_descent"] == before
    return seconds, kind, text, same and torch.equal(theta, run.theta())
