"""One rank of the checks of checkpoints: ``python -m tests.distributed.checkpoint_worker all RANK DIRECTORY``.

Started by test_checkpoint.py, which holds the rest of the checks; also by torchrun, as ``restarts 0 DIRECTORY``.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from krylov_descent import KSD, checkpoint
from krylov_descent.distributed import RankError
from krylov_descent.distributed.launch import init_process_group
from krylov_descent.state import Number, Parts

R = 4
EXTRA = {"epoch": 7, "history": [1.5, None, True], "name": "ü"}


def build(small: bool = False, process_group: Any = None) -> tuple[nn.Module, KSD]:
    """P = 22, with buffers, two groups and a frozen parameter; or P = 2."""
    if small:
        model: nn.Module = nn.Linear(2, 1, bias=False)
        return model, KSD(model.parameters(), process_group=process_group)
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    model[1].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "weight_decay": 0.25},
        {"params": [*model[1:].parameters()]},
    ]
    return model, KSD(groups, process_group=process_group)


def vectors(optimizer: KSD, iteration: int) -> dict[str, Tensor]:
    """The vectors that a run is pretended to have."""
    positions = torch.arange(optimizer.numel, dtype=next(iter(optimizer.param_groups[0]["params"])).dtype)
    return {"last_step": positions + 100 * iteration + 1, "earlier": -positions - 1}


def numbers_of(iteration: int) -> dict[str, Number]:
    counts = {"iteration": iteration, "seed": 2**60 + 1, "samples.search_growth": 2}
    return {**counts, "policy": "Subsets", "acceptance.loss": math.inf, "wary": False}


def pretend(model: nn.Module, optimizer: KSD, iteration: int) -> None:
    """A state as after some steps: everything is a function of the iteration."""
    with torch.no_grad():
        for i, x in enumerate(model.state_dict().values()):
            x.fill_(iteration + i)
    optimizer.load_whole_state(Parts(vectors(optimizer, iteration), numbers_of(iteration), {}))
    optimizer.param_groups[0]["lr"] = 0.5


def require(model: nn.Module, optimizer: KSD, iteration: int) -> None:
    """The state that ``pretend`` made."""
    for i, x in enumerate(model.state_dict().values()):
        assert bool((x == iteration + i).all())
    found, numbers, tensors = optimizer.whole_state()
    expected = vectors(optimizer, iteration)
    if optimizer.comm.rank == 0:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], x) for name, x in expected.items())
    else:
        assert not found
    assert not tensors
    assert numbers == numbers_of(iteration)
    assert optimizer.param_groups[0]["lr"] == 0.5


def saved(path: Path, iteration: int) -> tuple[nn.Module, KSD]:
    """A checkpoint of some iteration, in one process."""
    model, optimizer = build()
    pretend(model, optimizer, iteration)
    checkpoint.save(path, model, optimizer)
    return model, optimizer


@contextmanager
def failing(kind: type[Exception], on_this_rank: bool, text: str) -> Iterator[None]:
    """All ranks must raise: one its own error, the others a RankError that says it."""
    with pytest.raises(kind if on_this_rank else RankError, match=text) as caught:
        yield
    assert on_this_rank or getattr(caught.value, "connected", False)


def everything(rank: int, directory: Path) -> None:
    store = f"file://{directory / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=R, timeout=timedelta(seconds=30))
    world = dist.group.WORLD
    groups = {ranks: dist.new_group([*range(ranks)]) for ranks in (2, 3)}

    for name, small in (("large", False), ("small", True)):
        model, optimizer = build(small, world)
        path = directory / name
        assert checkpoint.load(path, model, optimizer) is None
        pretend(model, optimizer, 3)
        assert checkpoint.save(path, model, optimizer, extra=EXTRA) == path
        for ranks, group in groups.items():
            if rank < ranks:
                fewer = build(small, group)
                assert checkpoint.load(path, *fewer) == EXTRA
                require(*fewer, 3)
                pretend(*fewer, 4)
                checkpoint.save(directory / f"{name}-{ranks}", *fewer)
        dist.barrier()
        for ranks in groups:
            assert checkpoint.load(directory / f"{name}-{ranks}", model, optimizer) == {}
            require(model, optimizer, 4)

    large = directory / "large"
    model, optimizer = build(False, world)
    pretend(model, optimizer, 5)
    content = large.read_bytes()
    for function, bad in (("write", 0), ("reading", 2)):
        broken = mock.patch.object(checkpoint, function, side_effect=OSError(28, "No space left on device"))
        with broken if rank == bad else nullcontext(), failing(OSError, rank == bad, "No space left"):
            if function == "write":
                checkpoint.save(large, model, optimizer)
            else:
                checkpoint.load(large, model, optimizer)
        require(model, optimizer, 5)
        dist.barrier()
        assert large.read_bytes() == content
    with failing(ValueError, rank == 1, "is not JSON"):
        checkpoint.save(large, model, optimizer, extra={"x": object() if rank == 1 else 1})
    with failing(FileNotFoundError, rank == 1, "No such file"):
        checkpoint.load(directory / "nowhere" if rank == 1 else large, model, optimizer)
    with pytest.raises(ValueError, match="ranks see different files"):
        checkpoint.load(directory / "large-2" if rank == 1 else large, model, optimizer)
    require(model, optimizer, 5)
    apart = build(False, world)
    pretend(*apart, 5 + (rank == 1))
    with pytest.raises(ValueError, match=r"ranks are at iterations \[5, 6, 5, 5\]"):
        checkpoint.save(large, *apart)
    dist.barrier()

    if rank == 1:
        mock.patch.object(dist, "all_gather_object", side_effect=lambda *_, **__: os._exit(9)).start()
    with pytest.raises(RankError, match="lost the others") as lost:
        checkpoint.save(large, model, optimizer)
    assert not lost.value.connected
    os._exit(0)  # without waiting for a rank that is gone


def restarts(directory: Path) -> None:
    """Each attempt goes on from the checkpoint of the last one; rank 1 dies in the first."""
    group = init_process_group(timeout=timedelta(seconds=30))
    model, optimizer = build(False, group)
    path = directory / "run.safetensors"
    extra = checkpoint.load(path, model, optimizer)
    attempt = 0 if extra is None else extra["attempt"] + 1
    assert attempt == int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt:
        require(model, optimizer, attempt - 1)
    pretend(model, optimizer, attempt)
    checkpoint.save(path, model, optimizer, extra={"attempt": attempt})
    if attempt < 1 and dist.get_rank() == 1:
        os._exit(9)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "all":
        everything(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        restarts(Path(sys.argv[3]))
