"""Golden runs: θ, losses and report numbers after every step of some twenty small trainings.

    python -m tests.golden record FILE          run every configuration of the checkout on PYTHONPATH
    python -m tests.golden compare BASE HEAD    compare two such files, bit by bit

``.ci/same-bits BASE`` does both for two commits. Bits differ between machines, so no recording is kept in git. The
recorder runs against older checkouts, too, and speaks their spelling where names have changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import krylov_descent
from krylov_descent import DEEP, KSD, PAPER, Fisher, Growing, Kronecker, Search, Storage, Subsets

F64 = torch.float64
Closure = Callable[..., tuple[Tensor, Any]]
Trained = tuple[nn.Module, Any, Closure, Any]
Steps = list[dict[str, Any]]


@dataclass(frozen=True)
class Golden:
    """A configuration: ``make(group)`` returns model, optimizer, closure and sets."""

    make: Callable[[Any], Trained]
    steps: int
    ranks: int = 1


def data(n: int, inputs: int, outputs: int, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, inputs, generator=g, dtype=F64)
    return x.to(dtype), torch.sin(x @ torch.randn(inputs, outputs, generator=g, dtype=F64)).to(dtype)


def mlp(dtype: torch.dtype = F64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).to(dtype)


def regression(model: nn.Module) -> Closure:
    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        r = model(batch[0]) - batch[1]
        return r.square().mean(), r

    return closure


def classification(model: nn.Module) -> Closure:
    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch[0])
        return F.cross_entropy(z, batch[1]), z

    return closure


def images() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(128, 1, 8, 8, generator=g), torch.randint(0, 5, (128,), generator=g)


def quarter(dtype: torch.dtype = F64, batch_size: int = 37) -> Subsets:
    return Subsets(data(200, 6, 2, dtype), batch_size=batch_size, seed=3, fraction=0.25)


def paper(group: Any) -> Trained:
    model = mlp()
    return (
        model,
        KSD(model.parameters(), **{**PAPER, "krylov_dim": 5}, process_group=group),
        regression(model),
        quarter(),
    )


def default_float32(group: Any) -> Trained:
    model = mlp(torch.float32)
    sets = Subsets(data(200, 6, 2, torch.float32), batch_size=37, seed=3, fraction=0.1, gradient_fraction=0.5)
    return model, KSD(model.parameters(), krylov_dim=5, process_group=group), regression(model), sets


def decay_and_storage(group: Any) -> Trained:
    model = mlp()
    groups: list[dict[str, Any]] = [
        {"params": list(model[0].parameters()), "weight_decay": 1e-3},
        {"params": list(model[2].parameters())},
    ]
    storage = Storage(dtype=torch.float32)
    optimizer = KSD(groups, krylov_dim=5, storage=storage, memory_budget=100_000, process_group=group)
    return model, optimizer, regression(model), quarter()


def full_batch(curvature: Any) -> Callable[[Any], Trained]:
    def make(group: Any) -> Trained:
        model = mlp()
        search = Search(negative="absolute")
        optimizer = KSD(model.parameters(), krylov_dim=5, curvature=curvature, search=search, process_group=group)
        batch = data(60, 6, 2)
        return model, optimizer, lambda: regression(model)(batch), None

    return make


def precondition(preconditioner: Any) -> Callable[[Any], Trained]:
    def make(group: Any) -> Trained:
        model = mlp()
        optimizer = KSD(model.parameters(), krylov_dim=4, preconditioner=preconditioner, process_group=group)
        return model, optimizer, regression(model), quarter()

    return make


def convolution(group: Any) -> Trained:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    optimizer = KSD(model.parameters(), krylov_dim=4, process_group=group)
    return model, optimizer, classification(model), Subsets(images(), batch_size=32, seed=0, fraction=0.25)


def deep(group: Any) -> Trained:
    model = mlp()
    sets = Growing(data(900, 6, 2), batch_size=128, start=60, seed=0)
    return model, KSD(model.parameters(), **DEEP, process_group=group), regression(model), sets


def deep_convolution(group: Any) -> Trained:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 5)
    model = nn.Sequential(*layers)
    sets = Growing(images(), batch_size=32, start=32, seed=0)
    return model, KSD(model.parameters(), **DEEP, process_group=group), classification(model), sets


def flow(params: Any, group: Any, rows: int | None = None, **settings: Any) -> Any:
    """The sketched Gauss–Newton flow."""
    rows_if_any: dict[str, Any] = {} if rows is None else {"rows": rows}
    if hasattr(krylov_descent, "GaussNewtonFlow"):
        return krylov_descent.GaussNewtonFlow(params, process_group=group, **rows_if_any, **settings)
    older: Any = import_module("krylov_descent")
    return older.KSD(params, basis=older.Rational(**rows_if_any), process_group=group, **settings)


def flow_on_a_pinn(**settings: Any) -> Callable[[Any], Trained]:
    def make(group: Any) -> Trained:
        torch.manual_seed(0)
        layers = nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1)
        model = nn.Sequential(*layers).double()
        x = torch.linspace(0, 1, 60, dtype=F64)[:, None].requires_grad_(True)
        ends = torch.tensor([[0.0], [1.0]], dtype=F64)

        def closure() -> tuple[Tensor, tuple[Tensor, Tensor]]:
            u = model(x)
            (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (d2u,) = torch.autograd.grad(du.sum(), x, create_graph=True)
            r, b = d2u + torch.pi**2 * torch.sin(torch.pi * x), model(ends)
            return r.square().mean() + 100 * b.square().mean(), (r, b)

        return model, flow(model.parameters(), group, **settings), closure, None

    return make


def flow_on_sets(group: Any) -> Trained:
    model = mlp()
    return model, flow(model.parameters(), group, rows=30), regression(model), quarter()


def rival(name: str, **settings: Any) -> Callable[[Any], Trained]:
    def make(group: Any) -> Trained:
        try:
            methods = import_module("experiments.baselines")
        except ImportError:
            methods = import_module("krylov_descent.baselines")
        model = mlp()
        optimizer = getattr(methods, name)(model.parameters(), **settings)
        return model, optimizer, regression(model), quarter(batch_size=50)

    return make


GOLDEN = {
    "paper": Golden(paper, 6),
    "default, float32": Golden(default_float32, 12),
    "weight decay, storage, memory budget": Golden(decay_and_storage, 5),
    "full batch, Hessian": Golden(full_batch("hessian"), 5),
    "full batch, Fisher curvature": Golden(full_batch("fisher"), 5),
    "no preconditioner": Golden(precondition(None), 5),
    "Fisher preconditioner": Golden(precondition(Fisher()), 5),
    "Kronecker preconditioner": Golden(precondition(Kronecker()), 8),
    "convolution, cross-entropy": Golden(convolution, 5),
    "DEEP": Golden(deep, 150),
    "DEEP, convolution": Golden(deep_convolution, 30),
    "flow on a PINN": Golden(flow_on_a_pinn(rows=20), 40),
    "flow on all rows, weight decay": Golden(flow_on_a_pinn(weight_decay=1e-8), 10),
    "flow on sets": Golden(flow_on_sets, 8),
    "paper, two ranks": Golden(paper, 6, ranks=2),
    "default, float32, two ranks": Golden(default_float32, 12, ranks=2),
    "Fisher preconditioner, two ranks": Golden(precondition(Fisher()), 5, ranks=2),
    "DEEP, two ranks": Golden(deep, 40, ranks=2),
    "flow on sets, two ranks": Golden(flow_on_sets, 8, ranks=2),
    "Hessian-free": Golden(rival("HessianFree", damping=1.0), 4),
    "nonlinear CG": Golden(rival("NonlinearCG"), 6),
}


def trained(golden: Golden, group: Any) -> Steps:
    """Train, and note θ and the report's numbers after each step."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, optimizer, closure, sets = golden.make(group)
    steps = []
    for _ in range(golden.steps):
        report = (optimizer.step(closure) if sets is None else optimizer.step(closure, sets)).as_dict()
        del report["seconds"], report["notes"]  # the clock's, and prose
        theta = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        steps.append({"θ": hashlib.sha256(theta).hexdigest(), **report})
    return steps


