"""Memory, bytes and seconds of a step on R ranks, against the formulas of docs/appendix/scale.md.

Each point is a group of processes of its own, one thread each. Memory is a rank's resident peak; its slope over P
counts vectors, as batches are too small to count. Bytes are those that the collectives count, and those that the
loopback device carried. Processor seconds, of a rank, tell something even where ranks or other work outnumber the
cores. ``python -m benchmarks.ranks --plan`` extrapolates to sizes that were not run.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.growth import RETURNING, peak_bytes
from benchmarks.timing import Ratio, ratio, spread

Found = dict[str, Any]
RANKS = (1, 2, 4)
ROOT = Path(__file__).parent.parent
VARIANTS: Found = {
    "plain": {},
    "wire=bfloat16": {"wire": torch.bfloat16},
}
# Parameters and samples of what is timed. In the first, collectives cost what they cost without bytes.
SIZES = ((10_000, 2_000), (1_000_000, 1_000), (1_000_000, 4_000))
_REPORTED = ("inner_iterations", "inner_evaluations", "bytes_sent", "accepted")
# The step of the plan: K = 20, and 20 iterations.
PLANNED = {"rows": 21, "lines": 20, "iterations": 20}


def formula_vectors(K: int, R: int, P: float = 1e12, storage: torch.dtype | None = None) -> float:
    """Float32 vectors of P numbers that a rank holds at the peak of a step, its parameters included.

    For large P these are (K + 3)/R + 5, and one more where R > 1.
    """
    from krylov_descent import KSD, Storage
    from krylov_descent.checking import memory_of

    parameters = [torch.nn.Parameter(torch.empty(int(P), device="meta"))]
    optimizer = KSD(parameters, krylov_dim=K, storage=Storage(dtype=storage))
    return memory_of(optimizer, ranks=R).total / (4 * P)


def formula_bytes(P: float, R: int, itemsize: int, *, rows: int, lines: int, iterations: int, wire: int = 0) -> float:
    """Bytes that a rank sends in a step that undoes none.

    Rows, products, g, D, ∇f on C and where each line ends, in ``wire`` bytes a number where given; each line, the step.
    """
    narrow = (2 * rows + iterations + 3) * (wire or itemsize)
    return (narrow + (lines + 1) * itemsize) * P * (R - 1) / R


def all_reduce_bytes(P: int, R: int, itemsize: int, *, rows: int, evaluations: int) -> float:
    """Bytes of ranks that hold everything whole and all-reduce g, D, every product and the gradient of every trial."""
    return (rows + evaluations + 2) * 2 * itemsize * P * (R - 1) / R


def _loopback(group: Any) -> int:
    """Bytes that the loopback device has carried when all ranks are here."""
    if group is not None:
        torch.distributed.barrier()
    devices = Path("/proc/net/dev").read_text().splitlines()
    return next((int(line.split()[9]) for line in devices if line.split()[0] == "lo:"), 0)


@contextmanager
def _watching(seen: Found) -> Iterator[None]:
    """Count in ``seen``: lines of the search, collectives, and by phase seconds, bytes and collectives."""
    from krylov_descent.distributed.process_group import GroupComm
    from krylov_descent.krylov.search import LineEvaluator
    from krylov_descent.stepping.step_log import StepLog

    def counting(what: str, function: Any) -> Any:
        def counted(*args: Any, **keywords: Any) -> None:
            seen[what] += 1
            function(*args, **keywords)

        return counted

    class Metered(StepLog):
        def __init__(self, comm: Any) -> None:
            super().__init__(comm)
            self._before = self._now()

        def _now(self) -> dict[str, float]:
            return {"processor": time.process_time(), "sent": seen["comm"].sent, "calls": seen["calls"]}

        def lap(self, phase: str) -> None:
            super().lap(phase)
            before, self._before = self._before, self._now()
            spent = {key: value - before[key] for key, value in self._before.items()}
            seen["phases"][phase] = {**spent, "seconds": self.seconds[phase]}

    with (
        mock.patch("krylov_descent.krylov.step.StepLog", Metered),
        mock.patch.object(LineEvaluator, "begin", counting("lines", LineEvaluator.begin)),
        mock.patch.object(GroupComm, "_call", counting("calls", GroupComm._call)),
    ):
        yield


def one(P: int, K: int, N: int, batch_size: int, steps: int, variants: str) -> Found:
    """Steps of a sigmoid network of about P parameters with two equal hidden layers, on N samples.

    Variants take turns, each with a network of its own. The first step of each, which checks more, is left out.
    """
    from benchmarks.problems import Problem, dense
    from krylov_descent import KSD, Subsets
    from krylov_descent.distributed import Ranks
    from krylov_descent.distributed.launch import init_process_group
    from krylov_descent.krylov.subspace import BasisBuffer

    torch.set_num_threads(1)
    group = init_process_group("gloo")
    width = round(((110**2 + 4 * P) ** 0.5 - 110) / 2)
    torch.manual_seed(0)
    model = dense((100, width, width, 10))
    x, y = torch.randn(N, 100), torch.randint(10, (N,))
    sets = Subsets((x, y), batch_size=batch_size, seed=0)
    runs: dict[str, tuple[Problem, KSD]] = {}
    for name in variants.split(","):
        problem = Problem(name, copy.deepcopy(model) if runs else model, torch.nn.CrossEntropyLoss(), x, y)
        ranks = Ranks(group, **VARIANTS[name])
        runs[name] = problem, KSD(problem.model.parameters(), krylov_dim=K, process_group=ranks)
    found: Found = {"P": sum(p.numel() for p in model.parameters()), "steps": {name: [] for name in runs}}
    seen: Found = {"calls": 0}
    with _watching(seen):
        for turn, (name, (problem, optimizer)) in itertools.product(range(steps + 1), runs.items()):
            seen.update(comm=optimizer._comm, lines=0, phases={})
            before = _loopback(group)
            report = optimizer.step(problem.closure, sets)
            step = {"rows": len(report.ritz_values), "loopback": _loopback(group) - before}
            step |= {"lines": seen["lines"], "phases": seen["phases"], **{x: getattr(report, x) for x in _REPORTED}}
            found["steps"][name] += [step] if turn else []
    V = next(iter(runs.values()))[1]._workspace.of(BasisBuffer).V
    found["basis"] = 0 if V is None else V._buffer.nbytes
    found["peak"] = peak_bytes()
    return found


def point(R: int, *, for_memory: bool = False, variants: str = "plain", **arguments: int) -> list[Found]:
    """``one`` on R new processes: what each of them found."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in arguments.items()]
    return on_ranks(R, ["benchmarks.ranks", f"--variants={variants}", *flags], for_memory=for_memory)


