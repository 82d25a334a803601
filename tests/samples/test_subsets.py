"""The sets A, B and C: their sizes, their samples, how often they are loaded, and by whom."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from krylov_descent.samples.subsets import Draw, Microbatch, Subsets

# Forking a process with threads is what DataLoader does on Linux; newer versions of Python warn about it.
workers = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class Squares(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is (i, i²); counts how often each one is read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads.append(index)
        return torch.tensor(index), torch.tensor(float(index) ** 2)


class Records(Squares):
    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor([float(index)]), "name": f"sample {index}"}


class Indices(Squares):
    def __getitem__(self, index: int) -> Any:
        return index, 0


class Noisy(Squares):
    """Every reading of a sample differs, as with random augmentation."""

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return torch.tensor([index, len(self.reads)])


class Faulty(Squares):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 13:
            raise KeyError("sample 13 is broken")
        return super().__getitem__(index)


class Batched(Squares):
    """Reads many samples at once, as DataLoader allows."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        self.reads.append(-len(indices))
        return [(torch.tensor(index), torch.tensor(float(index) ** 2)) for index in indices]


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(10)


class Pair(NamedTuple):
    x: Tensor
    note: str


class Nest(NamedTuple):
    mapping: OrderedDict[str, Any]
    size: int
    nothing: None


def as_pairs(samples: list[Any]) -> Pair:
    return Pair(torch.stack([x for x, _ in samples]), "collated")


def as_packed(samples: list[Any]) -> Any:
    return pack_sequence([x.expand(2).float() for x, _ in samples])


def squares(size: int) -> tuple[Tensor, Tensor]:
    index = torch.arange(size)
    return index, index.double().square().float()


def samples_of(batches: Iterable[Microbatch]) -> list[int]:
    """The indices in a set over tensors or datasets whose first entry is the index."""
    first = [batch.data if isinstance(batch.data, Tensor) else batch.data[0] for batch in batches]
    return [int(index) for part in first for index in part]


def counts_of(batches: Iterable[Microbatch]) -> list[int]:
    return [batch.samples for batch in batches if batch.samples is not None]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return len(one) == len(other) and all(equal(x, y) for x, y in zip(one, other, strict=True))


def data_of(batches: Iterable[Microbatch]) -> list[Any]:
    return [batch.data for batch in batches]


# Which samples


@settings(deadline=None, max_examples=60)
@given(
    n=st.integers(2, 300),
    fraction=st.floats(0.001, 0.5),
    growth=st.integers(0, 70),
    batch_size=st.integers(1, 400),
    seed=st.integers(),
    iteration=st.integers(0, 10**9),
)
def test_sizes_are_as_stated_and_b_and_c_are_disjoint(
    n: int, fraction: float, growth: int, batch_size: int, seed: int, iteration: int
) -> None:
    subsets = Subsets(torch.arange(n), batch_size=batch_size, fraction=fraction, seed=seed)
    draw = subsets.draw(iteration, krylov_dim=20, search_growth=growth)
    size_b = max(1, round(fraction * n))
    assert draw.sizes == {"A": n, "B": size_b, "C": min(size_b * 2**growth, n - size_b)}
    a, b, c = (samples_of(batches) for batches in (draw.a, draw.b, draw.c))
    assert {"A": len(a), "B": len(b), "C": len(c)} == draw.sizes
    assert a == list(range(n))
    assert len(set(b) | set(c)) == len(b) + len(c)
    assert set(b) | set(c) <= set(a)


@pytest.mark.parametrize(("n", "krylov_dim"), [(40, 20), (41, 20), (10_007, 20), (3, 1), (100, 1), (9, 2)])
def test_without_a_fraction_b_and_c_hold_one_in_krylov_dim_but_at_most_half(n: int, krylov_dim: int) -> None:
    draw = Subsets(torch.arange(n), batch_size=1000, seed=0).draw(0, krylov_dim=krylov_dim)
    size_b = round(min(1 / krylov_dim, 0.5) * n)
    assert draw.sizes == {"A": n, "B": size_b, "C": min(size_b, n - size_b)}
    assert not set(samples_of(draw.b)) & set(samples_of(draw.c))


