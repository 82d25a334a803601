"""R ranks must have the factors and the D⁻¹w of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from krylov_descent.distributed import Ranks
from krylov_descent.distributed.mesh import MeshComm
from krylov_descent.objective.objective import Objective
from krylov_descent.preconditioners.kronecker import Kronecker, KroneckerState
from krylov_descent.preconditioners.kronecker_blocks import DiagonalBlock, LayerBlock, PulledBlock, TableBlock
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.state import taken_apart
from krylov_descent.vectors.parameters import ParameterVector
from tests.distributed.pool import Pool, RanksFailedError

F64 = torch.float64


class Network(nn.Module):
    """A table, a convolution, a norm, a free matrix and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Conv1d(4, 3, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.LayerNorm(9))
        self.head = nn.Linear(9, 3, bias=False)
        self.free = nn.Parameter(torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.table(x).transpose(1, 2))) @ self.free
        return out


def solve(group: Any, fails_on: int = -1, odd_rank: int = -1, samples: int = 24, batch_size: int = 4) -> dict[str, Any]:
    """D⁻¹w after some refreshes, put together; the state; the names of the inverses that this rank has."""
    comm = Ranks(group).comm()
    model = Network().double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(5, (samples, 4), generator=generator)
    y = torch.randint(3, (samples,), generator=generator)

    def closure(rows: Tensor) -> tuple[Tensor, Tensor]:
        if comm.rank == fails_on:
            raise ZeroDivisionError("of this rank alone")
        z = model(x[rows])
        if comm.rank == odd_rank:  # the last weight acts elsewhere, too
            z = z + model.head.weight.sum(1)
        return F.cross_entropy(z, y[rows]), z

    parameters = ParameterVector([{"params": list(model.parameters()), "weight_decay": 1e-3}])
    objective = Objective(closure, parameters, comm)
    shard, of = comm.shard_of_sets
    begin, end = shard * samples // of, (shard + 1) * samples // of
    batches = [
        Microbatch(torch.arange(i, j := min(i + batch_size, end)), j - i, position=i)
        for i in range(begin, end, batch_size)
    ]
    kronecker = Kronecker()
    state: KroneckerState = kronecker.init()
    for k in range(3):
        found = kronecker.refresh(objective, batches, state, (7, k))
        precondition, state = found.solve, found.state
    assert precondition is not None
    w = torch.randn(parameters.numel, generator=generator, dtype=F64)
    parts = taken_apart(state)
    return {
        "solved": comm.all_gather(precondition(comm.shard(w)), parameters.numel),
        "state": state,
        "factors": {name: x for name, x in parts.tensors.items() if not name.endswith("_inverse")},
        "inverses": {name for name in parts.tensors if name.endswith("_inverse")},
    }


@pytest.mark.parametrize(("samples", "batch_size"), [(24, 4), (2, 1)])
def test_ranks_have_what_one_process_has(pool: Pool, samples: int, batch_size: int) -> None:
    """Ranks without samples among them. The micro-batches are the same, on which the estimate of diagonals depends."""
    work = functools.partial(solve, samples=samples, batch_size=batch_size)
    one = work(None)
    known = {i: type(block) for i, block in one["state"].blocks.items()}
    assert known == {0: PulledBlock, 1: TableBlock, 2: LayerBlock, 4: DiagonalBlock, 5: DiagonalBlock, 6: LayerBlock}
    assert (one["state"].blocks[2].bias, one["state"].blocks[6].bias) == (3, None)
    for R in (2, 3):
        results = pool.run(R, work)
        for result in results:
            torch.testing.assert_close(result["solved"], one["solved"])
            assert result["state"].places == one["state"].places
            assert result["state"].damping == pytest.approx(one["state"].damping, rel=1e-7)
            assert {i: (type(b), b.begun) for i, b in result["state"].blocks.items()} == {
                i: (type(b), b.begun) for i, b in one["state"].blocks.items()
            }
            assert set(result["factors"]) == set(one["factors"])
            for name, x in one["factors"].items():
                torch.testing.assert_close(result["factors"][name], x, msg=name)
                assert torch.equal(result["factors"][name], results[0]["factors"][name])
        assert set().union(*(result["inverses"] for result in results)) == one["inverses"]
        assert all(result["inverses"] < one["inverses"] for result in results)


def test_what_one_rank_finds_out_counts_for_all(pool: Pool) -> None:
    results = pool.run(3, functools.partial(solve, odd_rank=1))
    for result in results:
        assert torch.equal(result["solved"], results[0]["solved"])
        assert isinstance(result["state"].blocks[6], PulledBlock)


def test_a_failure_is_that_of_all(pool: Pool) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pool.run(2, functools.partial(solve, fails_on=1))
    assert set(failed.value.said) == {0, 1}
    assert all("of this rank alone" in text for text in failed.value.said.values())


def on_a_mesh(group: Any) -> str:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")  # one of its own would count groups on these ranks alone
    p = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    parameters = ParameterVector([{"params": [p], "weight_decay": 0.0}])
    objective = Objective(lambda _: p.sum(), parameters, MeshComm(parameters.params, parameters.sizes))
    try:
        Kronecker().refresh(objective, [Microbatch(None, None)], KroneckerState(), (0,))
    except ValueError as error:
        return str(error)
    return ""


def test_a_mesh_is_refused(pool: Pool) -> None:
    for said in pool.run(2, on_a_mesh):
        assert "mesh" in said
        assert "fisher" in said
