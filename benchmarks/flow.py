"""Seconds and peak memory of a step of ``GaussNewtonFlow(rows=m)`` against n and m, each point in its own process.

Letters: n parameters, m rows that the sketch has (some more than were asked for, where a small term is given its
share), J [m, n] the sketch, K = JJᵀ [m, m].

Seconds are those of the processor, with one thread: they do not run while others have the core. A step is cut into
parts, each without those inside it; its candidates are counted as if ``CANDIDATES`` had been looked at, since their
number depends on the problem and not on its size. Memory is resident at the peak, above that of a step with one row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.growth import RETURNING, exponent, peak_bytes
from benchmarks.ranks import on_ranks

CANDIDATES = 3  # what a step looks at whose length stays as it is
N_SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
M_SIZES = (100, 200, 400, 800, 1_600)
RANKED_SIZES = (1_000, 10_000, 100_000)  # on two ranks
ROWS, PARAMETERS = 400, 8_000  # of the sweeps over n and over m
POINTS, MORE_POINTS, BOUNDARY = 1_500, 3_000, 200  # more where up to 1,600 rows are drawn
PARTS = ("gradient", "rows", "factors", "steps", "candidates")


def poisson(
    n: int, points: int, ranks: int = 1
) -> tuple[nn.Module, Callable[[], tuple[Tensor, tuple[Tensor, Tensor]]]]:
    """Poisson's equation in the unit square by a tanh network of three hidden layers and about n parameters, float64.

    Its residuals are inside and on the boundary; the loss is the sum of their mean squares. A rank has its share.
    """
    points, boundary = points // ranks, BOUNDARY // ranks
    width = max(1, round((math.sqrt(36 + 8 * (n - 1)) - 6) / 4))  # n = 2w² + 6w + 1
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (2, width, width):
        layers += [nn.Linear(inputs, width), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(width, 1)).double()
    inside = torch.rand(points, 2, dtype=torch.float64)
    edge = torch.rand(boundary, 2, dtype=torch.float64)
    edge[torch.arange(boundary), torch.arange(boundary) % 2] = (torch.arange(boundary) // 2 % 2).double()
    source = -2 * math.pi**2 * torch.sin(math.pi * inside).prod(1)

    def closure() -> tuple[Tensor, tuple[Tensor, Tensor]]:
        at = inside.detach().requires_grad_(True)
        (du,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
        second = [torch.autograd.grad(du[:, i].sum(), at, create_graph=True)[0][:, i] for i in range(2)]
        terms = second[0] + second[1] - source, model(edge)[:, 0]
        return terms[0].square().mean() + terms[1].square().mean(), terms

    return model, closure


class Parts:
    """Seconds of the processor by part, each without the parts inside it; and the rows of the last sketch."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.rows = 0
        self._inside = [0.0]  # of each part under way, what is not its own

    def timed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, on the clock."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            start = time.process_time()
            result = original(*args, **kwargs)
            whole = time.process_time() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + whole - self._inside.pop()
            self._inside[-1] += whole
            if name == "rows":
                self.rows = len(result.rho)
            return result

        return call


@contextlib.contextmanager
def parts_of_steps() -> Iterator[Parts]:
    """The parts of every step inside."""
    from krylov_descent.flow.factored import Factored
    from krylov_descent.flow.sketch import Sketcher
    from krylov_descent.flow.step import Flow
    from krylov_descent.objective.objective import Objective

    parts = Parts()
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in (
            (Objective, "value_and_gradient", "gradient"),
            (Sketcher, "draw", "rows"),
            (Factored, "_factors", "factors"),
            (Flow, "__init__", "steps"),
            (Flow, "descend", "candidates"),
        ):
            original = getattr(owner, attribute)
            stack.callback(setattr, owner, attribute, original)
            setattr(owner, attribute, parts.timed(name, original))
        yield parts