def recorded(ranks: int, group: Any) -> dict[str, Steps | str]:
    """The steps of each configuration of so many ranks, or why this checkout cannot make it."""
    found: dict[str, Steps | str] = {}
    for name, golden in GOLDEN.items():
        if golden.ranks != ranks:
            continue
        start = time.perf_counter()
        try:
            found[name] = trained(golden, group)
            said = f"{golden.steps} steps"
        except (TypeError, ImportError, AttributeError) as error:
            found[name] = said = f"{type(error).__name__}: {error}"
        if group is None or group.rank() == 0:
            sys.stderr.write(f"  {name:40} {time.perf_counter() - start:6.1f} s  {said}\n")
    return found


def serve(rank: int, ranks: int, store: str, out: str) -> None:
    """Be one of several ranks; all must have the same θ."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    found = recorded(ranks, group)
    thetas = {name: steps if isinstance(steps, str) else [step["θ"] for step in steps] for name, steps in found.items()}
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, thetas)
    dist.destroy_process_group()
    if any(other != everyone[0] for other in everyone):
        raise AssertionError("ranks have different parameters")
    if rank == 0:
        Path(out).write_text(json.dumps(found))


def record(path: Path) -> None:
    """Run all configurations, those of several ranks in as many processes."""
    found = recorded(1, None)
    for ranks in sorted({golden.ranks for golden in GOLDEN.values()} - {1}):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "steps.json"
            arguments = ranks, f"{folder}/store", str(out)
            spawn(serve, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]
            found |= json.loads(out.read_text())
    path.write_text(json.dumps(found))


def differences(base: Steps, head: Steps) -> Iterator[str]:
    """The first step at which each number differs, of those that both have."""
    seen: set[str] = set()
    for i, (one, other) in enumerate(zip(base, head, strict=True)):
        for key in one.keys() & other.keys() - seen:
            if json.dumps(one[key]) != json.dumps(other[key]):
                seen.add(key)
                shown = "" if key == "θ" else f" ({one[key]} → {other[key]})"
                yield f"{key} from step {i}{shown[:90]}"


def compare(base: Path, head: Path, changed: set[str]) -> int:
    """Print a line for each configuration; return how many differ, or are gone, and are not said to be."""
    one, other = json.loads(base.read_text()), json.loads(head.read_text())
    unexpected = 0
    for name in GOLDEN:
        if isinstance(other[name], str):
            same, said = False, f"CANNOT BE MADE: {other[name]}"
        elif isinstance(one[name], str):
            same, said = True, f"new: the base has {one[name]}"
        else:
            found = sorted(differences(one[name], other[name]))
            same, said = not found, f"DIFFERS: {'; '.join(found)}" if found else f"same bits, {len(one[name])} steps"
        unexpected += not same and name not in changed
        sys.stdout.write(f"{name:40} {said}\n")
    return unexpected


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Golden runs: record and compare.")
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("out", type=Path)
    comparer = commands.add_parser("compare")
    comparer.add_argument("base", type=Path)
    comparer.add_argument("head", type=Path)
    comparer.add_argument("--changed", nargs="*", default=[], help="configurations that may differ or be gone")
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.out)
        return 0
    return 1 if compare(arguments.base, arguments.head, set(arguments.changed)) else 0


if __name__ == "__main__":
    sys.exit(main())
