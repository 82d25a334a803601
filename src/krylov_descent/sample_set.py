"""A sample set as numbers: which samples it holds, cut into shards and micro-batches, and the stream of these."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from krylov_descent.loading import Indices, Source
from krylov_descent.permutation import permute


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """A part of a sample set small enough for one forward pass.

    Attributes:
        data: what the closure is called with.
        samples: how many samples it holds; None if only the closure knows.
        position: of its first sample in the set.

    Example:
        >>> import torch
        >>> from krylov_descent.sample_set import Microbatch
        >>> Microbatch(data=torch.zeros(3, 2), samples=3).samples
        3
    """

    data: Any
    samples: int | None
    position: int = 0


@dataclasses.dataclass(frozen=True)
class SampleSet:
    """Positions [start, stop) of the permutation of ``key``, or of the natural order; one shard of them in chunks."""

    start: int
    stop: int
    population: int
    batch_size: int
    shard: int
    of_shards: int
    key: tuple[int, int] | None

    @property
    def size(self) -> int:
        """Samples in all shards."""
        return self.stop - self.start

    def chunks(self) -> list[range]:
        """Positions of each micro-batch; no shard is larger than another by over one."""
        positions = range(self.start, self.stop)
        i, j = (self.size * shard // self.of_shards for shard in (self.shard, self.shard + 1))
        return [positions[k : min(j, k + self.batch_size)] for k in range(i, j, self.batch_size)]

    def indices(self, positions: range) -> Indices:
        """Of the samples at these positions."""
        if self.key is None:
            return positions
        return permute(torch.arange(positions.start, positions.stop, device="cpu"), self.population, *self.key)


@dataclasses.dataclass(frozen=True)
class Stream:
    """The micro-batches of a set, loaded anew at each iteration."""

    source: Source
    sample_set: SampleSet

    def __len__(self) -> int:
        return len(self.sample_set.chunks())

    def __iter__(self) -> Iterator[Microbatch]:
        sample_set = self.sample_set
        chunks = sample_set.chunks()
        # The function must not hold the source, which keeps it: workers found in a reference cycle end late.
        batches = self.source.load(lambda i: (sample_set.indices(chunks[i]),), range(len(chunks)))
        for positions, (batch,) in zip(chunks, batches, strict=True):
            yield Microbatch(batch, len(positions), positions.start - sample_set.start)
