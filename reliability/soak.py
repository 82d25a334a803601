"""Long runs: memory, descriptors and threads over thousands of steps, and the same bits from the same seed.

Each run is a process of its own, started twice: what it holds is measured in the first, and both must end at the same
bits. Resident memory may not grow after the first tenth of the steps by more than ``ALLOWED`` (the allocator's blocks
come and go); descriptors and threads may not grow at all.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from krylov_descent import Subsets, checkpoint
from reliability.processes import running
from reliability.training import Method, data_of, dense, made

#: Bytes by which the memory of a run may grow after the first tenth of it, as a median over tenths.
ALLOWED = 2 << 20
#: Points of the curve of a run.
POINTS = 100


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        widths: of the network.
        samples: of the data set; B and C are a tenth of it each.
        full_batch: without sets.
        saves: saves a checkpoint at each point of the curve, too.
    """

    name: str
    method: Method
    widths: tuple[int, ...]
    samples: int
    steps: int
    full_batch: bool = False
    saves: bool = False


_SMALL, _MIDDLE = (4, 10, 1), (50, 150, 150, 10)
#: Trial n is case n modulo their number.
CASES = (
    Case("5,000 steps, KSD, sets", "ksd", _SMALL, 100, 5000, saves=True),
    Case("5,000 steps, GaussNewtonFlow, full batch", "flow", _SMALL, 100, 5000, full_batch=True),
    Case("200 steps, KSD, sets", "ksd", _MIDDLE, 2000, 200),
    Case("200 steps, GaussNewtonFlow, sets", "flow", (20, 60, 60, 4), 2000, 200),
)


def run(count: int, seed: int, report: Callable[[dict[str, Any]], None], done: Container[int] = ()) -> None:
    """Trials of the seeds ``seed`` to ``seed + count - 1``, without those that are done."""
    for number in range(seed, seed + count):
        if number not in done:
            report(trial(CASES[number % len(CASES)], number))


def trial(case: Case, seed: int, share: float = 1.0) -> dict[str, Any]:
    """Two runs of a case, or of a share of its steps, as a flat record."""
    began = time.perf_counter()
    ends = []
    for _ in range(2):
        with running(1, 60.0, soaked, case, seed, share) as alive:
            (ended,) = alive.ends(timeout=24 * 3600)
        if ended.code != 0:
            raise RuntimeError(f"a run of {case.name} ended with {ended.code}")
        ends.append(ended.result)
    first, second = ends
    wrong = judged(first)
    if first["sha256"] != second["sha256"]:
        wrong.append(f"two runs of the same seed ended at {first['sha256'][:12]} and {second['sha256'][:12]}")
    return {
        "kind": "soak",
        "case": case.name,
        "outcome": "lost" if wrong else "flat, and the same bits again",
        "lost": bool(wrong),
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 1),
        **first,
        **({"why": "; ".join(wrong)} if wrong else {}),
    }


def judged(found: dict[str, Any]) -> list[str]:
    """What grew."""
    wrong = []
    grown = growth(found["resident"])
    if grown > ALLOWED:
        wrong.append(f"memory grew by {grown / 2**20:.1f} MiB after the first tenth of {found['steps']} steps")
    for name in ("descriptors", "threads"):
        values = found[name]
        warm = values[len(values) // 10]
        if max(values[len(values) // 10 :]) > warm:
            wrong.append(f"{name} grew from {warm} to {max(values)}")
    return wrong


def growth(resident: Sequence[int]) -> int:
    """Bytes from the second tenth of a curve to the last one, each a median."""
    tenth = max(1, len(resident) // 10)
    return round(statistics.median(resident[-tenth:]) - statistics.median(resident[tenth : 2 * tenth]))


def soaked(_: Any, case: Case, seed: int, share: float) -> dict[str, Any]:
    """One run, in float32: its curves, the digest of its end, and its loss."""
    torch.manual_seed(seed)
    model = dense(case.widths, torch.float32)
    data = data_of(case.samples, case.widths[0], case.widths[-1], torch.float32)
    sets = None if case.full_batch else Subsets(data, batch_size=500, fraction=0.1, seed=seed)
    optimizer = made(case.method, model, krylov_dim=5 if len(case.widths) == 3 else 20, seed=seed)

    def closure(batch: Any = data) -> tuple[Tensor, Tensor]:
        z = model(batch[0])
        return F.mse_loss(z, batch[1]), z

    steps = max(2, round(share * case.steps))
    every = max(1, steps // POINTS)
    curves: dict[str, list[Any]] = {"at": [], "resident": [], "descriptors": [], "threads": []}
    directory = Path(f"/proc/{os.getpid()}")
    losses = []
    with tempfile.TemporaryDirectory() as kept:
        for step in range(steps):
            losses.append(optimizer.step(closure, sets).loss)
            if (step + 1) % every == 0:
                if case.saves:
                    checkpoint.save(Path(kept) / "run.safetensors", model, optimizer)
                curves["at"].append(step + 1)
                curves["resident"].append(_status(directory, "VmRSS") * 1024)
                curves["descriptors"].append(len(os.listdir(directory / "fd")))
                curves["threads"].append(_status(directory, "Threads"))
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {
        "steps": steps,
        "parameters": theta.numel(),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "sha256": hashlib.sha256(theta.numpy().tobytes() + repr(losses).encode()).hexdigest(),
        **curves,
    }


def _status(directory: Path, key: str) -> int:
    lines = (directory / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))
