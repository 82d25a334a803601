"""Long runs in short."""

from __future__ import annotations

import pytest
from reliability.methods import METHODS

from reliability import soak

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("method", METHODS)
def test_a_hundredth_of_a_long_run(method: str) -> None:
    outcome = soak.long_run(method, 0, share=0.01)
    assert len(outcome.told["resident"]) == outcome.times == outcome.told["steps"]
    assert outcome.told["last_loss"] < outcome.told["first_loss"]
    assert all("memory grew" in why for why in outcome.lost)  # so few steps are a warm-up


def test_what_grows_is_noticed() -> None:
    flat = {"steps": 100, "resident": [10 << 20] * 100, "descriptors": [5] * 100, "threads": [1] * 100}
    assert soak.judged(flat) == []
    assert soak.judged({**flat, "resident": [5 << 20] * 9 + [10 << 20] * 91}) == []  # while it warms up
    assert "memory grew by 3.5 MiB" in soak.judged({**flat, "resident": [i * 46_000 for i in range(100)]})[0]
    assert soak.judged({**flat, "descriptors": [5] * 99 + [6]}) == ["descriptors grew from 5 to 6"]
    assert soak.judged({**flat, "threads": [1] * 50 + [2] * 50}) == ["threads grew from 1 to 2"]
