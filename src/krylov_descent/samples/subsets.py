"""The sample sets of one step: A for the gradient, B for the curvature, C for the search.

``SampleSet`` holds the indices of a set, in shards and micro-batches; ``Subsets`` draws the three sets; ``Draw`` loads
them.

Deviation from the paper (8 of krylov/step.py): with fewer than 2K samples A = B = C, unless ``fraction`` is given.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch

from krylov_descent.samples.interface import Choice, Microbatch, SamplePolicy
from krylov_descent.samples.loading import Device, Indices, Source, same_values, source_of
from krylov_descent.samples.permutation import permute

__all__ = ["Draw", "Microbatch", "Subsets"]


@dataclasses.dataclass(frozen=True)
class SampleSet:
    """One shard of the positions [start, stop) in the permutation of ``key``, or in the natural order if it is None."""

    start: int
    stop: int
    population: int
    batch_size: int
    shard: int
    of_shards: int
    key: tuple[int, int] | None

    @property
    def size(self) -> int:
        """The number of samples in all shards."""
        return self.stop - self.start

    def chunks(self) -> list[range]:
        """Return the positions of each micro-batch; the sizes of shards differ by at most one."""
        positions = range(self.start, self.stop)
        i, j = (self.size * shard // self.of_shards for shard in (self.shard, self.shard + 1))
        return [positions[k : min(j, k + self.batch_size)] for k in range(i, j, self.batch_size)]

    def indices(self, positions: range) -> Indices:
        """Return the indices of the samples at these positions."""
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
        # The function must not refer to the source: workers in a reference cycle end late.
        batches = self.source.load(lambda i: (sample_set.indices(chunks[i]),), range(len(chunks)))
        for positions, (batch,) in zip(chunks, batches, strict=True):
            yield Microbatch(batch, len(positions), positions.start - sample_set.start)


_PROBE_SAMPLES = 64
_PARTS = 16
_FEW = 8  # most micro-batches of an A that is kept in memory
_RANDOM_SAMPLES = (
    "The data set is random: the same samples, loaded twice, have different values (random augmentation). A is loaded "
    "anew at every pass, so that a step may be undone, or kept, by chance. Draw random numbers once for each index "
    "(torch.Generator().manual_seed(index) in __getitem__), or use rollback=False."
)


@dataclasses.dataclass(frozen=True)
class SubsetsState:
    """The number of times that C was doubled."""

    search_growth: int = 0


class Subsets(SamplePolicy):
    """Draws the sets A (gradient), B (curvature) and C (search) at every step.

    With N samples and a Krylov dimension K, B and C hold N/K samples each, or the given ``fraction``, and at most
    half. They are disjoint from each other, not from A, and redrawn at every step. The sets depend on ``seed`` and
    the iteration alone, so a new Subsets continues a resumed run.

    Small data: without ``fraction`` and with N < 2K, a set of N/K would hold fewer than two samples, so A, B and C
    then hold all samples. A given ``fraction`` is always honoured, with B and C disjoint, unless N = 1, when each
    set is the one sample.

    With several ranks, each rank gets an equal share of the sets, up to one sample; together they are the sets of a
    single process.

    Worker processes start at the first use, serve all later sets, and end when the Subsets and its draws are
    garbage-collected.

    Args:
        data: a tensor, a TensorDataset, or a tuple or list of tensors with equal first dimension, which are
            indexed directly and give a tensor or a tuple of tensors; or any map-style dataset, which is
            loaded by a DataLoader; or other Subsets, for the same data loaded in the same way.
        batch_size: the largest number of samples in a micro-batch, as many as one forward pass has memory for.
        fraction: the fraction of the samples in B, and in C before growth; None for 1/K.
        gradient_fraction: the fraction of the samples in A.
        seed: any integer.
        collate_fn: makes a batch out of a list of samples; None for the DataLoader's default.
        num_workers: the number of processes that load a dataset; tensors need none.
        device: the device of the tensors in a batch, also inside tuples, lists and mappings; None to leave
            them where they are. Other objects are left as they are.

    Raises:
        ValueError: if an argument is out of range, or the data cannot be indexed by sample.

    Example:
        >>> import torch

        >>> inputs, targets = torch.randn(100, 3), torch.randn(100)
        >>> subsets = Subsets((inputs, targets), batch_size=32, seed=0)
        >>> draw = subsets.draw(0, krylov_dim=10)
        >>> draw.sizes
        {'A': 100, 'B': 10, 'C': 10}
        >>> [microbatch.samples for microbatch in draw.a]
        [32, 32, 32, 4]
    """

    State: ClassVar[type[Any]] = SubsetsState

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int = 512,
        fraction: float | None = None,
        gradient_fraction: float = 1.0,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        device: Device = None,
    ) -> None:
        _require_integer("batch_size", batch_size, 1, "Pass how many samples fit one forward pass.")
        _require_integer("seed", seed, None, "Pass an integer, for example seed=0.")
        _require_integer("num_workers", num_workers, 0, "Pass 0 to load in this process.")
        if fraction is not None and not 0 < fraction <= 0.5:
            raise ValueError(
                f"fraction is {fraction!r}, but B and C are disjoint, so it lies in (0, 0.5]. "
                "Pass such a number, or None for 1/krylov_dim."
            )
        if not 0 < gradient_fraction <= 1:
            raise ValueError(f"gradient_fraction is {gradient_fraction!r}, not in (0, 1]. Pass 1.0 for every sample.")
        self._source: Source
        self._size: int
        same = isinstance(data, Subsets)
        found = (data._source, data._size) if same else source_of(data, collate_fn, num_workers, device, seed)
        self._source, self._size = found
        self._batch_size = batch_size
        self._fraction = fraction
        self._gradient_fraction = gradient_fraction
        self._seed = seed
        self._fingerprint: int | None = None

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return (
            f"Subsets({self._size} samples, batch_size={self._batch_size}, fraction={self._fraction}, "
            f"gradient_fraction={self._gradient_fraction}, seed={self._seed})"
        )

    def choose(self, iteration: int, state: Any, *, krylov_dim: int, shard: int, of_shards: int) -> Choice:
        """Choose the sets of one step, with C doubled at each earlier rollback."""
        growth = state.search_growth
        sets = self.draw(iteration, krylov_dim=krylov_dim, search_growth=growth, shard=shard, of_shards=of_shards)
        return Choice(sets, state)

    def rolled_back(self, state: Any) -> Any:
        """Double C, which was too small to judge the step."""
        return SubsetsState(state.search_growth + 1)

    def fingerprint(self) -> int:
        """Return a number made of all tensors; 0 for a dataset, whose samples may be slow to load, or random."""
        if self._fingerprint is None:
            self._fingerprint = self._source.fingerprint()
        return self._fingerprint

    def interrupted(self) -> None:
        """Start new workers."""
        self._source.restart()

    def draw(
        self,
        iteration: int,
        *,
        krylov_dim: int,
        search_growth: int = 0,
        shard: int = 0,
        of_shards: int = 1,
    ) -> Draw:
        """Choose the sets of one step; nothing is loaded yet.

        Args:
            iteration: the number of the step: the same number gives the same sets.
            krylov_dim: K, the dimension of the subspace.
            search_growth: how often C was doubled; C stays disjoint from B.
            shard: the index of the shard of each set, from 0.
            of_shards: the number of shards of each set.

        Returns:
            The sets, ready to be iterated.

        Raises:
            ValueError: if an argument is not an integer or is out of range.

        Example:
            >>> import torch

            >>> subsets = Subsets(torch.arange(12), batch_size=4, fraction=0.25, seed=0)
            >>> subsets.draw(3, krylov_dim=20, search_growth=1).sizes
            {'A': 12, 'B': 3, 'C': 6}
        """
        _require_integer("iteration", iteration, None, "Pass the number of the step.")
        _require_integer("krylov_dim", krylov_dim, 1, "Pass the dimension of the subspace, for example 20.")
        _require_integer("search_growth", search_growth, 0, "Pass how often C was doubled.")
        n = self._size
        cut = functools.partial(SampleSet, population=n, batch_size=self._batch_size, shard=shard, of_shards=of_shards)
        everything = cut(0, n, key=None)
        if n == 1 or (self._fraction is None and n < 2 * krylov_dim):
            return Draw(self._source, everything, everything, everything)

        # With K = 1 a fraction of 1/K would leave nothing for C.
        fraction = min(1 / krylov_dim, 0.5) if self._fraction is None else self._fraction
        size_b = max(1, round(fraction * n))
        doublings = min(search_growth, n.bit_length())  # more would not change the minimum below
        size_c = min(size_b << doublings, n - size_b)
        key = (self._seed, iteration)
        a = everything
        if self._gradient_fraction < 1:  # in the same permutation, so that a large enough A contains B and C
            a = cut(0, max(1, round(self._gradient_fraction * n)), key=key)
        return Draw(self._source, a, cut(0, size_b, key=key), cut(size_b, size_b + size_c, key=key))


class Draw:
    """The sets of one step, made by :meth:`Subsets.draw`.

    A is streamed from the source at every iteration; B and C are loaded at first use and kept as long as the
    Draw, since a step passes over them many times.

    Attributes:
        sizes: the number of samples in "A", "B" and "C".
        grows: whether the sets grow when noise demands it.

    Example:
        >>> import torch

        >>> draw = Subsets(torch.arange(6), batch_size=2, fraction=0.5, seed=0).draw(0, krylov_dim=4)
        >>> [microbatch.data.tolist() for microbatch in draw.a]
        [[0, 1], [2, 3], [4, 5]]
        >>> sorted(torch.cat([microbatch.data for microbatch in [*draw.b, *draw.c]]).tolist())
        [0, 1, 2, 3, 4, 5]
        >>> [microbatch.data.tolist() for microbatch in draw.probe]
        [[0, 1], [0], [1]]
    """

    def __init__(
        self,
        source: Source,
        a: SampleSet,
        b: SampleSet,
        c: SampleSet,
        *,
        statistics: SampleSet | None = None,
        grows: bool = False,
    ) -> None:
        self.grows = grows
        self.sizes: dict[str, int] = {"A": a.size, "B": b.size, "C": c.size}
        self._source = source
        self._a, self._b, self._c = a, b, c
        self._statistics = b if statistics is None else statistics

    @property
    def coverage(self) -> float:
        """The fraction of all samples that is in A."""
        return self._a.size / self._a.population

    @property
    def covers_all(self) -> bool:
        """Whether A is all samples, so that losses on it compare from step to step."""
        return self._a.size == self._a.population

    @property
    def searches_all(self) -> bool:
        """Whether C is A, so that a step cannot raise the loss on A."""
        return self._c is self._a

    @property
    def searches_b(self) -> bool:
        """Whether C is B, so that one pass serves both."""
        return self._c is self._b

    @property
    def holds_out(self) -> bool:
        """Whether C has samples outside of A, so that it judges steps that A's samples make."""
        return self._c.stop > self._a.stop

    @property
    def a(self) -> Iterable[Microbatch]:
        """The micro-batches of A; every iteration loads them anew and may be interleaved with others.

        A small A of growing sets is kept as long as the Draw, since a rollback iterates over it again.
        """
        few = self._a.size <= _FEW * self._a.batch_size
        return self._kept_a if self.grows and few else Stream(self._source, self._a)

    @functools.cached_property
    def _kept_a(self) -> Sequence[Microbatch]:
        return list(Stream(self._source, self._a))

    @property
    def a_in_parts(self) -> Iterable[Microbatch]:
        """A in at least 16 micro-batches if it has the samples, to estimate the variance of a loss."""
        size = min(self._a.batch_size, -(-self._a.size // _PARTS))
        return Stream(self._source, dataclasses.replace(self._a, batch_size=size))

    @functools.cached_property
    def b(self) -> Sequence[Microbatch]:
        """The micro-batches of B, loaded at first use."""
        return list(Stream(self._source, self._b))

    @functools.cached_property
    def statistics(self) -> Sequence[Microbatch]:
        """The part of B from which a preconditioner takes its statistics, all of B by default; loaded at first use."""
        return self.b if self._statistics is self._b else list(Stream(self._source, self._statistics))

    @functools.cached_property
    def c(self) -> Sequence[Microbatch]:
        """The micro-batches of C, loaded at first use; those of B if both are one set."""
        return self.b if self._c is self._b else list(Stream(self._source, self._c))

    @functools.cached_property
    def probe(self) -> tuple[Microbatch, Microbatch, Microbatch] | None:
        """The first samples of A, at most 64, as one batch and as its two halves; None for a single sample.

        Each sample is loaded once, at first use, so that random augmentation is the same in the halves and the whole.
        """
        samples = min(_PROBE_SAMPLES, self._a.batch_size, self._a.size)
        indices = self._a.indices(range(self._a.start, self._a.start + samples))
        half = len(indices) // 2
        if half == 0:
            return None
        (parts,) = self._source.load(lambda _: (indices, indices[:half], indices[half:]), range(1))
        whole, first, second = parts
        return (
            Microbatch(whole, len(indices)),
            Microbatch(first, half),
            Microbatch(second, len(indices) - half),
        )

    def warn_if_random(self) -> None:
        """Warn if two samples differ when loaded again, unless the sets grow."""
        if self.grows:
            return
        indices = self._a.indices(range(self._a.start, self._a.start + min(2, self._a.size)))
        one, another = (next(iter(self._source.load(lambda _: (indices,), range(1)))) for _ in range(2))
        if not same_values(one, another):
            warnings.warn(_RANDOM_SAMPLES, stacklevel=6)


def _require_integer(name: str, value: object, least: int | None, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, not an integer. {remedy}")
    if least is not None and value < least:
        raise ValueError(f"{name} is {value}, but at least {least} is needed. {remedy}")