def on_ranks(R: int, module: Sequence[str], *, for_memory: bool) -> list[Found]:
    """A module with arguments on R new processes: what each of them printed last, in JSON."""
    command = [sys.executable, "-m", *module]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(RETURNING if for_memory else {})}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    processes = []
    for rank in range(R):
        own = {**env, **address, "RANK": str(rank), "WORLD_SIZE": str(R)} if R > 1 else env
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=own))
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"A rank of {command} ended with an error; its message is above.")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def vectors(K: int, R: int, P_sizes: Sequence[int], steps: int = 2) -> tuple[float, list[list[Found]]]:
    """Float32 vectors of P numbers at the peak, the largest over ranks: the slope of memory over P; and the points."""
    points = [point(R, for_memory=True, P=P, K=K, N=4 * K, batch_size=2, steps=steps) for P in P_sizes]
    ys = [max(rank["peak"] for rank in ranks) / 4 for ranks in points]
    return statistics.linear_regression([ranks[0]["P"] for ranks in points], ys).slope, points


def byte_ratios(found: Found, R: int, variant: str = "plain", wire: int = 0) -> dict[str, Ratio]:
    """Counted bytes against the formula, the loopback device and ranks that all-reduce, over steps that undo none."""
    ratios: dict[str, list[float]] = {"counted ÷ formula": [], "loopback ÷ counted": [], "counted ÷ all-reduce": []}
    for step in (step for step in found["steps"][variant] if step["accepted"]):
        counts = {"rows": step["rows"], "lines": step["lines"], "iterations": step["inner_iterations"]}
        others = all_reduce_bytes(found["P"], R, 4, rows=step["rows"], evaluations=step["inner_evaluations"])
        ratios["counted ÷ formula"].append(step["bytes_sent"] / formula_bytes(found["P"], R, 4, wire=wire, **counts))
        ratios["loopback ÷ counted"].append(step["loopback"] / (R * step["bytes_sent"]))
        ratios["counted ÷ all-reduce"].append(step["bytes_sent"] / others)
    return {name: spread(values or [float("nan")]) for name, values in ratios.items()}


def _phases(step: Found, what: str) -> dict[str, float]:
    """By phase, of a step with 20 evaluations in its search: how many it takes is not a matter of ranks."""
    found = {name: phase[what] for name, phase in step["phases"].items()}
    return {**found, "search": found["search"] * 20 / step["inner_evaluations"]}


def _median(found: Found, what: str) -> torch.Tensor:
    steps = [[*_phases(step, what).values()] for step in found["steps"]["plain"]]
    return torch.tensor(steps, dtype=torch.float64).median(0).values


