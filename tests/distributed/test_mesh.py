"""Parameters spread over a mesh (DTensor): steps must be those of one process with plain parameters."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from experiments.baselines import HessianFree
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from krylov_descent import DEEP, KSD, Fisher, GaussNewtonFlow, Search, Subsets, checkpoint
from krylov_descent.distributed.gathered import all_rows, own_rows, shard_at_rest
from krylov_descent.distributed.mesh import MeshComm
from tests.distributed.pool import Pool, RanksFailedError

Placing = Callable[[str, str], list[Placement]]


def model_of(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, 17), nn.Tanh(), nn.Linear(17, 10)).double()


def placed(model: nn.Module, mesh: DeviceMesh, placing: Placing) -> nn.Module:
    def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, p in list(module._parameters.items()):
            assert p is not None
            module._parameters[key] = nn.Parameter(distribute_tensor(p.detach(), mesh, placing(name, key)))

    return distribute_module(model, mesh, place)


def problem(model: nn.Module, put: Callable[[Tensor], Tensor]) -> tuple[Callable[[Any], Any], Subsets]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 20, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 10, (256,), generator=generator)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(put(batch[0]))
        return F.cross_entropy(z, put(batch[1])), z

    return closure, Subsets((x, y), batch_size=64, fraction=0.5, seed=0)


def steps(model: nn.Module, put: Callable[[Tensor], Tensor], n: int = 3, **settings: Any) -> tuple[KSD, list[Any]]:
    optimizer = KSD(model.parameters(), **{"krylov_dim": 4, "search": Search(iterations=6), **settings})
    closure, sets = problem(model, put)
    return optimizer, [optimizer.step(closure, sets) for _ in range(n)]


def whole(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach()


def error_of(group: Any, case: str, **settings: Any) -> float:
    """max |θ − θ of one process| after three steps, or n."""
    warnings.simplefilter("ignore")  # DTensor's own
    width = 32 if case == "tensor parallel" else 33
    reference, model = model_of(width), model_of(width)
    settings = {"preconditioner": None, **settings}
    steps(reference, lambda t: t, **settings)
    if case.startswith("2-D"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    else:
        mesh = DeviceMesh.from_group(group, "cpu")

    def sharded(t: Tensor) -> Tensor:
        return distribute_tensor(t, mesh, [Shard(0), Replicate()][: mesh.ndim])

    put: Callable[[Tensor], Tensor] = sharded
    if case == "tensor parallel":
        put = lambda t: t  # noqa: E731
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        spread: nn.Module = parallelize_module(model, mesh, plan)
    elif case == "all cut":
        spread = placed(model, mesh, lambda module, name: [Shard(0)])
    elif case == "mixed":
        spread = placed(
            model, mesh, lambda module, name: [Replicate()] if name == "bias" or module == "2" else [Shard(1)]
        )
    elif case == "all replicated":
        spread = placed(model, mesh, lambda module, name: [Replicate()])
    else:
        second: dict[str, Placement] = {"weight": Shard(1), "bias": Replicate()}
        spread = placed(
            model,
            mesh,
            lambda module, name: [Replicate(), {"0": Shard(0), "2": second[name]}.get(module, Replicate())],
        )
    optimizer, reports = steps(spread, put, **settings)
    if group is not None:
        assert DTensor in {type(s.get("last_step")) for s in optimizer.state.values()}
        assert reports[0].bytes_sent > 0
    pairs = zip(spread.parameters(), reference.parameters(), strict=True)
    return max(float((whole(a) - b.detach()).abs().max()) for a, b in pairs)


def all_errors(group: Any) -> dict[str, float]:
    if dist.get_world_size(group) == 4:
        return {case: error_of(group, case, weight_decay=1e-3) for case in ("mixed", "2-D")}
    found = {
        case: error_of(group, case, weight_decay=1e-3)
        for case in ("tensor parallel", "all cut", "mixed", "all replicated")
    }
    # Along e₁ there is next to no curvature, which amplifies rounding.
    return {**found, "first vector": 1e-3 * error_of(group, "mixed", previous="e1")}


@pytest.mark.parametrize("case", ["mixed", pytest.param("tensor parallel", marks=pytest.mark.nightly)])
def test_exact_squares_are_those_of_one_process(pool: Pool, case: str) -> None:
    """Layer rules of one process against rows of the outputs, pulled back one by one."""
    work: Callable[[Any], float] = functools.partial(error_of, case=case, n=1, preconditioner=Fisher(exact=True))
    assert max(pool.run(2, work)) < 1e-10


def there_and_back(group: Any) -> float:
    """How far a vector is off that was cut among four ranks which hold it alike, and put together again."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    p = distribute_tensor(torch.arange(10.0), mesh, [Replicate(), Replicate()])
    comm, x = MeshComm([p], [10]), torch.arange(10.0)
    return float((comm.all_gather(comm.shard(x), 10) - x).abs().max())


