"""Checkpoints of runs whose preconditioner remembers: a resumed run takes the steps of one that was left alone."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import safe_open
from torch import Tensor, nn

from krylov_descent import DEEP, KSD, Growing, checkpoint
from tests.distributed.pool import Pool
from tests.distributed.test_kronecker import Network

END = 18
OF = "preconditioner."


def build(group: Any = None, **settings: Any) -> tuple[nn.Module, KSD]:
    model = Network()
    return model, KSD(model.parameters(), **{**DEEP, **settings}, process_group=group)


def steps(model: nn.Module, optimizer: KSD, count: int, start: int = 60) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(5, (300, 4), generator=generator), torch.randint(3, (300,), generator=generator)
    sets = Growing(data, batch_size=30, start=start, seed=0)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch[0])
        return F.cross_entropy(z, batch[1]), z

    return [optimizer.step(closure, sets).loss for _ in range(count)]


def run(group: Any, begin: str | None, count: int, end: str | None, start: int = 60) -> dict[str, Any]:
    """Some steps, from a checkpoint if one is named, and to another one."""
    model, optimizer = build(group)
    if begin is not None:
        assert checkpoint.load(begin, model, optimizer) == {}
    loaded = memory_of(optimizer)
    losses, ages = [], []
    for _ in range(count):
        losses += steps(model, optimizer, 1, start)
        ages.append(memory_of(optimizer)["age"])
    if end is not None:
        checkpoint.save(end, model, optimizer)
    return {
        "theta": theta(model),
        "losses": losses,
        "loaded": loaded,
        "ages": ages,
        "memory": memory_of(optimizer),
    }


def memory_of(optimizer: KSD) -> dict[str, Any]:
    """Numbers and tensors that this rank's preconditioner remembers."""
    entry = optimizer.state[optimizer.param_groups[0]["params"][0]]
    held = {**entry.get("numbers", {}), **entry.get("tensors", {})}
    return {name.removeprefix(OF): x for name, x in held.items() if name.startswith(OF)}


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


def theta(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def pause(ages: list[float]) -> int:
    """After so many steps, the next one still uses the inverses that there are: new ones would be others."""
    return next(k for k in range(8, END) if ages[k] > 0)


def _saved(path: Path) -> list[str]:
    """The tensors of the checkpoint there."""
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def inverses(memory: Mapping[str, Any]) -> set[str]:
    return {name for name in memory if name.endswith("_inverse")}


@pytest.mark.parametrize(
    ("R", "start"), [(1, 60), (2, 60), pytest.param(3, 60, marks=pytest.mark.nightly), (2, 300)]
)  # 300 is all: there are earlier steps
def test_a_resumed_run_takes_the_same_steps(pool: Pool, tmp_path: Path, R: int, start: int) -> None:
    work = functools.partial(run, start=start)
    path = tmp_path / "run.safetensors"
    whole = pool.run(R, work, None, END, None)
    stop = pause(whole[0]["ages"])
    first = pool.run(R, work, None, stop, str(path))
    rest = pool.run(R, work, str(path), END - stop, None)
    assert any("subspace.earlier.4" in name for name in _saved(path)) == (start == 300)
    every = set().union(*(inverses(rank["memory"]) for rank in first))
    for a, b, c in zip(whole, first, rest, strict=True):
        assert inverses(c["loaded"]) == every
        assert all(same(x, c["loaded"][name]) for name, x in b["memory"].items())
        assert b["losses"] + c["losses"] == a["losses"]
        assert torch.equal(c["theta"], a["theta"])
        assert c["memory"].keys() == a["memory"].keys()  # a rank keeps what is its own, as before
        assert all(same(x, c["memory"][name]) for name, x in a["memory"].items())
    held = [name for rank in whole for name, x in rank["memory"].items() if isinstance(x, Tensor)]
    assert sorted(held) == sorted(f.removeprefix(f"tensors/{OF}") for f in _saved(path) if OF in f)


@pytest.mark.parametrize("start", [60, pytest.param(300, marks=pytest.mark.nightly)])
def test_on_another_number_of_ranks(pool: Pool, tmp_path: Path, start: int) -> None:
    """The state is the same to the bit. A step from it is not: estimates outside of layers depend on micro-batches."""
    work = functools.partial(run, start=start)
    stop = pause(pool.run(4, work, None, END, None)[0]["ages"])
    saved = pool.run(4, work, None, stop, str(tmp_path / "four"))[0]
    one = run(None, str(tmp_path / "four"), 1, None, start)
    for R in (1, 2, 3):
        for rank in pool.run(R, work, str(tmp_path / "four"), 1, None):
            assert all(same(x, rank["loaded"][name]) for name, x in saved["memory"].items())
            assert rank["losses"] == pytest.approx(one["losses"], rel=1e-6)


def test_without_inverses_or_factors_the_steps_would_be_others(tmp_path: Path) -> None:
    """Otherwise the tests above would show nothing."""
    path = tmp_path / "run.safetensors"
    stop = pause(run(None, None, END, None)["ages"])
    run(None, None, stop, str(path))
    expected = run(None, str(path), 1, None)["theta"]
    for some in (True, False):
        model, optimizer = build()
        checkpoint.load(path, model, optimizer)
        state = optimizer.whole_state()
        factors = {name: x for name, x in state.tensors.items() if not name.endswith("_inverse")}
        optimizer.load_whole_state(state._replace(tensors=factors) if some else state.without(OF))
        steps(model, optimizer, 1)
        assert not torch.equal(theta(model), expected)


def test_a_checkpoint_without_factors_begins_with_none(tmp_path: Path) -> None:
    """As those of other preconditioners do."""
    model, optimizer = build(preconditioner="fisher")
    steps(model, optimizer, 2)
    path = checkpoint.save(tmp_path / "run.safetensors", model, optimizer)
    assert not memory_of(optimizer)
    other, remembering = build()
    steps(other, remembering, 3)
    assert memory_of(remembering)["updates"] == 3
    checkpoint.load(path, other, remembering)
    assert not memory_of(remembering)
    steps(other, remembering, 1)
    assert memory_of(remembering)["updates"] == 1


def test_damaged_factors_are_refused(tmp_path: Path) -> None:
    model, optimizer = build()
    steps(model, optimizer, 2)
    path = checkpoint.save(tmp_path / "run.safetensors", model, optimizer)
    before = memory_of(optimizer)
    saved = {name for name in _saved(path) if name.startswith("tensors/")}
    assert saved == {f"tensors/{OF}{name}" for name, x in before.items() if isinstance(x, Tensor)}
    whole = path.read_bytes()
    number = re.search(rb"preconditioner\.updates\W+2", whole)
    assert number is not None
    tensors = ("blocks.6.outputs_inverse", "blocks.0.inputs", "blocks.4.diagonal")
    for at in (number.end() - 1, *(whole.index(before[name].numpy().tobytes()) for name in tensors)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ValueError, match="do not have their checksum"):
            checkpoint.load(path, model, optimizer)
        assert all(same(x, memory_of(optimizer)[key]) for key, x in before.items())
    path.write_bytes(whole)
    assert checkpoint.load(path, model, optimizer) == {}
