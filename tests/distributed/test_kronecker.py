"""R ranks must have the D⁻¹w of one process, and its factors between them, each rank those of its layers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from krylov_descent import DEEP, KSD, Growing
from krylov_descent.distributed import Ranks
from krylov_descent.distributed.mesh import MeshComm
from krylov_descent.objective.objective import Objective
from krylov_descent.preconditioners.kronecker import Kronecker, KroneckerState, kept_bytes, owners
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
    """D⁻¹w after some refreshes, put together; the state; the tensors of the state by name."""
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
    solved = comm.all_gather(precondition(comm.shard(w)), parameters.numel)
    return {"solved": solved, "state": state, "tensors": taken_apart(state).tensors}


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
            for i, block in result["state"].blocks.items():
                assert (type(block), block.begun) == (known[i], one["state"].blocks[i].begun)
            for name, x in result["tensors"].items():
                torch.testing.assert_close(x, one["tensors"][name], msg=name)
        assert sorted(i for result in results for i in result["state"].blocks) == [*known]
        assert sum(len(result["tensors"]) for result in results) == len(one["tensors"])


def held(group: Any) -> tuple[int, int]:
    """Bytes of the factors of this rank after a step of a deep network, and what is said of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    optimizer = KSD(model.parameters(), **DEEP, process_group=group)
    x = torch.randn(64, 16)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch[0])
        return z.square().mean(), z

    optimizer.step(closure, Growing((x,), batch_size=16, start=64, seed=0))
    tensors = optimizer.state[optimizer.trained()[0]]["tensors"]
    ranks = 1 if group is None else group.size()
    return sum(x.nbytes for x in tensors.values()), kept_bytes(optimizer.trained(), torch.float32, ranks)


def test_memory_of_factors_falls_with_ranks(pool: Pool) -> None:
    one, _ = held(None)
    for R in (2, 4):
        for factors, figure in pool.run(R, held):
            assert factors == one / R
            assert figure == pytest.approx(factors, rel=0.02)


def of_a_linear_loss(group: Any) -> float:
    """The loss of the second step; the loss says nothing about the curvature of a matrix outside of layers."""
    torch.manual_seed(0)
    w, x = nn.Parameter(torch.randn(4, 3)), torch.randn(20, 4)

    def closure() -> tuple[Tensor, Tensor]:
        z = (x @ w).tanh()
        return z.mean(), z

    optimizer = KSD([w], preconditioner="kronecker", process_group=group)
    optimizer.step(closure)
    return float(optimizer.step(closure).loss)


def test_ranks_go_without_factors_where_one_process_does(pool: Pool) -> None:
    one = of_a_linear_loss(None)
    assert pool.run(2, of_a_linear_loss) == [pytest.approx(one, rel=1e-4)] * 2


def test_owners_share_the_largest_first() -> None:
    params = [torch.ones(n, n) for n in (9, 3, 8, 7, 2)] + [torch.ones(4)]
    assert owners(params, 1) == [0] * 6
    assert owners(params, 2) == [0, 0, 1, 1, 0, 0]
    assert sorted(owners(params, 9)) == [0, 1, 2, 3, 4, 5]


def test_what_one_rank_finds_out_counts_for_all(pool: Pool) -> None:
    results = pool.run(3, functools.partial(solve, odd_rank=1))
    for result in results:
        assert torch.equal(result["solved"], results[0]["solved"])
    (block,) = (result["state"].blocks[6] for result in results if 6 in result["state"].blocks)
    assert isinstance(block, PulledBlock)


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
