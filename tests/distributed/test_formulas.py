"""What docs/appendix/scale.md says of memory and bytes on R ranks is what processes take and send."""

from __future__ import annotations

import pytest
from benchmarks import ranks

pytestmark = pytest.mark.nightly

K = 5
SIZES = (1_000_000, 4_000_000)


@pytest.mark.parametrize("R", [1, 2])
def test_memory_and_bytes_are_those_of_the_formulas(R: int) -> None:
    vectors, points = ranks.vectors(K, R, SIZES, steps=2)  # after a first one: every vector is there
    assert vectors == pytest.approx(ranks.formula_vectors(K, R), rel=0.1)
    for found in (rank for of_point in points for rank in of_point):
        assert found["basis"] == 4 * (K + 1) * -(-found["P"] // R)
        if R == 1:
            assert not any(step["bytes_sent"] for step in found["steps"]["plain"])
        elif any(step["accepted"] for step in found["steps"]["plain"]):
            ratios = ranks.byte_ratios(found, R)
            assert ratios["counted ÷ formula"].low == pytest.approx(1, rel=0.02)
            assert ratios["counted ÷ formula"].high == pytest.approx(1, rel=0.02)
            assert ratios["counted ÷ all-reduce"].high <= 1


def test_the_formulas() -> None:
    counts = {"rows": 21, "lines": 20, "iterations": 20}
    assert ranks.formula_bytes(100, 4, 4, **counts) == (2 * 21 + 2 * 20 + 4) * 4 * 100 * 3 / 4
    # A search takes at least an evaluation for each iteration, and one at its origin.
    assert ranks.formula_bytes(100, 4, 4, **counts) <= ranks.all_reduce_bytes(100, 4, 4, rows=21, evaluations=21)
    # Of the basis, a rank has 1/R; what is whole stays.
    for R in (2, 4, 8):
        assert ranks.formula_vectors(2000, R) - ranks.formula_vectors(1000, R) == pytest.approx(1000 / R)
    assert ranks.formula_vectors(20, 1 << 20) == pytest.approx(6, rel=1e-4)


def test_the_plan_is_printed() -> None:
    assert len(ranks.plan().splitlines()) == 2 + 9