def test_an_odd_size_is_cut_into_uneven_microbatches() -> None:
    draw = Subsets(squares(10_007), batch_size=1000, fraction=0.25, seed=1).draw(0, krylov_dim=20)
    assert counts_of(draw.a) == [1000] * 10 + [7]
    assert counts_of(draw.b) == counts_of(draw.c) == [1000, 1000, 502]
    assert sorted(samples_of(draw.a)) == list(range(10_007))
    for batch in [*draw.a, *draw.b, *draw.c]:
        assert len(batch.data[0]) == len(batch.data[1]) == batch.samples


def test_the_sets_do_not_depend_on_the_microbatches() -> None:
    draws = [Subsets(torch.arange(100), batch_size=size, seed=3).draw(5, krylov_dim=4) for size in (1, 7, 100)]
    assert len({tuple(samples_of(draw.b)) for draw in draws}) == 1
    assert len({tuple(samples_of(draw.c)) for draw in draws}) == 1


def test_sets_are_redrawn_at_each_iteration_and_come_to_cover_the_data() -> None:
    subsets = Subsets(torch.arange(200), batch_size=50, seed=0)
    draws = [subsets.draw(iteration, krylov_dim=10) for iteration in range(120)]
    assert len({tuple(samples_of(draw.b)) for draw in draws}) == len(draws)
    assert {index for draw in draws for index in samples_of(draw.b)} == set(range(200))
    assert {index for draw in draws for index in samples_of(draw.c)} == set(range(200))


def test_another_seed_draws_other_sets() -> None:
    chosen = [
        samples_of(Subsets(torch.arange(200), batch_size=50, seed=seed).draw(0, krylov_dim=10).b)
        for seed in (0, 1, -1, 2**70)
    ]
    assert len({tuple(indices) for indices in chosen}) == 4


def test_a_fresh_subsets_continues_with_the_same_sets() -> None:
    first = Subsets(squares(500), batch_size=32, gradient_fraction=0.4, seed=9)
    for iteration in range(3):
        list(first.draw(iteration, krylov_dim=10).a)
    fresh = Subsets(squares(500), batch_size=32, gradient_fraction=0.4, seed=9)
    one, other = first.draw(3, krylov_dim=10), fresh.draw(3, krylov_dim=10)
    for name in "abc":
        assert equal(data_of(getattr(one, name)), data_of(getattr(other, name)))


def test_growth_extends_c_and_leaves_b_alone() -> None:
    subsets = Subsets(torch.arange(100), batch_size=10, fraction=0.1, seed=0)
    draws = [subsets.draw(0, krylov_dim=20, search_growth=growth) for growth in range(6)]
    assert [draw.sizes["C"] for draw in draws] == [10, 20, 40, 80, 90, 90]
    assert all(samples_of(draw.b) == samples_of(draws[0].b) for draw in draws)
    for smaller, larger in itertools.pairwise(draws):
        assert set(samples_of(smaller.c)) <= set(samples_of(larger.c))


def test_any_amount_of_growth_is_fine() -> None:
    subsets = Subsets(torch.arange(10), batch_size=10, fraction=0.1, seed=0)
    assert subsets.draw(0, krylov_dim=20, search_growth=10**12).sizes["C"] == 9


def test_part_of_the_data_for_the_gradient_contains_b_and_c_when_it_can() -> None:
    subsets = Subsets(torch.arange(1000), batch_size=64, fraction=0.1, gradient_fraction=0.3, seed=0)
    draw = subsets.draw(2, krylov_dim=20)
    assert draw.sizes == {"A": 300, "B": 100, "C": 100}
    a = samples_of(draw.a)
    assert len(set(a)) == 300
    assert set(samples_of(draw.b)) | set(samples_of(draw.c)) <= set(a)
    assert a != samples_of(subsets.draw(3, krylov_dim=20).a)
    assert not draw.covers_all


