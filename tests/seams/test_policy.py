"""A sample policy of a user's own: windows of the data in order, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from krylov_descent import KSD
from krylov_descent.samples.interface import Choice, SamplePolicy
from krylov_descent.samples.loading import source_of
from krylov_descent.samples.subsets import Draw, SampleSet
from tests.distributed.pool import Pool
from tests.seams import contract


@dataclass(frozen=True)
class Position:
    """Where the next window begins."""

    start: int = 0


class Windows(SamplePolicy):
    """A is all samples, B = C the next window of them."""

    def __init__(self, data: Any, size: int, batch_size: int) -> None:
        self._source, self._samples = source_of(data, None, 0, None, 0)
        self._size, self._batch_size = size, batch_size

    def init(self) -> Position:
        return Position()

    def choose(self, iteration: int, state: Any, *, krylov_dim: int, shard: int, of_shards: int) -> Choice:
        def cut(start: int, stop: int) -> SampleSet:
            return SampleSet(start, stop, self._samples, self._batch_size, shard, of_shards, None)

        window = cut(state.start, state.start + self._size)
        after = (state.start + self._size) % self._samples
        return Choice(Draw(self._source, cut(0, self._samples), window, window), Position(after))


def windows() -> Windows:
    return Windows(contract.data(), size=32, batch_size=10)


def make(group: Any) -> tuple[nn.Module, KSD, SamplePolicy]:
    model = contract.network()
    return model, KSD(model.parameters(), krylov_dim=4, process_group=group), windows()


def test_it_resumes(tmp_path: Path) -> None:
    contract.resumes_exactly(make, tmp_path)


def test_its_steps_are_atomic() -> None:
    contract.is_atomic(make)


def test_ranks_agree(pool: Pool) -> None:
    contract.agrees_on_two_ranks(make, pool)


def test_the_same_state_gives_the_same_sets_and_shards_make_the_whole() -> None:
    policy, x = windows(), contract.data()[0]
    for start in (0, 32, 64):
        whole = policy.choose(7, Position(start), krylov_dim=4, shard=0, of_shards=1)
        assert whole.state == Position((start + 32) % 96)
        assert whole.sets.sizes == {"A": 96, "B": 32, "C": 32}
        parts = [policy.choose(7, Position(start), krylov_dim=4, shard=i, of_shards=3).sets.b for i in range(3)]
        together = torch.cat([batch.data[0] for part in parts for batch in part])
        assert torch.equal(together, torch.cat([batch.data[0] for batch in whole.sets.b]))
        assert torch.equal(together, x[start : start + 32])
