"""One rank of a training that is killed and goes on: ``torchrun … -m tests.distributed.kill_worker PLAN.json``.

Started by kill_loop.py, which writes the plan and holds the checks.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from krylov_descent import KSD, Subsets
from krylov_descent.distributed import Ranks, checkpoint
from krylov_descent.distributed.launch import init_process_group
from tests.distributed.phases import Phases
from tests.distributed.runs import data_of, model_of

_MARKER = 64  # bytes


@dataclass(frozen=True)
class Death:
    """A rank dies or hangs: at the first chance from ``iteration`` on, before the nth thing it does in a phase.

    Attributes:
        how: "kill"; "hang"; or "outside", when another process kills it ``delay`` seconds after that iteration began.
    """

    how: str
    rank: int
    iteration: int
    phase: str = ""
    event: int = 0
    delay: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A training: where it writes to, until which step it goes, and the death in each of torchrun's attempts."""

    directory: str
    steps: int
    reproducible: int = 0
    timeout: float = 60.0
    deaths: list[Death] = field(default_factory=list)

    def write(self) -> Path:
        path = Path(self.directory) / "plan.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: Path) -> Plan:
        values = json.loads(path.read_text())
        return cls(**{**values, "deaths": [Death(**death) for death in values["deaths"]]})


class Marker:
    """Says to others where a rank is; what was said stays when it is killed."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b" " * _MARKER)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _MARKER)

    def say(self, *words: object) -> None:
        self._map[:] = " ".join(map(str, words)).ljust(_MARKER).encode()


def told(directory: str, rank: int) -> list[str]:
    """What a rank's marker says: attempt, process, iteration, phase, event; nothing at first."""
    try:
        return (Path(directory) / f"marker-{rank}").read_text().split()
    except FileNotFoundError:
        return []


def log(directory: str, name: str, **entry: Any) -> None:
    """Add a line to a log, at once."""
    with open(Path(directory) / name, "a") as file:
        file.write(json.dumps(entry) + "\n")


def train(group: Any, plan: Plan, attempt: int = 0) -> dict[str, Any]:
    """Go on until the last step; → digests of θ and the optimizer's state, losses, and events by phase."""
    rank = dist.get_rank(group)
    death = plan.deaths[attempt] if attempt < len(plan.deaths) else None
    marker = Marker(Path(plan.directory) / f"marker-{rank}")
    iteration = 0

    def on_event(phase: str, n: int) -> None:
        marker.say(attempt, os.getpid(), iteration, phase, n)
        if death is None or death.how == "outside" or rank != death.rank:
            return
        if iteration >= death.iteration and (phase, n) == (death.phase, death.event):
            log(plan.directory, "deaths", rank=rank, iteration=iteration, phase=phase, event=n, time=time.monotonic())
            if death.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(1)

    model = model_of("mlp", torch.float64)
    optimizer = KSD(model.parameters(), krylov_dim=5, process_group=Ranks(group, reproducible=plan.reproducible))
    # So small that steps are undone: a state has then all that it can have.
    sets = Subsets(data_of(103, 7, 3, torch.float64), batch_size=16, fraction=0.04, seed=3)
    phases = Phases(on_event, everything=True)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        phases.event()
        z = model(batch[0])
        return F.mse_loss(z, batch[1]), z

    checkpoints = Path(plan.directory) / "checkpoints"
    extra = checkpoint.load(checkpoints, model, optimizer)
    iteration = 0 if extra is None else extra["steps"]
    if rank == 0:
        log(plan.directory, "starts", attempt=attempt, iteration=iteration, time=time.monotonic())
    losses: dict[int, float] = {}
    undone = 0
    events: dict[str, int] = {}
    with phases.following():
        while iteration < plan.steps:
            report = optimizer.step(closure, sets)
            undone += not report.accepted
            losses[iteration] = report.loss
            if rank == 0:
                log(plan.directory, "losses", iteration=iteration, loss=report.loss)
            with phases.saving():
                checkpoint.save(checkpoints, model, optimizer, extra={"steps": iteration + 1})
            for phase, n in phases.counts.items():
                events[phase] = min(n, events.get(phase, n))
            iteration += 1
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {
        "theta": theta.tolist(),
        "sha256 of θ": hashlib.sha256(theta.numpy().tobytes()).hexdigest(),
        "sha256 of the state": _digest(optimizer, group),
        "losses": losses,
        "undone": undone,
        "events": events,
    }


def _digest(optimizer: KSD, group: Any) -> str:
    """sha256 of all that the optimizer remembers, put together from all ranks."""
    vectors, numbers = optimizer.sharded_state()
    total = hashlib.sha256(repr(sorted(numbers.items())).encode())
    for name, part in sorted(vectors.items()):
        total.update(name.encode())
        if part is not None:
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, part.contiguous(), group=group)
            total.update(torch.cat(parts)[: optimizer.numel].numpy().tobytes())
    return total.hexdigest()


def main() -> None:
    """A rank that torchrun started."""
    torch.set_num_threads(1)
    plan = Plan.read(Path(sys.argv[1]))
    group = init_process_group(timeout=timedelta(seconds=plan.timeout))
    result = train(group, plan, int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    (Path(plan.directory) / f"end-{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