def test_the_smallest_gradient_set_has_one_sample() -> None:
    draw = Subsets(torch.arange(50), batch_size=8, gradient_fraction=1e-9, seed=0).draw(0, krylov_dim=5)
    assert draw.sizes["A"] == 1
    assert len(samples_of(draw.a)) == 1


@pytest.mark.parametrize("n", [1, 2, 19, 39])
def test_small_data_without_a_fraction_is_used_whole(n: int) -> None:
    subsets = Subsets(squares(n), batch_size=16, gradient_fraction=0.5, seed=0)
    draw = subsets.draw(0, krylov_dim=20, search_growth=2)
    assert draw.sizes == {"A": n, "B": n, "C": n}
    assert samples_of(draw.a) == samples_of(draw.b) == samples_of(draw.c) == list(range(n))
    assert draw.covers_all
    assert draw.searches_all


def test_from_twice_the_krylov_dimension_on_the_sets_are_parts() -> None:
    draw = Subsets(torch.arange(40), batch_size=16, seed=0).draw(0, krylov_dim=20)
    assert draw.sizes == {"A": 40, "B": 2, "C": 2}
    assert draw.covers_all
    assert not draw.searches_all


def test_a_given_fraction_is_honoured_on_small_data() -> None:
    draw = Subsets(torch.arange(2), batch_size=16, fraction=0.5, seed=0).draw(0, krylov_dim=20)
    assert draw.sizes == {"A": 2, "B": 1, "C": 1}
    assert sorted(samples_of(draw.b) + samples_of(draw.c)) == [0, 1]


def test_a_single_sample_is_every_set() -> None:
    draw = Subsets(torch.arange(1), batch_size=16, fraction=0.5, seed=0).draw(0, krylov_dim=20)
    assert draw.sizes == {"A": 1, "B": 1, "C": 1}
    assert draw.probe is None


# From which source


def test_a_dataset_gives_what_its_tensors_give() -> None:
    options: dict[str, Any] = {"batch_size": 7, "gradient_fraction": 0.6, "seed": 4}
    tensors = Subsets(squares(100), **options).draw(1, krylov_dim=5)
    dataset = Subsets(Squares(100), **options).draw(1, krylov_dim=5)
    assert tensors.sizes == dataset.sizes
    for name in "abc":
        one, other = list(getattr(tensors, name)), list(getattr(dataset, name))
        assert equal(data_of(one), data_of(other))
        assert counts_of(one) == counts_of(other)
    assert tensors.probe is not None
    assert dataset.probe is not None
    assert equal(data_of(tensors.probe), data_of(dataset.probe))


@pytest.mark.parametrize("container", [tuple, list, lambda columns: TensorDataset(*columns)])
def test_several_tensors_give_tuples(container: Any) -> None:
    draw = Subsets(container(squares(20)), batch_size=8, seed=0).draw(0, krylov_dim=4)
    assert all(type(batch.data) is tuple for batch in [*draw.a, *draw.b])
    assert samples_of(draw.a) == list(range(20))


def test_one_tensor_gives_tensors() -> None:
    draw = Subsets(torch.arange(20), batch_size=8, seed=0).draw(0, krylov_dim=4)
    assert all(isinstance(batch.data, Tensor) for batch in [*draw.a, *draw.b])


