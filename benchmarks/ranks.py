"""Memory, bytes and seconds of a step on R ranks, against the formulas of docs/scaling.md.

Each point is a group of processes of its own, one thread each. Memory is a rank's resident peak, and its slope over P
counts vectors of P numbers; batches are so small that activations do not count. Bytes are those that the collectives
count, and, for the whole machine, those that its loopback device has carried.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.growth import _RETURNING

RANKS = (1, 2, 4)


def formula_vectors(K: int, R: int) -> float:
    """Vectors of P numbers that a rank holds at the peak of a step, its parameters included.

    In the basis: parts of V, g (which products overwrite), D, d_prev and the point before it; whole: parameters, the row
    to be multiplied, its product by autograd and the sum of those. In the search: parts of V, θ, d_prev and the point
    before it; whole: parameters, origin and direction of the line, the gradient by autograd and the sum of those.
    """
    return max((K + 1 + 4) / R + 4, (K + 1 + 3) / R + 5)


def formula_bytes(P: int, R: int, itemsize: int, *, rows: int, iterations: int) -> float:
    """Bytes that a rank sends in a step that undoes none: products, lines, and g, D, ∇f on C and the step itself."""
    return (2 * rows + 2 * iterations + 4) * itemsize * P * (R - 1) / R


def all_reduce_bytes(P: int, R: int, itemsize: int, *, rows: int, evaluations: int) -> float:
    """Bytes of ranks that hold everything whole and all-reduce g, D, every product and the gradient of every trial."""
    return (rows + evaluations + 2) * 2 * itemsize * P * (R - 1) / R


def _loopback() -> int:
    """Bytes that the loopback device has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return 0


def one(P: int, K: int, N: int, batch_size: int, steps: int, reproducible: int, wire: str) -> dict[str, Any]:
    """Steps of a tanh network of about P parameters with two equal hidden layers, on N samples."""
    from benchmarks.problems import Problem, dense
    from krylov_descent import KSD, Subsets
    from krylov_descent.distributed import Ranks
    from krylov_descent.distributed.launch import init_process_group

    torch.set_num_threads(1)
    group = init_process_group("gloo")
    inputs, outputs = 100, 10
    width = round((((inputs + outputs) ** 2 + 4 * P) ** 0.5 - inputs - outputs) / 2)
    torch.manual_seed(0)
    model = dense((inputs, width, width, outputs))
    problem = Problem("", model, torch.nn.CrossEntropyLoss(), torch.randn(N, inputs), torch.randint(outputs, (N,)))
    ranks = Ranks(group, reproducible=reproducible, wire=getattr(torch, wire) if wire else None)
    optimizer = KSD(model.parameters(), krylov_dim=K, process_group=ranks)
    sets = Subsets((problem.x, problem.y), batch_size=batch_size, seed=0)
    found: dict[str, Any] = {"P": sum(p.numel() for p in model.parameters()), "K": K, "N": N, "steps": []}
    for _ in range(steps):
        if group is not None:
            torch.distributed.barrier()
        before = _loopback()
        report = optimizer.step(problem.closure, sets)
        if group is not None:
            torch.distributed.barrier()
        found["steps"].append(
            {
                "rows": len(report.ritz_values),
                "iterations": report.inner_iterations,
                "evaluations": report.inner_evaluations,
                "accepted": report.accepted,
                "sent": report.bytes_sent,
                "loopback": _loopback() - before,
                "seconds": dict(report.seconds),
            }
        )
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found["rank"] = 0 if group is None else group.rank()
    return found


def point(R: int, *, for_memory: bool = False, **arguments: int | str) -> list[dict[str, Any]]:
    """``one`` on R new processes: what each of them found."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()]
    command = [sys.executable, "-m", "benchmarks.ranks", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(_RETURNING if for_memory else {})}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(R):
        joined = {"RANK": str(rank), "WORLD_SIZE": str(R), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        processes.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parent.parent,
                env={**env, **(joined if R > 1 else {})},
            )
        )
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"A rank of {command} ended with an error; its message is above.")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def vectors(points: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """Float32 vectors of P numbers at the peak, the largest over ranks: the slope of memory over P."""
    xs = [ranks[0]["P"] for ranks in points]
    ys = [max(rank["peak"] for rank in ranks) / 4 for ranks in points]
    return statistics.linear_regression(xs, ys).slope


def _main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("P", "K", "N", "batch-size", "steps", "reproducible"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--wire", default="")
    print(json.dumps(one(**vars(parser.parse_args()))))


if __name__ == "__main__":
    _main()