def test_what_ranks_hold_alike_is_put_together_in_order(pool: Pool) -> None:
    assert pool.run(4, there_and_back) == [0.0] * 4


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_steps_are_those_of_one_process(pool: Pool, ranks: int) -> None:
    for found in pool.run(ranks, all_errors):
        assert max(found.values()) < 1e-10, found


def probe_and_resume(group: Any, directory: str) -> bool:
    """The Fisher diagonal by probes trains, and a run that is saved and loaded goes on bit for bit, as docs have it."""
    warnings.simplefilter("ignore")
    mesh = DeviceMesh.from_group(group, "cpu")

    def put(t: Tensor) -> Tensor:
        return distribute_tensor(t, mesh, [Shard(0)])

    def fresh() -> nn.Module:
        return placed(model_of(33), mesh, lambda module, name: [Shard(0) if name == "weight" else Replicate()])

    model = fresh()
    _, reports = steps(model, put, 4)
    assert reports[-1].preconditioner == "fisher"
    assert reports[-1].loss < 0.95 * reports[0].loss
    half = fresh()
    optimizer, _ = steps(half, put, 2)
    own = Path(directory) / f"optimizer-{dist.get_rank(group)}.pt"
    state_dict_saver.save({"model": half.state_dict()}, checkpoint_id=directory, process_group=group)
    torch.save(optimizer.state_dict(), own)
    other = fresh()
    for p in other.parameters():
        p.data.mul_(0)
    weights = {"model": other.state_dict()}
    state_dict_loader.load(weights, checkpoint_id=directory, process_group=group)
    other.load_state_dict(weights["model"])
    resumed = KSD(other.parameters(), krylov_dim=4, search=Search(iterations=6))
    resumed.load_state_dict(torch.load(own, weights_only=True))
    closure, sets = problem(other, put)
    for _ in range(2):
        resumed.step(closure, sets)
    return all(torch.equal(whole(a), whole(b)) for a, b in zip(other.parameters(), model.parameters(), strict=True))


def test_the_probe_works_and_runs_resume(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, probe_and_resume, str(tmp_path)) == [True, True]


def convolutional() -> nn.Module:
    """Layers that DTensor itself has no rule for."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 5)),
        nn.Conv2d(1, 5, 3, padding=1),
        nn.GroupNorm(1, 5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(100, 10),
    ).double()


def gathered_error(group: Any, build: Callable[[], nn.Module]) -> float:
    warnings.simplefilter("ignore")
    mesh = DeviceMesh.from_group(group, "cpu")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(250, 20, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 10, (250,), generator=generator)
    models = build(), shard_at_rest(build(), mesh)
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    for model in models:

        def closure(batch: Any, model: nn.Module = model) -> tuple[Tensor, Tensor]:
            if model is models[0]:
                z = model(batch[0])
            else:
                z = all_rows(model(own_rows(batch[0], mesh)), len(batch[0]), mesh)
            return F.cross_entropy(z, batch[1]), z

        optimizer = KSD(model.parameters(), krylov_dim=4, preconditioner=None, search=Search(iterations=6))
        sets = Subsets((x, y), batch_size=61, fraction=0.4, seed=0)
        for _ in range(3):
            optimizer.step(closure, sets)
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return max(float((a.detach() - whole(b)).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("build", [functools.partial(model_of, 33), convolutional], ids=["dense", "convolutional"])
def test_parameters_gathered_where_they_are_used(pool: Pool, build: Callable[[], nn.Module]) -> None:
    assert max(pool.run(2, gathered_error, build)) < 1e-9


def refusals(group: Any, which: str) -> None:
    mesh = DeviceMesh.from_group(group, "cpu")
    model = placed(model_of(8), mesh, lambda module, name: [Shard(0)])
    if which == "baseline":
        HessianFree(model.parameters()).step(lambda: (None, None))
    elif which == "group":
        KSD(model.parameters(), process_group=group).step(lambda: (None, None))
    elif which == "save":
        checkpoint.save("nowhere", model, KSD(model.parameters()))
    elif which == "load":
        checkpoint.load("nowhere", model, KSD(model.parameters()))
    else:
        closure, sets = problem(model, lambda x: distribute_tensor(x, mesh, [Replicate()]))
        made = GaussNewtonFlow(model.parameters()) if which == "flow" else KSD(model.parameters(), **DEEP)
        made.step(closure, sets)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("baseline", "HessianFree was given DTensor parameters"),
        ("group", "mesh of their own"),
        ("save", "Save the model with torch.distributed.checkpoint"),
        ("load", "its metadata is a pickle"),
        ("flow", "GaussNewtonFlow cannot be used with parameters on a mesh"),
        ("kronecker", "preconditioner='kronecker' cannot be used with parameters on a mesh"),
    ],
)
def test_what_cannot_be_had_is_refused(pool: Pool, which: str, message: str) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, refusals, which)
    assert all(message in text for text in failed.value.said.values())


def test_a_plain_copy_is_still_a_copy() -> None:
    optimizer = KSD([torch.nn.Parameter(torch.ones(3))])
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == 1.0
