"""A small training that saves after every step, is disturbed as planned, and goes on from its last checkpoint.

One rank of it is a call of ``train``; under torchrun, ``python -m reliability.training PLAN.json``. ``kills.py`` starts
them and holds the checks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from krylov_descent import checkpoint
from krylov_descent.base import CurvatureOptimizer
from krylov_descent.distributed.launch import init_process_group
from reliability.methods import Optimizer, digest, optimizer_of, sets_of
from reliability.phases import Phases
from reliability.snapshot import Snapshot

WIDTHS = (7, 11, 5, 3)
_MARKER = 64  # bytes


@dataclass(frozen=True)
class Death:
    """What happens to a rank: at the first chance from ``iteration`` on, before the nth thing it does in a phase.

    Attributes:
        how: "kill"; "hang"; "stop", until it is continued from outside; or "outside", when another process kills it
            ``delay`` seconds after that iteration began.
    """

    how: str
    rank: int
    iteration: int
    phase: str = ""
    event: int = 0
    delay: float = 0.0


@dataclass(frozen=True)
class Plan:
    """A training: where it writes to, until which step it goes, the death in each attempt, and the method."""

    directory: str
    steps: int
    timeout: float = 60.0
    deaths: list[Death] = field(default_factory=list)
    method: str = "default"

    @property
    def checkpoint(self) -> Path:
        """The file."""
        return Path(self.directory) / "run.safetensors"

    def write(self) -> Path:
        """For ranks under torchrun."""
        path = Path(self.directory) / "plan.json"
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: Path) -> Plan:
        """What ``write`` wrote."""
        values = json.loads(path.read_text())
        return cls(**{**values, "deaths": [Death(**death) for death in values["deaths"]]})


class Marker:
    """Says to others where a rank is; what was said stays when it is killed."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(b" " * _MARKER)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), _MARKER)

    def say(self, *words: object) -> None:
        """Replace what was said."""
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


def dense(widths: Sequence[int], dtype: torch.dtype) -> nn.Sequential:
    """A tanh network."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


def data_of(n: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a regression."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, inputs, dtype=dtype, generator=generator)
    return x, torch.tanh(x @ torch.randn(inputs, outputs, dtype=dtype, generator=generator))


def small(method: str, model: nn.Module, **settings: Any) -> Optimizer:
    """The optimizer of a method, with a small K."""
    K = {"krylov_dim": 5} if method in ("PAPER", "default") else {}
    return optimizer_of(method, model.parameters(), **K, **settings)


def built(plan: Plan, group: Any = None) -> tuple[nn.Module, Optimizer]:
    """Model and optimizer as they are at the start of every attempt."""
    torch.manual_seed(0)
    model = dense(WIDTHS, torch.float64)
    return model, small(plan.method, model, process_group=group)


def loaded(plan: Plan, model: nn.Module, optimizer: CurvatureOptimizer) -> int:
    """Go on from the checkpoint; the steps behind it, 0 if there is none."""
    extra = checkpoint.load(plan.checkpoint, model, optimizer)
    return 0 if extra is None else int(extra["steps"])


@contextmanager
def _survived(plan: Plan, rank: int, model: nn.Module, optimizer: CurvatureOptimizer) -> Iterator[None]:
    """Logs what a rank is told when another one is lost, and what is not as before then."""
    before = Snapshot(model, optimizer)
    try:
        yield
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        log(plan.directory, "survivors", rank=rank, said=said, changed=before.changed(), time=time.monotonic())
        raise


def train(group: Any, plan: Plan, attempt: int = 0) -> dict[str, Any]:
    """Go on until the last step; → digests of θ and the optimizer's state, losses, and events by phase."""
    rank = 0 if group is None else dist.get_rank(group)
    death = plan.deaths[attempt] if attempt < len(plan.deaths) else None
    marker = Marker(Path(plan.directory) / f"marker-{rank}")
    iteration = 0

    def on_event(phase: str, n: int) -> None:
        marker.say(attempt, os.getpid(), iteration, phase, n)
        if death is None or death.how == "outside" or rank != death.rank:
            return
        if iteration >= death.iteration and (phase, n) == (death.phase, death.event):
            if death.how == "stop" and iteration > death.iteration:
                return  # it was stopped already
            log(plan.directory, "deaths", rank=rank, iteration=iteration, phase=phase, event=n, time=time.monotonic())
            if death.how != "hang":
                os.kill(os.getpid(), signal.SIGKILL if death.how == "kill" else signal.SIGSTOP)
                return
            while True:
                time.sleep(1)

    model, optimizer = built(plan, group)
    # So small that steps are undone: a state has then all that it can have.
    sets = sets_of(plan.method, data_of(103, 7, 3, torch.float64), 3, batch_size=16, fraction=0.04)
    phases = Phases(on_event, everything=True)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        phases.event()
        z = model(batch[0])
        return F.mse_loss(z, batch[1]), z

    iteration = loaded(plan, model, optimizer)
    if rank == 0:
        log(plan.directory, "starts", attempt=attempt, iteration=iteration, time=time.monotonic())
    losses: dict[int, float] = {}
    digests: dict[int, str] = {iteration: digest(model, optimizer)}
    undone = 0
    events: dict[str, int] = {}
    with phases.following():
        while iteration < plan.steps:
            with _survived(plan, rank, model, optimizer):
                report = optimizer.step(closure, sets)
            undone += not report.accepted
            losses[iteration] = report.loss
            if rank == 0:
                log(plan.directory, "losses", iteration=iteration, loss=report.loss)
            with phases.saving(), _survived(plan, rank, model, optimizer):
                checkpoint.save(plan.checkpoint, model, optimizer, extra={"steps": iteration + 1})
            for phase, n in phases.counts.items():
                events[phase] = min(n, events.get(phase, n))
            iteration += 1
            digests[iteration] = digest(model, optimizer)
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {
        "theta": theta.tolist(),
        "sha256 of θ": hashlib.sha256(theta.numpy().tobytes()).hexdigest(),
        "sha256 of the state": digest(model, optimizer),
        "digests": digests,
        "losses": losses,
        "undone": undone,
        "events": events,
    }


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
