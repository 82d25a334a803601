"""A DataLoader in place of ``Subsets``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler

from krylov_descent import KSD, Subsets, check

DATA = TensorDataset(torch.randn(120, 4, generator=torch.Generator().manual_seed(0)), torch.arange(120) % 3)


def halves(samples: list[Any]) -> dict[str, Tensor]:
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}


@pytest.mark.parametrize("collate_fn", [None, halves])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_gives_the_steps_of_subsets(collate_fn: Any, num_workers: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    twin = copy.deepcopy(model)
    loader = DataLoader(DATA, batch_size=50, shuffle=True, collate_fn=collate_fn, num_workers=num_workers)
    sets = Subsets(DATA, batch_size=50, seed=0, collate_fn=collate_fn)

    def closure(module: nn.Module) -> Any:
        def of(batch: Any) -> Any:
            x, y = batch.values() if isinstance(batch, dict) else batch
            loss: Any = F.cross_entropy(module(x), y)
            loss.backward()
            return loss

        return of

    a, b = KSD(model.parameters(), krylov_dim=4), KSD(twin.parameters(), krylov_dim=4)
    for _ in range(3):
        assert a.step(closure(model), loader).loss == b.step(closure(twin), sets).loss
    assert a.settle(closure(model), loader).loss == b.settle(closure(twin), sets).loss
    assert check(closure(model), model, loader).ok
    run = a.run(closure(model), loader, max_steps=1)
    assert [report.set_sizes["A"] for report in run] == [120]


class Endless(IterableDataset[Tensor]):
    """Samples without an index."""

    def __iter__(self) -> Iterator[Tensor]:
        yield torch.ones(4)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader(Endless(), batch_size=5), "IterableDataset"),
        (
            DataLoader(DATA, batch_size=5, sampler=WeightedRandomSampler([1.0] * 120, 60)),
            "sampler of its own.*Weigh",
        ),
        (DataLoader(DATA, batch_size=5, sampler=RandomSampler(DATA, num_samples=60)), "sampler of its own.*Subset"),
        (DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]), "batch_sampler of its own.*list"),
        (DataLoader(DATA, batch_size=None), "batch_sampler of its own"),
        (DataLoader(DATA, batch_size=5, worker_init_fn=print), "worker_init_fn of its own"),
        ([1, 2], "sets is a list; pass a DataLoader"),
    ],
)
def test_loaders_whose_samples_cannot_be_drawn_are_refused(loader: Any, words: str) -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=words):
        KSD(model.parameters()).step(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), loader)
    report = check(lambda batch: F.cross_entropy(model(batch[0]), batch[1]), model, loader)
    assert [(finding.name, finding.status) for finding in report.findings] == [("data", "fail")]
