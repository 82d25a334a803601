"""Seconds and peak memory of a step against P, K and N, each point in a process of its own.

Seconds are those of a step with 20 evaluations in its search: the time of one evaluation is measured, their number,
which depends on the problem and not on its size, is not. Memory is resident at the peak. Batches for memory are so
small that activations and graphs do not count beside vectors of P numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

EVALUATIONS = 20
P_SIZES = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000)
K_SIZES = (5, 10, 20, 50, 100)
N_SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000)
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
_INPUTS, _OUTPUTS = 100, 10


def peak_bytes() -> int:
    """Resident memory of this process at its peak."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss begins with what the parent held
        return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one(P: int, K: int, N: int, batch_size: int, steps: int) -> dict[str, float]:
    """A tanh network of about P parameters with two equal hidden layers, on N samples."""
    from benchmarks.problems import Problem, dense
    from krylov_descent import KSD, Subsets

    width = round((math.sqrt((_INPUTS + _OUTPUTS) ** 2 + 4 * P) - _INPUTS - _OUTPUTS) / 2)
    torch.manual_seed(0)
    model = dense((_INPUTS, width, width, _OUTPUTS))
    problem = Problem("", model, torch.nn.CrossEntropyLoss(), torch.randn(N, _INPUTS), torch.randint(_OUTPUTS, (N,)))
    optimizer = KSD(model.parameters(), krylov_dim=K)
    sets = Subsets((problem.x, problem.y), batch_size=batch_size, seed=0)
    optimizer.step(problem.closure, sets)
    seconds = []
    for _ in range(steps):
        report = optimizer.step(problem.closure, sets)
        spent = report.seconds
        per_evaluation = spent["search"] / report.inner_evaluations
        seconds.append(spent["gradient"] + spent["basis"] + EVALUATIONS * per_evaluation)
    peak = peak_bytes()
    return {
        "P": sum(p.numel() for p in model.parameters()),
        "K": K,
        "N": N,
        "seconds": statistics.median(seconds),
        "bytes": peak,
    }


def point(*, for_memory: bool = False, **arguments: int) -> dict[str, float]:
    """``one`` in a new process; for its memory, with an allocator that gives every block back at once."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.growth", *flags],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, **(RETURNING if for_memory else {})},
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def exponent(points: Sequence[Mapping[str, float]], x: str, y: str) -> float:
    """The slope of log y over log x."""
    xs, ys = [math.log(p[x]) for p in points], [math.log(p[y]) for p in points]
    return statistics.linear_regression(xs, ys).slope


def vectors(points: Sequence[Mapping[str, float]]) -> float:
    """Bytes per parameter and float32: the slope of memory over P."""
    return statistics.linear_regression([p["P"] for p in points], [p["bytes"] for p in points]).slope / 4


def measure(*, quick: bool) -> dict[str, Any]:
    """All sweeps, their exponents, and c of (K + c)·P·4 bytes."""
    P_sizes = P_SIZES[:4] if quick else P_SIZES
    steps = 2 if quick else 3
    by_P = [point(P=P, K=20, N=2_000, batch_size=500, steps=steps) for P in P_sizes]
    by_K = [
        point(P=1_000_000, K=K, N=10_000, batch_size=1_000, steps=steps) for K in (K_SIZES[:3] if quick else K_SIZES)
    ]
    by_N = [point(P=60_000, K=20, N=N, batch_size=1_000, steps=steps) for N in (N_SIZES[:3] if quick else N_SIZES)]
    memory = {
        K: [point(P=P, K=K, N=4 * K, batch_size=2, steps=2, for_memory=True) for P in P_sizes[-3:]] for K in (5, 20)
    }
    return {
        "P": by_P,
        "K": by_K,
        "N": by_N,
        "memory": memory,
        "exponents": {
            "seconds over P": exponent(by_P, "P", "seconds"),
            "seconds over P, from 1e6": exponent(by_P[2:], "P", "seconds"),
            "seconds over K": exponent(by_K, "K", "seconds"),
            "seconds over N": exponent(by_N, "N", "seconds"),
        },
        "c": {K: vectors(points) - K for K, points in memory.items()},
    }


def main() -> None:
    """One point, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("P", "K", "N", "batch-size", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    arguments = parser.parse_args()
    sys.stdout.write(
        json.dumps(one(arguments.P, arguments.K, arguments.N, arguments.batch_size, arguments.steps)) + "\n"
    )


if __name__ == "__main__":
    main()
