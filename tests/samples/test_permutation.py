"""The keyed permutation: bijective for every n, sparse in memory, uniform over keys."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from krylov_descent.samples.permutation import permute

KEYS = st.lists(st.integers(min_value=-(2**80), max_value=2**80), max_size=3)


@settings(deadline=None, max_examples=150)
@given(n=st.integers(min_value=1, max_value=2000), key=KEYS)
def test_is_a_bijection(n: int, key: list[int]) -> None:
    assert torch.equal(permute(torch.arange(n), n, *key).sort().values, torch.arange(n))


@pytest.mark.parametrize("n", [*range(1, 40), 99, 100, 101, 10_007, 2**17])
def test_is_a_bijection_around_squares_and_for_larger_sets(n: int) -> None:
    assert torch.equal(permute(torch.arange(n), n, 3, 5).sort().values, torch.arange(n))


@settings(deadline=None, max_examples=50)
@given(n=st.integers(min_value=1, max_value=2000), key=KEYS, data=st.data())
def test_each_position_is_mapped_by_itself(n: int, key: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(min_value=0, max_value=n - 1))
    whole = permute(torch.arange(n), n, *key)
    assert int(permute(torch.tensor(position), n, *key)) == int(whole[position])


@pytest.mark.parametrize("n", [10**12, 2**62])
def test_huge_sets_need_no_memory_of_their_size(n: int) -> None:
    # A list of all of them would take terabytes.
    positions = torch.cat([torch.arange(5000), torch.arange(n - 5000, n), torch.tensor([n // 2, n // 3])])
    images = permute(positions, n, 0, 0)
    assert int(images.min()) >= 0
    assert int(images.max()) < n
    assert len(set(images.tolist())) == len(positions)
    # Spread over the whole set, for consecutive positions too.
    octiles = torch.bincount(images[:5000] // (n // 8 + 1), minlength=8)
    assert stats.chisquare(octiles.numpy()).pvalue > 1e-6


def test_every_image_of_one_and_of_two_positions_is_equally_likely() -> None:
    n, keys = 10, 2000
    images = [tuple(permute(torch.arange(2), n, 17, iteration).tolist()) for iteration in range(keys)]
    singles = Counter(first for first, _ in images)
    pairs = Counter(images)
    assert stats.chisquare([singles[i] for i in range(n)]).pvalue > 1e-6
    assert stats.chisquare([pairs[pair] for pair in permutations(range(n), 2)]).pvalue > 1e-6


def test_every_permutation_of_three_is_equally_likely() -> None:
    seen = Counter(tuple(permute(torch.arange(3), 3, seed, 1).tolist()) for seed in range(600))
    assert stats.chisquare([seen[order] for order in permutations(range(3))]).pvalue > 1e-6


def test_different_keys_give_different_permutations() -> None:
    keys = [
        (),
        (0,),
        (1,),
        (-1,),
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (11,),
        (2**64,),
        (2**64 + 1,),
        (-(2**70), 3),
    ]
    images = {tuple(permute(torch.arange(1000), 1000, *key).tolist()) for key in keys}
    assert len(images) == len(keys)


def test_keys_of_neighbouring_iterations_are_unrelated() -> None:
    first, second = (permute(torch.arange(2000), 2000, 0, iteration).double() for iteration in (4, 5))
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.12  # five standard deviations


def test_the_mapping_is_fixed_for_good() -> None:
    # Stored runs resume with the same sets only if these never change.
    assert permute(torch.arange(10), 10, 0, 0).tolist() == [9, 6, 1, 5, 4, 2, 8, 7, 0, 3]
    assert permute(torch.arange(4), 10**12, 7, 123).tolist() == [
        576267977953,
        701816195897,
        240039637781,
        290788359213,
    ]


def test_shape_is_kept_and_arguments_are_not_changed() -> None:
    positions = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    images = permute(positions, 12, 1)
    assert images.shape == (3, 4)
    assert images.dtype == torch.int64
    assert torch.equal(positions, torch.arange(12, dtype=torch.int32).reshape(3, 4))
    assert permute(torch.empty(0, dtype=torch.int64), 12, 1).shape == (0,)


def test_a_key_may_have_any_number_of_digits() -> None:
    assert permute(torch.arange(5), 5, 10**6000).shape == (5,)


@pytest.mark.parametrize("n", [0, -3, 2**62 + 1])
def test_rejects_a_size_out_of_range(n: int) -> None:
    with pytest.raises(ValueError, match=rf"n is {n}, but a permutation needs 1 <= n"):
        permute(torch.arange(1), n, 0)


@pytest.mark.parametrize("position", [-1, 10])
def test_rejects_a_position_outside_the_set(position: int) -> None:
    with pytest.raises(ValueError, match=rf"positions span {position} to {position}, but must lie in \[0, 10\)"):
        permute(torch.tensor([position]), 10, 0)


def test_rejects_positions_that_are_not_integers() -> None:
    with pytest.raises(ValueError, match=r"positions are torch\.float32, not integers"):
        permute(torch.rand(3), 10, 0)
