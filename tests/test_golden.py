"""The recorder of golden runs: the same run gives the same bits, and one changed number is found and named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden import GOLDEN, compare, differences, trained


def test_a_run_repeats_to_the_bit_and_a_changed_number_is_named() -> None:
    steps, again = (trained(GOLDEN["paper"], None) for _ in range(2))
    assert list(differences(steps, again)) == []
    again[3]["loss"] *= 1 + 2.0**-52
    (found,) = differences(steps, again)
    assert found.startswith("loss from step 3")


def test_differences_fail_unless_they_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {name: [{"θ": "a", "loss": 1.0}] for name in GOLDEN}
    head = {**base, "paper": [{"θ": "b", "loss": 1.0}], "DEEP": "TypeError: no such argument"}
    files = tmp_path / "base.json", tmp_path / "head.json"
    for path, runs in zip(files, (base, head), strict=True):
        path.write_text(json.dumps(runs))
    assert compare(*files, set()) == 2
    assert compare(*files, {"paper", "DEEP"}) == 0
    said = capsys.readouterr().out
    assert "DIFFERS: θ from step 0" in said
    assert "CANNOT BE MADE: TypeError" in said
