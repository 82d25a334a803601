"""Checkpoints in every form: brought back bit for bit, and refused if damaged or crafted."""

from __future__ import annotations

import copy
import json
import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from reliability.files import CRAFTED, DAMAGED, FILE, PARTS, damaged_file, lying_file
from reliability.malice import NAME, WAYS, Bomb
from reliability.methods import METHODS, Training
from reliability.snapshot import Snapshot

from krylov_descent import KSD, checkpoint
from krylov_descent.safety.checksum import KEY, checksum
from reliability import malice

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_lost(method: str) -> None:
    found = [damaged_file(method, seed) for seed in range(len(DAMAGED))]
    found += [lying_file(method, PARTS + seed) for seed in range(len(CRAFTED))]
    assert [outcome.lost for outcome in found if outcome.lost] == []
    assert {"the same bits", "refused"} <= {outcome.ended for outcome in found}


@pytest.mark.parametrize("craft", malice.OF_FILE.values(), ids=malice.OF_FILE)
def test_a_crafted_file_is_refused(craft: malice.Craft, tmp_path: Path) -> None:
    """More of each kind than the trials above have."""
    run = Training("default", 0)
    run.trajectory(2)
    FILE.save(tmp_path, run)
    path = tmp_path / NAME
    whole = path.read_bytes()
    before = Snapshot(run.model, run.optimizer)
    ways = set()
    for seed in range(60):
        path.write_bytes(whole)
        ways.add(craft(tmp_path, tmp_path / "fired", random.Random(seed)).partition(":")[0])
        with pytest.raises(ValueError, match=NAME):
            FILE.load(tmp_path, run)
        assert not before.changed()
    assert len(ways) > 1
    assert not (tmp_path / "fired").exists()


def test_every_bit_of_a_file_counts(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = KSD(model.parameters())
    path = checkpoint.save(tmp_path / NAME, model, optimizer)
    whole = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 1000):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(ValueError, match=NAME):
            checkpoint.load(path, model, optimizer)


def test_a_file_that_lies_takes_no_memory(tmp_path: Path) -> None:
    """What it declares is compared before anything is read; holes in a file cost nothing, so that it may be vast."""
    model = torch.nn.Linear(1, 1)
    optimizer = KSD(model.parameters())
    path = checkpoint.save(tmp_path / NAME, model, optimizer)
    tensors, document = malice.contents(path)
    size = 1 << 36
    header = {"__metadata__": {"krylov_descent": malice.with_checksum(tensors, document)}}
    vast: dict[str, Any] = {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    coded = json.dumps({**header, "vectors/last_step": vast}).encode()
    with open(path, "wb") as file:
        file.write(len(coded).to_bytes(8, "little") + coded)
        file.truncate(8 + len(coded) + size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=NAME):
        checkpoint.load(path, model, optimizer)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_flipped_bit_is_one_that_torch_loads(tmp_path: Path) -> None:
    """Otherwise the checksum would not be needed."""
    run = Training("default", 0)
    run.trajectory(2)
    state = run.optimizer.state_dict()
    vector = next(x for entry in state["state"].values() for x in entry.values() if isinstance(x, torch.Tensor))
    path = tmp_path / "optimizer.pt"
    torch.save(state, path)
    data = bytearray(path.read_bytes())
    at = data.find(vector.contiguous().view(torch.uint8).numpy().tobytes())
    assert at > 0
    data[at] ^= 1
    path.write_bytes(data)
    loaded = torch.load(path, weights_only=True)
    with pytest.raises(ValueError, match=r"damaged: its checksum is .* Load another checkpoint"):
        run.optimizer.load_state_dict(loaded)
    del loaded[KEY]  # changed on purpose
    run.optimizer.load_state_dict(loaded)


def test_the_bombs_go_off(tmp_path: Path) -> None:
    """Otherwise that none of them did would show nothing."""
    for how in WAYS:
        path, fired = tmp_path / f"{how}.pt", tmp_path / how
        torch.save({"state": Bomb(fired, how)}, path)
        torch.load(path, weights_only=False)
        assert fired.exists(), how


def test_a_state_of_another_kind_is_refused_before_anything_changes() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = KSD(model.parameters())
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    adam.step()
    before = copy.deepcopy(optimizer.state_dict())
    unusable: list[tuple[Any, str]] = [
        (adam.state_dict(), "not one of KSD: none of its entries counts iterations"),
        ([], "a list that is no state_dict"),
        ({"state": 3}, "no state_dict of an optimizer"),
        ({"state": {}}, "no list of param_groups"),
        ({**before, KEY: {**before[KEY], "version": 2}}, "version 2; this krylov_descent reads versions up to 1"),
        ({**before, KEY: {**before[KEY], "optimizer": "HessianFree"}}, "one of 'HessianFree', and this optimizer"),
        ({**before, KEY: 5}, "version None"),
    ]
    for state, message in unusable:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
        assert str(optimizer.state_dict()) == str(before)


def test_a_state_that_would_grow_takes_no_memory() -> None:
    """A tensor that repeats one number is small in a file of torch.save."""
    w = torch.nn.Parameter(torch.ones(3))
    optimizer = KSD([w])
    optimizer.step(lambda: (w.square().mean(), w))
    state = optimizer.state_dict()
    state["state"][0]["last_step"] = torch.zeros(1).expand(10**13)
    with pytest.raises(ValueError, match="has fewer numbers than that"):
        optimizer.load_state_dict(state)


def test_a_class_derived_from_ours_has_the_same_state() -> None:
    class Mine(KSD):
        pass

    w = torch.nn.Parameter(torch.ones(3))
    optimizer = KSD([w])
    optimizer.step(lambda: (w.square().mean(), w))
    Mine([w]).load_state_dict(optimizer.state_dict())
    KSD([w]).load_state_dict(Mine([w]).state_dict())


def test_checksums_tell_values_apart() -> None:
    values: list[Any] = [
        *(None, 0, 0.0, -0.0, False, "0", [], {}, [0], {0: 0}, [[]], [[], []], float("nan")),
        *(torch.zeros(2), torch.zeros(1, 2), torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, -0.0])),
        *(torch.zeros(0), torch.tensor(0.0), torch.zeros(2, dtype=torch.bfloat16), [torch.zeros(2)]),
    ]
    assert len({checksum(value) for value in values}) == len(values)
    x = torch.randn(4, 5)
    assert checksum({"a": x.T, "b": (1, x)}) == checksum({"b": (1, x), "a": x.T.contiguous()})
