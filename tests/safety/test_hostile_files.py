"""Small files and states that would take gigabytes: refused by an error of ours, within 50 MiB, in a real process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from reliability.hostile import ATTACKS, METHODS, MOST, measured
from torch import Tensor, nn

from krylov_descent import KSD, Subsets
from krylov_descent.safety.checksum import KEY, with_checksum
from krylov_descent.safety.untrusted import require_plain

#: One of each kind; the nightly test has them all.
CHOSEN = [
    "state_dict: a vector, expanded",
    "state_dict: a factor, expanded",
    "state_dict without checksum: a vector, expanded beyond memory",
    "state_dict: a vector, sparse and vast",
    "state_dict: one vector under a thousand names",
    "state_dict: a list of lists of lists in a group",
    "state_dict: a list in itself for the iteration",
    "state_dict: lists in lists, 100,000 deep beside the state",
    "state_dict without checksum: a name of a million dots, known",
    "state_dict without checksum: a number of 5,000 digits for the weight decay",
    "state_dict without checksum: vast rows",
    "state of ranks: a factor, expanded",
    "state of ranks: a dictionary for all",
    "file: a factor of holes",
    "file: 50,000 tensors",
    "file: a header with 99 MB of spaces",
    "file: a pipe",
    "file: a device",
    "file: names of 100,000 dots",
    "file: half a million dictionaries in the metadata",
]
LOGS = [
    "log, read: lists in lists",
    "log, read: a number of 100,000 digits",
    "log, plotted: a billion Krylov vectors",
    "log, plotted: many steps times many vectors",
    "log, resumed: lists in lists",
    "log, resumed: other bytes",
    "log, resumed: holes",
    "log, resumed: a pipe",
    "command line: negative steps",
]


def judged(names: list[str], methods: Iterable[str]) -> None:
    records = list(measured(names, methods))
    assert {record["attack"] for record in records} == set(names)
    assert [record for record in records if record["lost"]] == []
    assert max(record["peak"] for record in records) <= MOST


def test_hostile_files_take_little_memory_and_are_refused() -> None:
    judged(CHOSEN + LOGS, ["deep"])


@pytest.mark.nightly
def test_every_hostile_file_takes_little_memory_with_every_method() -> None:
    judged(list(ATTACKS), METHODS)


def trained(**settings: Any) -> tuple[nn.Module, KSD, Callable[[Any], tuple[Tensor, Tensor]], Subsets]:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.randn(60, 3)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch)
        return z.square().mean(), z

    optimizer, sets = KSD(model.parameters(), krylov_dim=2, **settings), Subsets(x, batch_size=60, seed=0)
    optimizer.step(closure, sets)
    return model, optimizer, closure, sets


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("samples.search_growth", 0.5, r"samples\.search_growth = '0.5', which is no whole number"),
        ("samples.other", 1, r"it has samples\.other"),
        ("iteration", 1 << 63, "iteration = .* which no state has"),
        ("acceptance.loss", "low", r"acceptance\.loss = 'low', which is no number"),
        ("else", 1, "it has else"),
    ],
)
def test_numbers_of_a_state_are_judged_when_it_is_loaded(name: str, value: Any, message: str) -> None:
    _, optimizer, _, _ = trained()
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(before)
    state["state"][0]["numbers"][name] = value
    state = with_checksum(state, "KSD")
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert optimizer.state_dict()[KEY] == before[KEY]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_vectors_that_are_not_finite_in_the_parameters_dtype_are_refused(value: float) -> None:
    _, optimizer, _, _ = trained()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][1]["last_step"] = torch.full((2,), value, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"last_step is not finite.*Load an older one"):
        optimizer.load_state_dict(with_checksum(state, "KSD"))


def test_a_state_of_torch_load_is_loaded_as_it_was() -> None:
    """Views of one storage, as vectors of all parameters are, count once."""
    _, optimizer, _, _ = trained(preconditioner="kronecker")
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    _, other, closure, sets = trained(preconditioner="kronecker")
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.state_dict()[KEY] == optimizer.state_dict()[KEY]
    other.step(closure, sets)


def test_a_few_names_may_share_a_storage_and_many_may_not() -> None:
    x = torch.zeros(1000)
    require_plain([x] * 8)
    require_plain([x[i : i + 1] for i in range(1000)])
    with pytest.raises(ValueError, match=r"36,000 bytes in all that share 4,000\. Load another"):
        require_plain([x] * 9)