def test_all_of_a_tensor_is_streamed_without_a_copy() -> None:
    x = torch.randn(20, 3)
    for batch in Subsets((x,), batch_size=8, seed=0).draw(0, krylov_dim=4).a:
        assert batch.data[0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_a_redefined_tensor_dataset_keeps_its_own_samples() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return tuple(2 * tensor[index] for tensor in self.tensors)

    draw = Subsets(Doubled(torch.arange(10)), batch_size=4, seed=0).draw(0, krylov_dim=2)
    assert samples_of(draw.a) == list(range(0, 20, 2))


def test_a_list_of_samples_and_an_array_are_datasets() -> None:
    pairs = Subsets([(i, float(i)) for i in range(10)], batch_size=4, seed=0).draw(0, krylov_dim=2)
    assert samples_of(pairs.a) == list(range(10))
    array = Subsets(np.arange(10), batch_size=4, seed=0).draw(0, krylov_dim=2)
    assert samples_of(array.a) == list(range(10))


def test_mappings_are_batched() -> None:
    draw = Subsets(Records(10), batch_size=4, seed=0).draw(0, krylov_dim=2)
    first = next(iter(draw.a))
    assert first.data["name"] == [f"sample {i}" for i in range(4)]
    assert first.data["x"].tolist() == [[0.0], [1.0], [2.0], [3.0]]
    assert first.samples == 4


@pytest.mark.parametrize("source", [Squares(10), squares(10), TensorDataset(*squares(10))])
def test_a_collate_function_receives_the_samples(source: Any) -> None:
    draw = Subsets(source, batch_size=4, seed=0, collate_fn=as_pairs).draw(0, krylov_dim=2)
    batches = list(draw.a)
    assert all(isinstance(batch.data, Pair) for batch in batches)
    assert [batch.data.x.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert counts_of(batches) == [4, 4, 2]


def test_a_collate_function_for_one_tensor_receives_its_rows() -> None:
    draw = Subsets(torch.arange(5), batch_size=2, seed=0, collate_fn=len).draw(0, krylov_dim=2)
    assert data_of(draw.a) == [2, 2, 1]


def test_samples_are_read_together_where_the_dataset_can() -> None:
    dataset = Batched(10)
    draw = Subsets(dataset, batch_size=4, seed=0).draw(0, krylov_dim=2)
    assert samples_of(draw.a) == list(range(10))
    assert dataset.reads == [-4, -4, -2]


def test_length_is_that_of_the_data() -> None:
    assert len(Subsets(squares(17), batch_size=4, seed=0)) == len(Subsets(Squares(17), batch_size=4, seed=0)) == 17


# How often


def test_b_and_c_are_loaded_once_and_a_each_time() -> None:
    dataset = Squares(100)
    draw = Subsets(dataset, batch_size=8, seed=0).draw(0, krylov_dim=5)
    assert dataset.reads == []
    for _ in range(3):
        list(draw.b)
    assert len(dataset.reads) == 20
    for _ in range(3):
        list(draw.c)
    assert len(set(dataset.reads)) == len(dataset.reads) == 40
    assert samples_of(draw.a) == samples_of(draw.a) == list(range(100))
    assert len(dataset.reads) == 240
    stream = draw.a
    assert samples_of(stream) == samples_of(stream)


def test_b_and_c_are_loaded_once_together_where_they_are_everything() -> None:
    dataset = Squares(5)
    draw = Subsets(dataset, batch_size=8, seed=0).draw(0, krylov_dim=5)
    assert samples_of(draw.b) == samples_of(draw.c)
    assert len(dataset.reads) == 5


@pytest.mark.parametrize(
    ("n", "batch_size", "sizes"),
    [(1000, 100, [64, 32, 32]), (1000, 9, [9, 4, 5]), (50, 100, [50, 25, 25]), (2, 2, [2, 1, 1])],
)
def test_the_probe_is_a_small_batch_and_its_halves(n: int, batch_size: int, sizes: list[int]) -> None:
    for source in (squares(n), Squares(n)):
        probe = Subsets(source, batch_size=batch_size, seed=0).draw(0, krylov_dim=5).probe
        assert probe is not None
        assert counts_of(probe) == sizes
        whole, first, second = ([batch] for batch in probe)
        assert samples_of(whole) == samples_of(first) + samples_of(second) == list(range(sizes[0]))


@pytest.mark.parametrize(("n", "batch_size", "share"), [(1, 8, 1.0), (100, 1, 1.0), (100, 8, 0.01)])
def test_there_is_no_probe_of_a_single_sample(n: int, batch_size: int, share: float) -> None:
    subsets = Subsets(torch.arange(n), batch_size=batch_size, gradient_fraction=share, seed=0)
    assert subsets.draw(0, krylov_dim=5).probe is None


def test_the_probe_reads_each_sample_once() -> None:
    dataset = Noisy(100)
    draw = Subsets(dataset, batch_size=8, seed=0).draw(0, krylov_dim=5)
    assert dataset.reads == []
    assert draw.probe is not None
    assert draw.probe is draw.probe
    assert dataset.reads == list(range(8))
    whole, first, second = data_of(draw.probe)
    assert torch.equal(whole, torch.cat([first, second]))


# By which process


@workers
def test_workers_give_the_same_as_this_process() -> None:
    alone = Subsets(Squares(103), batch_size=5, gradient_fraction=0.7, seed=2)
    helped = Subsets(Squares(103), batch_size=5, gradient_fraction=0.7, seed=2, num_workers=2)
    processes, others = set(), {process.pid for process in multiprocessing.active_children()}
    for iteration in range(3):
        one, other = alone.draw(iteration, krylov_dim=6), helped.draw(iteration, krylov_dim=6)
        for name in ("a", "b", "c", "a", "probe"):
            assert equal(data_of(getattr(one, name)), data_of(getattr(other, name)))
        processes |= {process.pid for process in multiprocessing.active_children()} - others
    assert len(processes) == 2


@workers
@pytest.mark.parametrize("num_workers", [0, 2])
def test_sets_may_be_loaded_while_others_are_iterated(num_workers: int) -> None:
    subsets = Subsets(Squares(60), batch_size=4, seed=0, num_workers=num_workers)
    plain = Subsets(squares(60), batch_size=4, seed=0).draw(0, krylov_dim=5)
    draw, later = subsets.draw(0, krylov_dim=5), subsets.draw(1, krylov_dim=5)
    seen: list[list[int]] = [[], [], []]
    for i, batches in enumerate(zip(draw.a, draw.a, later.a, strict=True)):
        for indices, batch in zip(seen, batches, strict=True):
            indices += samples_of([batch])
        if i == 3:
            assert samples_of(draw.b) == samples_of(plain.b)
        if i == 7:
            assert samples_of(draw.c) == samples_of(plain.c)
            assert draw.probe is not None
    assert seen == [list(range(60))] * 3


@workers
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_abandoned_iteration_leaves_nothing_behind(num_workers: int) -> None:
    draw = Subsets(Squares(60), batch_size=4, seed=0, num_workers=num_workers).draw(0, krylov_dim=5)
    abandoned = iter(draw.a)
    assert samples_of([next(abandoned)]) == [0, 1, 2, 3]
    assert samples_of(draw.a) == list(range(60))
    assert samples_of([next(abandoned)]) == [4, 5, 6, 7]


@workers
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_in_the_dataset_is_raised_and_later_sets_still_load(num_workers: int) -> None:
    subsets = Subsets(Faulty(40), batch_size=4, gradient_fraction=0.5, seed=0, num_workers=num_workers)
    draws = [subsets.draw(iteration, krylov_dim=20) for iteration in range(20)]
    tensors = Subsets(torch.arange(40), batch_size=4, gradient_fraction=0.5, seed=0)
    expected = [samples_of(tensors.draw(iteration, krylov_dim=20).a) for iteration in range(20)]
    assert any(13 in indices for indices in expected[:10])
    for draw, indices in zip(draws, expected, strict=True):
        if 13 in indices:
            with pytest.raises(KeyError, match="sample 13 is broken"):
                list(draw.a)
        else:
            assert samples_of(draw.a) == indices


@workers
def test_kept_batches_hold_no_shared_memory() -> None:
    draw = Subsets(Squares(60), batch_size=4, seed=0, num_workers=2).draw(0, krylov_dim=5)
    tensors: list[Any] = [tensor for batch in [*draw.b, *draw.c] for tensor in batch.data]
    assert len(tensors) == 12
    assert not any(tensor.is_shared() for tensor in tensors)


@workers
def test_workers_collate_mappings_and_named_tuples() -> None:
    record = next(iter(Subsets(Records(9), batch_size=4, seed=0, num_workers=1).draw(0, krylov_dim=2).a)).data
    assert record["name"] == [f"sample {i}" for i in range(4)]
    subsets = Subsets(Squares(9), batch_size=4, seed=0, num_workers=1, collate_fn=as_pairs)
    assert next(iter(subsets.draw(0, krylov_dim=2).a)).data.note == "collated"


@workers
def test_workers_end_with_the_subsets() -> None:
    before = set(multiprocessing.active_children())
    subsets = Subsets(Squares(60), batch_size=4, seed=0, num_workers=2)
    assert set(multiprocessing.active_children()) == before
    draw: Draw | None = subsets.draw(0, krylov_dim=5)
    assert draw is not None
    assert len(draw.b) == 3
    unfinished: Iterator[Microbatch] | None = iter(draw.a)
    assert unfinished is not None
    next(unfinished)
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 2
    del subsets, draw, unfinished  # not in a reference cycle, so no garbage collection is needed
    assert not any(process.is_alive() for process in started)


@workers
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_global_generator_is_untouched(num_workers: int) -> None:
    state = torch.get_rng_state()
    numbers = random.getstate()
    for source in (squares(60), Squares(60)):
        draw = Subsets(source, batch_size=4, seed=0, num_workers=num_workers).draw(0, krylov_dim=5)
        _ = list(draw.a), draw.b, draw.c, draw.probe
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == numbers


# On which device


@pytest.mark.parametrize("source", [squares(10), Squares(10)])
def test_tensors_are_moved_to_the_device(source: Any) -> None:
    draw = Subsets(source, batch_size=4, seed=0, device="meta").draw(0, krylov_dim=2)
    assert draw.probe is not None
    for batch in [*draw.a, *draw.b, *draw.c, *draw.probe]:
        assert [tensor.device.type for tensor in batch.data] == ["meta", "meta"]


def nest(samples: list[Any]) -> Any:
    x = torch.stack([x for x, _ in samples])
    return Nest(OrderedDict(inner=[x, (x, "text")]), len(samples), None)


def test_nested_batches_are_moved_and_other_objects_kept() -> None:
    draw = Subsets(Squares(10), batch_size=4, seed=0, device="meta", collate_fn=nest).draw(0, krylov_dim=2)
    batch = next(iter(draw.a)).data
    assert type(batch) is Nest
    assert type(batch.mapping) is OrderedDict
    inner, (deeper, text) = batch.mapping["inner"]
    assert inner.device.type == deeper.device.type == "meta"
    assert (batch.size, batch.nothing, text) == (4, None, "text")


def test_packed_sequences_are_moved() -> None:
    draw = Subsets(Squares(10), batch_size=4, seed=0, device="cpu", collate_fn=as_packed).draw(0, krylov_dim=2)
    assert next(iter(draw.a)).data.batch_sizes.tolist() == [4, 4]


@workers
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_default_device_does_not_matter(num_workers: int) -> None:
    expected = samples_of(Subsets(torch.arange(60), batch_size=4, seed=0).draw(0, krylov_dim=5).b)
    tensors = torch.arange(60)
    with torch.device("meta"):
        for source in (Indices(60), tensors):
            subsets = Subsets(source, batch_size=4, seed=0, collate_fn=as_numbers, num_workers=num_workers)
            assert [i for batch in subsets.draw(0, krylov_dim=5).b for i in batch.data] == expected
        assert data_of(Subsets(tensors, batch_size=4, seed=0).draw(0, krylov_dim=5).b)[0].device.type == "cpu"


def as_numbers(samples: list[Any]) -> list[int]:
    return [int(sample[0] if isinstance(sample, tuple) else sample) for sample in samples]


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"batch_size is 0, but at least 1 is needed\. Pass how many samples fit"),
        ({"batch_size": 2.5}, r"batch_size is 2\.5, not an integer"),
        ({"fraction": 0.0}, r"fraction is 0\.0, but B and C are disjoint, so it lies in \(0, 0\.5\]\. Pass"),
        ({"fraction": 0.51}, r"fraction is 0\.51, but"),
        ({"fraction": math.nan}, r"fraction is nan, but"),
        ({"gradient_fraction": 0}, r"gradient_fraction is 0, not in \(0, 1\]\. Pass 1\.0"),
        ({"gradient_fraction": 1.1}, r"gradient_fraction is 1\.1, not in"),
        ({"seed": 0.5}, r"seed is 0\.5, not an integer\. Pass an integer, for example seed=0"),
        ({"seed": None}, r"seed is None, not an integer"),
        ({"seed": True}, r"seed is True, not an integer"),
        ({"num_workers": -1}, r"num_workers is -1, but at least 0 is needed\. Pass 0"),
    ],
)
def test_rejects_arguments_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Subsets(torch.arange(10), **{"batch_size": 4, "seed": 0, **options})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Endless(), r"IterableDataset \(Endless\).*cannot be looked up by index\. Pass a map-style Dataset"),
        (torch.empty(0, 3), r"data holds 0 samples\. Pass at least one"),
        (Squares(0), r"data holds 0 samples"),
        ((), r"data holds 0 samples"),
        ([], r"data holds 0 samples"),
        ((torch.zeros(3, 2), torch.zeros(4)), r"shapes \[\(3, 2\), \(4,\)\].*must be the same\. Reshape"),
        (torch.tensor(1.0), r"shapes \[\(\)\]"),
        (
            (torch.zeros(3), np.zeros(3)),
            r"a tuple that holds ndarray where tensors are needed\. Convert with",
        ),
        ([torch.zeros(3), None], r"a list that holds NoneType where tensors are needed"),
        ({"x": torch.zeros(3)}, r"data is a dict, which cannot be indexed by 0, …, len\(data\)−1\. Pass"),
        (DataLoader(Squares(3)), r"data is a DataLoader.*for a DataLoader its dataset"),
        (iter([1, 2]), r"data is a list_iterator"),
        (None, r"data is a NoneType"),
    ],
)
def test_rejects_data_that_cannot_be_indexed_by_sample(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Subsets(data, batch_size=4, seed=0)


@pytest.mark.parametrize(
    ("iteration", "options", "message"),
    [
        (0.5, {"krylov_dim": 2}, r"iteration is 0\.5, not an integer"),
        (0, {"krylov_dim": 0}, r"krylov_dim is 0, but at least 1 is needed"),
        (0, {"krylov_dim": "20"}, r"krylov_dim is '20', not an integer"),
        (0, {"krylov_dim": 2, "search_growth": -1}, r"search_growth is -1, but at least 0 is needed"),
    ],
)
def test_draw_rejects_arguments_out_of_range(iteration: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Subsets(torch.arange(10), batch_size=4, seed=0).draw(iteration, **options)


def test_a_in_parts_has_enough_of_them_to_scatter_and_none_beyond_the_batch_size() -> None:
    for size, fraction, batch_size in ((400, 0.5, 100), (400, 0.5, 4), (10, 0.9, 100)):
        draw = Subsets(torch.arange(size), batch_size=batch_size, gradient_fraction=fraction, seed=0).draw(
            3, krylov_dim=5
        )
        parts = [part.data for part in draw.a_in_parts]
        assert sorted(torch.cat(parts).tolist()) == sorted(torch.cat([part.data for part in draw.a]).tolist())
        assert max(map(len, parts)) <= batch_size
        assert len(parts) >= min(9, draw.sizes["A"])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
)
def test_a_fingerprint_tells_values_and_their_order(dtype: torch.dtype) -> None:
    x = torch.arange(12).reshape(6, 2).sub(3).to(dtype)
    seen = {
        Subsets(t, batch_size=4, seed=0).fingerprint() for t in (x, x.flip(0), x * 0 if dtype == torch.bool else -x)
    }
    assert len(seen) == 3
    strided = x.t().contiguous().t()
    assert Subsets(strided, batch_size=4, seed=0).fingerprint() in seen
    assert Subsets(x[1:], batch_size=4, seed=0).fingerprint() not in seen
