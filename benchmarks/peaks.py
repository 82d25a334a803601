"""Measured peaks of a step against ``memory_of``: python -m benchmarks.peaks [--quick].

Each point is a group of new processes, one thread each, whose allocator gives freed blocks back at once. What a small
problem of the same kind has loaded is not counted; what is measured is the largest over ranks.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.growth import peak_bytes
from benchmarks.problems import dense
from benchmarks.ranks import RANKS, Found, on_ranks

METHODS = ("KSD", "DEEP", "GaussNewtonFlow")
SIZES = (1_000_000, 3_000_000, 10_000_000)
FLOW_SIZES = (30_000, 100_000, 300_000)  # with 400 rows, 100,000 parameters take as much as DEEP's 1e7


def network(method: str, P: int) -> nn.Module:
    """A network of about P parameters: for DEEP eight equal layers, else one that has nearly all of them."""
    if method == "DEEP":
        return dense(tuple([round(math.sqrt(P / 8))] * 9))
    width = round((math.sqrt(110**2 + 4 * P) - 110) / 2)
    model = dense((100, width, width, 10))
    return model.double() if method == "GaussNewtonFlow" else model


def problem(method: str, P: int, group: Any) -> tuple[Any, Any, Any, Any]:
    """The optimizer, the closure, the sets and a micro-batch as large as B of a rank."""
    from krylov_descent import Growing, Subsets

    model = network(method, P)
    weights = [p for p in model.parameters() if p.ndim == 2]
    first, last = weights[0], weights[-1]
    n = 64 if method == "DEEP" else 400  # 64 are the fewest samples of B in growing sets
    x, y = torch.randn(n, first.shape[1], dtype=first.dtype), torch.randint(len(last), (n,))
    ranks = 1 if group is None else group.size()

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch[0])
        if method == "GaussNewtonFlow":
            z = z[:, 0]
            return z.square().mean(), z
        return nn.functional.cross_entropy(z, batch[1]), z

    optimizer = optimizer_of(method, list(model.parameters()), group)
    if method == "DEEP":
        sets = Growing((x, y), batch_size=16, start=n, seed=0)
        return optimizer, closure, sets, (x[: 64 // ranks], y[: 64 // ranks])
    if method == "KSD":
        return optimizer, closure, Subsets((x, y), batch_size=20, seed=0), (x[: 20 // ranks], y[: 20 // ranks])
    return optimizer, closure, Subsets((x, y), batch_size=10, fraction=0.5, seed=0), (x[:10], y[:10])


def optimizer_of(method: str, params: list[Tensor], group: Any) -> Any:
    """The optimizer of a method."""
    from krylov_descent import DEEP, KSD, GaussNewtonFlow, Kronecker, ModelSearch

    search = ModelSearch()
    object.__setattr__(search, "agreement", math.inf)  # a step that takes the model's minimum has two vectors less
    fleeting = Kronecker(memory=0.5)  # a step that keeps the inverses has them once
    if method == "GaussNewtonFlow":
        return GaussNewtonFlow(params, rows=100, process_group=group)
    settings: Any = {**DEEP, "search": search, "preconditioner": fleeting} if method == "DEEP" else {}
    return KSD(params, **settings, process_group=group)


def one(method: str, P: int, steps: int) -> Found:
    """The peak of some steps, and the figure, of this rank."""
    from krylov_descent.checking import memory_of
    from krylov_descent.distributed.launch import init_process_group

    torch.set_num_threads(1)
    group = init_process_group("gloo")
    torch.manual_seed(0)
    _steps(method, P // 5, 2, group)  # loads code, and makes the buffers of matrix products
    gc.collect()
    before = _resident()
    optimizer, closure, batch, rows = _steps(method, P, steps, group)
    peak, ranks = peak_bytes() - before, 1 if group is None else group.size()
    figure = memory_of(optimizer_of(method, optimizer.trained(), None), closure, batch, ranks=ranks)
    return {"P": optimizer.numel, "rows": rows, "peak": peak, "figure": figure.total, "phase": figure.phase}


def _steps(method: str, P: int, steps: int, group: Any) -> tuple[Any, Any, Any, int]:
    optimizer, closure, sets, batch = problem(method, P, group)
    reports = [optimizer.step(closure, sets) for _ in range(steps)]
    return optimizer, closure, batch, len(reports[-1].ritz_values)


def _resident() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def measure(quick: bool) -> Found:
    """All points; the ratio of measured to figure."""
    found = {}
    for method, R in itertools.product(METHODS, RANKS):
        sizes = FLOW_SIZES if method == "GaussNewtonFlow" else SIZES
        for P in sizes[:1] if quick else sizes:
            steps = 9 if method == "DEEP" else 3  # until DEEP has all earlier steps
            found[f"{method}, R={R}, P={P:,}"] = _row(method, R, P, steps)
    return found


def _row(method: str, R: int, P: int, steps: int) -> Found:
    flags = [f"--method={method}", f"--P={P}", f"--steps={steps}"]
    worst = max(on_ranks(R, ["benchmarks.peaks", *flags], for_memory=True), key=lambda rank: rank["peak"])
    return {**worst, "measured ÷ figure": worst["peak"] / worst["figure"]}


def main() -> None:
    """One point, as JSON, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", choices=METHODS, default=None)
    parser.add_argument("--P", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--R", type=int, default=0, help="one point on so many ranks")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.R:
        found = _row(arguments.method, arguments.R, arguments.P, arguments.steps)
    elif arguments.method:
        found = one(arguments.method, arguments.P, arguments.steps)
    else:
        found = measure(arguments.quick)
    sys.stdout.write(json.dumps(found, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