def one(n: int, rows: int, points: int, steps: int) -> dict[str, Any]:
    """Medians over steps, after two that have checks of their own."""
    from krylov_descent import GaussNewtonFlow
    from krylov_descent.distributed.launch import init_process_group

    group = init_process_group("gloo")
    model, closure = poisson(n, points, 1 if group is None else group.size())
    optimizer = GaussNewtonFlow(model.parameters(), rows=rows, process_group=group)
    found: list[dict[str, float]] = []
    evaluations = []
    for step in range(2 + steps):
        with parts_of_steps() as parts:
            start = time.process_time()
            report = optimizer.step(closure)
            whole = time.process_time() - start
        if step < 2:
            continue
        evaluations.append(report.inner_evaluations)
        other = whole - sum(parts.seconds.values())
        parts.seconds["candidates"] *= CANDIDATES / report.inner_evaluations
        found.append({**parts.seconds, "other": other, "seconds": sum(parts.seconds.values()) + other})
    return {
        "n": sum(p.numel() for p in model.parameters()),
        "m": parts.rows,
        "points": points,
        **{name: statistics.median(each[name] for each in found) for name in found[0]},
        "evaluations": statistics.median(evaluations),
    }


def memory_of_one(n: int, rows: int, points: int) -> dict[str, int]:
    """The peak of a step above that of one with a row for each term, which comes first."""
    from krylov_descent import GaussNewtonFlow

    model, closure = poisson(n, points)
    peaks = []
    for asked in (1, rows):
        optimizer = GaussNewtonFlow(model.parameters(), rows=asked)
        optimizer.step(closure)
        with parts_of_steps() as parts:
            optimizer.step(closure)  # by now there is a previous one
        peaks.append(peak_bytes())
    n = sum(p.numel() for p in model.parameters())
    return {"n": n, "m": parts.rows, "mn": n * parts.rows, "bytes": peaks[1] - peaks[0]}


def point(**arguments: int) -> dict[str, Any]:
    """``one`` in a new process; without ``steps`` ``memory_of_one``, where freed blocks are given back at once."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.flow", *(f"--{name}={value}" for name, value in arguments.items())],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **({} if "steps" in arguments else RETURNING)},
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def on_two(n: int, points: int, steps: int) -> dict[str, float]:
    """Seconds of a step: of the processor on each of two ranks, and on one."""
    flags = [f"--n={n}", f"--rows={ROWS}", f"--points={points}", f"--steps={steps}"]
    one, two = (on_ranks(R, ["benchmarks.flow", *flags], for_memory=False)[0] for R in (1, 2))
    return {"n": one["n"], "one": one["seconds"], "two": two["seconds"], "two ÷ one": two["seconds"] / one["seconds"]}


def copies(points: Sequence[Mapping[str, float]]) -> float:
    """Float64 numbers for each of J's: the slope of memory over m·n."""
    return statistics.linear_regression([p["mn"] for p in points], [p["bytes"] for p in points]).slope / 8


def measure(*, quick: bool) -> dict[str, Any]:
    """Both sweeps, memory at the same sizes, and what was fitted."""
    n_sizes, m_sizes = (N_SIZES[:3], M_SIZES[:3]) if quick else (N_SIZES, M_SIZES)
    steps = 3 if quick else 5
    by_n = [point(n=n, rows=ROWS, points=POINTS, steps=steps) for n in n_sizes]
    by_m = [point(n=PARAMETERS, rows=m, points=MORE_POINTS, steps=steps) for m in m_sizes]
    memory = {
        "n": [point(n=n, rows=ROWS, points=POINTS) for n in n_sizes],
        "m": [point(n=PARAMETERS, rows=m, points=MORE_POINTS) for m in m_sizes],
    }
    return {
        "n": by_n,
        "m": by_m,
        "memory": memory,
        "exponents": {
            f"{name} over {x}{said}": exponent(points[start:], x, name)
            for x, points in (("n", by_n), ("m", by_m))
            for said, start in (("", 0), (", from the third", 2))
            for name in ("seconds", *PARTS)
            if len(points[start:]) > 1
        },
        "ranks": [on_two(n, MORE_POINTS, steps) for n in (RANKED_SIZES[:2] if quick else RANKED_SIZES)],
        "copies of J": {x: copies(points) for x, points in memory.items()},
    }


def main() -> None:
    """One point, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("n", "rows", "points"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--steps", type=int, help="to be timed; without, memory is measured")
    arguments = vars(parser.parse_args())
    torch.set_num_threads(1)
    steps = arguments.pop("steps")
    found = memory_of_one(**arguments) if steps is None else one(**arguments, steps=steps)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
