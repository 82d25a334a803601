"""Checkpoints in every form: brought back bit for bit, refused if damaged or crafted, read if of an older version."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from reliability import corruption
from reliability.forms import DIRECTORY, FILE, STATES, Form, Options, Run
from reliability.malice import WAYS, Bomb, document_in
from reliability.training import digest

from krylov_descent import KSD
from krylov_descent.cli.target import UsageError
from krylov_descent.sealing import KEY, checksum

OPTIONS = [Options.drawn(random.Random(seed)) for seed in (1, 2, 3)]


def test_nothing_is_lost() -> None:
    found: list[dict[str, Any]] = []
    corruption.run(2 * len(corruption.CASES), 0, found.append)
    assert [record for record in found if record["lost"]] == []
    assert {record["case"] for record in found} == {f"{name}, {form.name}" for name, form in corruption.CASES}
    outcomes = {record["outcome"] for record in found}
    assert {"the same bits", "refused", "refused by torch.load", "loaded as saved"} <= outcomes


def test_what_is_done_is_not_done_again() -> None:
    found: list[dict[str, Any]] = []
    corruption.run(3, 5, found.append, done={5, 6})
    assert [record["seed"] for record in found] == [7]


@pytest.mark.parametrize("form", [DIRECTORY, FILE, STATES], ids=lambda form: form.name)
@pytest.mark.parametrize("options", OPTIONS, ids=["one", "two", "three"])
def test_files_of_older_versions_load(tmp_path: Path, form: Form, options: Options) -> None:
    run = Run(options)
    run.steps(2)
    form.save(tmp_path, run)
    if form is DIRECTORY:  # version 1: no checksums in the manifest and in the pointer
        path, document = document_in(tmp_path)
        del document["crc32"]
        path.write_text(json.dumps({**document, "version": 1}))
        (tmp_path / "latest").write_text(f"{path.parent.name}\n")
    else:  # without version and checksum
        path = tmp_path / ("checkpoint.pt" if form is FILE else "optimizer.pt")
        kept = torch.load(path, weights_only=True)
        if form is FILE:
            kept = {key: kept[key] for key in ("model", "optimizer", "steps", "generator")}
        del (kept["optimizer"] if form is FILE else kept)[KEY]
        torch.save(kept, path)
    other = Run(options, start=1)
    form.load(tmp_path, other)
    assert digest(other.model, other.optimizer) == digest(run.model, run.optimizer)


def test_a_flipped_bit_is_one_that_torch_loads(tmp_path: Path) -> None:
    """Otherwise the checksum would not be needed."""
    run = Run(OPTIONS[0])
    run.steps(2)
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


def test_a_class_derived_from_ours_has_the_same_state() -> None:
    class Mine(KSD):
        pass

    w = torch.nn.Parameter(torch.ones(3))
    optimizer = KSD([w])
    optimizer.step(lambda: (w.square().mean(), w))
    Mine([w]).load_state_dict(optimizer.state_dict())
    KSD([w]).load_state_dict(Mine([w]).state_dict())


def test_the_command_line_says_what_is_wrong(tmp_path: Path) -> None:
    run = Run(OPTIONS[1])
    run.steps(1)
    FILE.save(tmp_path, run)
    path = tmp_path / "checkpoint.pt"
    kept = torch.load(path, weights_only=True)
    for changed, message in (
        ({**kept, "steps": 2}, "do not have their checksum"),
        ({**kept, "version": 9}, "of version 9"),
        (kept["generator"], "holds a Tensor, and no checkpoint"),
    ):
        torch.save(changed, path)
        with pytest.raises(UsageError, match=message) as caught:
            FILE.load(tmp_path, run)
        assert caught.value.remedy
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(UsageError, match="cannot be read"):
        FILE.load(tmp_path, run)


def test_checksums_tell_values_apart() -> None:
    values: list[Any] = [
        *(None, 0, 0.0, -0.0, False, "0", [], {}, [0], {0: 0}, [[]], [[], []], float("nan")),
        *(torch.zeros(2), torch.zeros(1, 2), torch.zeros(2, dtype=torch.float64), torch.tensor([0.0, -0.0])),
        *(torch.zeros(0), torch.tensor(0.0), torch.zeros(2, dtype=torch.bfloat16), [torch.zeros(2)]),
    ]
    assert len({checksum(value) for value in values}) == len(values)
    x = torch.randn(4, 5)
    assert checksum({"a": x.T, "b": (1, x)}) == checksum({"b": (1, x), "a": x.T.contiguous()})
