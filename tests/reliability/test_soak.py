"""Long runs in short, and the command line, table and figure of ``python -m reliability``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from reliability.__main__ import main
from reliability.records import appending, read

from reliability import soak

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("number", range(2))
def test_a_hundredth_of_a_long_run(number: int) -> None:
    record = soak.trial(soak.CASES[number], number, share=0.01)
    assert record["steps"] == 50
    assert len(record["at"]) == len(record["resident"]) == 50
    assert record["last_loss"] < record["first_loss"]
    assert "why" not in record or "memory grew" in record["why"]  # so few steps are a warm-up


def test_what_grows_is_noticed() -> None:
    flat = {"steps": 100, "resident": [10 << 20] * 100, "descriptors": [5] * 100, "threads": [1] * 100}
    assert soak.judged(flat) == []
    assert soak.judged({**flat, "resident": [5 << 20] * 9 + [10 << 20] * 91}) == []  # while it warms up
    assert "memory grew by 3.5 MiB" in soak.judged({**flat, "resident": [i * 46_000 for i in range(100)]})[0]
    assert soak.judged({**flat, "descriptors": [5] * 99 + [6]}) == ["descriptors grew from 5 to 6"]
    assert soak.judged({**flat, "threads": [1] * 50 + [2] * 50}) == ["threads grew from 1 to 2"]


def recorded(path: Path, **changes: Any) -> None:
    record = {"kind": "kill", "case": "kill, one process", "outcome": "ended", "lost": False, "seed": 0, "times": 5}
    with appending(path) as append:
        append({**record, **changes})


def test_records_survive_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "kills.jsonl"
    for seed in (0, 1, 1):
        recorded(path, seed=seed)
    with path.open("a") as file:
        file.write('{"kind": "ki')
    assert [record["seed"] for record in read(path)] == [0, 1]
    recorded(path, seed=2)
    assert [record["seed"] for record in read(path)] == [0, 1, 2]


def test_trials_that_are_there_are_passed_over(tmp_path: Path) -> None:
    arguments = ["checkpoints", "--results", str(tmp_path), "--quiet", "--count"]
    assert main([*arguments, "2"]) == 0
    first = (tmp_path / "checkpoints.jsonl").read_text()
    assert main([*arguments, "3"]) == 0
    lines = (tmp_path / "checkpoints.jsonl").read_text()
    assert lines.startswith(first)
    assert [json.loads(line)["seed"] for line in lines.splitlines()] == [0, 1, 2]
    recorded(tmp_path / "checkpoints.jsonl", kind="checkpoint", seed=2, lost=True)
    assert main([*arguments, "3"]) == 1  # what was lost stays so
    with pytest.raises(SystemExit, match="--count 0: must be at least 1"):
        main([*arguments, "0"])


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="There are no records"):
        main(["table", "--results", str(tmp_path)])
    for seed in range(3):
        recorded(tmp_path / "kills.jsonl", seed=seed)
    recorded(tmp_path / "checkpoints.jsonl", kind="checkpoint", case="bits flipped, file", outcome="refused", times=0)
    recorded(tmp_path / "problems.jsonl", kind="problem", case="conv", outcome="improved", lost=True, times=0)
    assert main(["table", "--results", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "| **trainings disturbed** | 3 (15 times) | 3 ended | **0** |" in text
    assert "| bits flipped | 1 | 1 refused | 0 |" in text
    assert "1 random problems, 1 damaged or crafted checkpoints, 15 kills by SIGKILL" in text
    assert text.strip().endswith("Lost: 1.")
    assert main(["pack", "--results", str(tmp_path)]) == 0
    assert [record["seed"] for record in read(tmp_path / "kills.jsonl")] == [0, 1, 2]
    assert len((tmp_path / "kills.jsonl").read_text().splitlines()) == 1
    assert main(["table", "--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out == text
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- /table -->\nafter\n")
    assert main(["table", "--results", str(tmp_path), "--into", str(page)]) == 0
    assert page.read_text().startswith("before\n<!-- table -->\n\n| tried |")
    assert "old" not in page.read_text()


def test_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match="no long runs"):
        main(["figure", "--results", str(tmp_path)])
    for seed, steps in enumerate((5000, 200)):
        curve = {"at": [*range(0, steps, steps // 10)], "resident": [10 << 20] * 10, "steps": steps, "parameters": 61}
        recorded(tmp_path / "soak.jsonl", kind="soak", case=f"{steps} steps, KSD, sets", seed=seed, **curve)
    assert main(["figure", "--results", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "reliability-memory.png").stat().st_size > 10_000