def seconds(timed: Mapping[tuple[int, int, int], Found]) -> Found:
    """Processor seconds of a rank by phase, against t(1)/R + β·bytes + λ·collectives; β and λ are fitted to all."""
    costs = {key: [_median(found, what) for what in ("processor", "sent", "calls")] for key, found in timed.items()}
    shared = {(P, N, R): costs[P, N, 1][0] / R for P, N, R in costs}
    rows = [torch.stack([c[1], c[2], c[0] - shared[key]]) / c[0] for key, c in costs.items() if key[2] > 1]
    *regressors, excess = torch.cat(rows, dim=1)  # divided by what was measured: relative errors count
    beta, latency = torch.linalg.lstsq(torch.stack(regressors, dim=1), excess[:, None]).solution[:, 0].tolist()
    shown: Found = {"nanoseconds a byte": beta * 1e9, "microseconds a collective": latency * 1e6}
    for (P, N, R), (here, sent, calls) in costs.items():
        modelled = shared[P, N, R] + beta * sent + latency * calls
        pairs = zip(("gradient", "basis", "search"), here, modelled, strict=True)
        texts = [f"{name} {a:.2f} ({b:.2f})" for name, a, b in [*pairs, ("step", here.sum(), modelled.sum())]]
        clock = f"{_median(timed[P, N, R], 'seconds').sum():.2f} by the clock, {calls.sum():.0f} collectives"
        shown[f"P={P:,}, N={N:,}, R={R}"] = ", ".join([*texts, clock])
    P, N = SIZES[-1]
    pace = float(costs[P, N, 1][0].sum()) / (P * N)
    shown["nanoseconds a sample and parameter, R=1"] = pace * 1e9
    shown["two ranks pay from this N, P large"] = 2 * beta * formula_bytes(1, 2, 4, **PLANNED) / pace
    shown["two ranks pay from this N·P, P small"] = 2 * latency * float(costs[P, N, 2][2].sum()) / pace
    return shown


def compared(found: Found) -> dict[str, Ratio]:
    """Each option ÷ plain, of steps that were taken in turn."""
    ratios = {}
    for name, what in itertools.product([*VARIANTS][1:], ("processor", "seconds")):
        times = {of: [sum(_phases(step, what).values()) for step in found["steps"][of]] for of in ("plain", name)}
        ratios[f"{name}, {what} ÷ plain"] = ratio(times[name], times["plain"])
    return ratios


def measure(quick: bool) -> Found:
    """Memory, bytes, seconds and what the options of ``Ranks`` cost."""
    sizes, steps = ((1_000_000, 3_000_000), 2) if quick else ((1_000_000, 3_000_000, 10_000_000), 5)
    v = {(K, R): vectors(K, R, sizes)[0] for K in (5, 20) for R in RANKS}

    def timing(P: int, N: int, R: int, variants: str = "plain") -> Found:
        return point(R, variants=variants, P=P, K=20, N=N, batch_size=1_000, steps=steps)[0]

    timed = {(P, N, R): timing(P, N, R) for P, N in SIZES for R in RANKS}
    turns = {R: timing(*SIZES[1], R, ",".join(VARIANTS)) for R in RANKS}
    narrow = [byte_ratios(turns[R], R, "wire=bfloat16")["counted ÷ formula"] for R in RANKS[1:]]
    return {
        "vectors (formula)": {f"K={K}, R={R}": f"{x:.2f} ({formula_vectors(K, R):.2f})" for (K, R), x in v.items()},
        "vectors for each row of V": {f"R={R}": (v[20, R] - v[5, R]) / 15 for R in RANKS},
        "bytes": {f"R={R}": byte_ratios(timed[(*SIZES[1], R)], R) for R in RANKS[1:]},
        "processor seconds of a rank (model)": seconds(timed),
        "options": {f"R={R}": compared(found) for R, found in turns.items()},
        "wire=bfloat16, bytes ÷ plain": dict(zip(RANKS[1:], narrow, strict=True)),
    }


def extrapolated(P: float, N: float, R: int) -> tuple[float, float]:
    """Seconds a device computes and sends, by the assumptions of docs/appendix/scale.md."""
    m, E, I = PLANNED["rows"], 25, PLANNED["iterations"]
    gradients = N * (1.4 + (1.23 * m + 1 + E) / (m - 1))  # measured: docs/appendix/speed.md
    V = 4 * P / R * m * (2.5 * m + 2 * I + 2)  # bytes of V read: Gram–Schmidt and H̄; the search
    sent = formula_bytes(P, R, 4, **PLANNED)
    return 6 * P * gradients / (R * 4e14) + V / 3e12, sent / (3e11 if R <= 8 else 4e10)


def plan() -> str:
    """The table of what was not run, in Markdown."""
    sizes = (1e6, 1e7, 1e8, 1e9)
    table = [["P", "R", "GB", "GB, bf16 V", *(f"N = {N:.0e}" for N in sizes)], ["---"] * 8]
    for P, R in itertools.product((1e8, 1e9, 7e9), (8, 64, 1024)):
        gigabytes = [f"{4 * P * formula_vectors(20, R, P, V) / 1e9:.3g}" for V in (None, torch.bfloat16)]
        steps = [extrapolated(P, N, R) for N in sizes]
        shares = [f"{a + b:.3g} s ({100 * b / (a + b):.0f} %)" for a, b in steps]
        table.append([f"{P:.0e}", f"{R:,}", *gigabytes, *shares])
    return "\n".join(f"| {' | '.join(line)} |" for line in table).replace("e+0", "e")


def _main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("P", "K", "N", "batch-size", "steps"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--variants", default="plain", help="to be run in turn: " + ", ".join(VARIANTS))
    parser.add_argument("--plan", action="store_true", help="print the extrapolated table of docs/appendix/scale.md")
    arguments = vars(parser.parse_args())
    sys.stdout.write((plan() if arguments.pop("plan") else json.dumps(one(**arguments))) + "\n")


if __name__ == "__main__":
    _main()
