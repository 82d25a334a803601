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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from krylov_descent import checkpoint
from reliability.methods import sets_of
from reliability.outcome import Outcome
from reliability.processes import running
from reliability.training import data_of, dense, small

#: Bytes by which the memory of a run may grow after the first tenth of it, as a median over tenths.
ALLOWED = 2 << 20
#: Points of the curve of a run; a checkpoint is saved at each.
POINTS = 100
#: Steps of a run; those of BFGS take longer.
STEPS = {"PAPER": 1000, "default": 2000, "DEEP + Growing": 5000, "flow": 5000}


def long_run(method: str, seed: int, share: float = 1.0) -> Outcome:
    """Two runs of a method, or of a share of its steps."""
    ends = []
    for _ in range(2):
        with running(1, 60.0, soaked, method, seed, share) as alive:
            (ended,) = alive.ends(timeout=3600)
        if ended.code != 0:
            return Outcome(lost=[f"a run ended with {ended.code}"])
        ends.append(ended.result)
    first, second = ends
    wrong = judged(first)
    if first["sha256"] != second["sha256"]:
        wrong.append(f"two runs of the same seed ended at {first['sha256'][:12]} and {second['sha256'][:12]}")
    return Outcome("flat, and the same bits again", wrong, first["steps"], first)


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


def soaked(_: Any, method: str, seed: int, share: float) -> dict[str, Any]:
    """One run, in float32: its curves, the digest of its end, and its loss."""
    torch.manual_seed(seed)
    model = dense((4, 10, 1), torch.float32)
    data = data_of(400, 4, 1, torch.float32)
    sets = sets_of(method, data, seed, batch_size=500, fraction=0.1)
    optimizer = small(method, model, seed=seed)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch[0])
        return F.mse_loss(z, batch[1]), z

    steps = max(2, round(share * STEPS[method]))
    every = max(1, steps // POINTS)
    curves: dict[str, list[Any]] = {"at": [], "resident": [], "descriptors": [], "threads": []}
    directory = Path(f"/proc/{os.getpid()}")
    losses = []
    with tempfile.TemporaryDirectory() as kept:
        for step in range(steps):
            losses.append(optimizer.step(closure, sets).loss)
            if (step + 1) % every == 0:
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
