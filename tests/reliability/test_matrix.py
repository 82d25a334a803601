"""The matrix of methods and faults: a quick trial of every cell, records, table, figure and the runner."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from reliability.__main__ import main
from reliability.matrix import FAULTS, Cell, cells, trial
from reliability.methods import METHODS, Training
from reliability.outcome import Outcome
from reliability.records import appending, read

from krylov_descent import checkpoint
from reliability import disturbances, files, kills, pool, problems

#: Faults whose trials start processes or take long.
SLOW = ("worker loss", "SIGKILL", "rank loss", "held-up process", "lying file", "long run")


def quick(method: str, fault: str) -> dict[str, Any]:
    if fault == "lying file":
        outcome = files.lying_file(method, files.PARTS)
        return {"lost": outcome.lost}
    return trial(method, fault, 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in SLOW])
def test_a_trial_of_a_cell(method: str, fault: str) -> None:
    record = quick(method, fault)
    assert not record["lost"], record


@pytest.mark.nightly
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fault", [fault for fault in SLOW if fault != "long run"])  # test_soak.py has a short one
def test_a_slow_trial_of_a_cell(method: str, fault: str) -> None:
    record = quick(method, fault)
    assert not record["lost"], record


def test_the_suite_has_enough_of_everything() -> None:
    wanted = list(cells([*FAULTS]))
    assert sum(fault == "odd problem" for fault, _, _ in wanted) == 2000
    assert sum(fault == "Ctrl-C" for fault, _, _ in wanted) * disturbances.INTERRUPTS >= 1000
    assert {(fault, method) for fault, method, _ in wanted} == {(f, m) for f in FAULTS for m in METHODS}
    assert len(list(cells([*FAULTS], 0.001))) == len(FAULTS) * len(METHODS)


# That the judges can tell


def test_a_step_that_is_left_half_done_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Training.step

    def spoiled(self: Training) -> Any:
        try:
            return step(self)
        except BaseException:
            next(self.model.buffers()).add_(1)
            raise

    monkeypatch.setattr(Training, "step", spoiled)
    assert "buffers changed by a step that was interrupted" in disturbances.ctrl_c("default", 0).lost[0]
    assert "buffers changed by a step that failed" in disturbances.other_thread("default", 0).lost
    monkeypatch.setattr(checkpoint, "save", lambda path, *_: Path(path).write_bytes(b"x"))
    with pytest.raises(ValueError, match=r"run\.safetensors"):
        disturbances.full_disk("default", 0)


# Records, table, figure


def recorded(path: Path, **changes: Any) -> None:
    record = {"fault": "SIGKILL", "method": "flow", "seed": 0, "outcome": "same bits", "lost": False, "times": 5}
    with appending(path) as append:
        append({**record, **changes})


def test_records_survive_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "matrix.jsonl"
    for seed in (0, 1, 1):
        recorded(path, seed=seed)
    with path.open("a") as file:
        file.write('{"fault": "SI')
    assert [record["seed"] for record in read(path)] == [0, 1]
    recorded(path, seed=2)
    assert [record["seed"] for record in read(path)] == [0, 1, 2]


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "matrix.jsonl"
    given = ["--results", str(results)]
    with pytest.raises(SystemExit, match="There are no records"):
        main(["table", *given])
    for seed in range(3):
        recorded(results, seed=seed)
    recorded(results, method="PAPER", outcome="lost", lost=True, why="other bits")
    assert main(["table", *given]) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if line.startswith("| SIGKILL"))
    told = "5, **1** lost | not tried | not tried | 15, 0 lost"
    assert row == f"| SIGKILL | kills | {told} | 3 same bits, 1 lost |"
    assert "4 trials, 1 lost" in text
    assert main(["pack", *given]) == 0
    assert len(results.read_text().splitlines()) == 2
    assert main(["table", *given]) == 0
    assert capsys.readouterr().out == text
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- /table -->\nafter\n")
    assert main(["table", *given, "--into", str(page)]) == 0
    assert page.read_text().startswith("before\n<!-- table -->\n\n| fault |")
    assert "old" not in page.read_text()


def test_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = tmp_path / "matrix.jsonl"
    with pytest.raises(SystemExit, match="no long runs"):
        main(["figure", "--results", str(results)])
    for method in METHODS:
        curve = {"at": [*range(0, 5000, 500)], "resident": [10 << 20] * 10}
        recorded(results, fault="long run", method=method, **curve)
    assert main(["figure", "--results", str(results), "--out", str(tmp_path / "out")]) == 0
    drawn = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert drawn == ["reliability-dark.png", "reliability-memory.png", "reliability.png"]


# The runner


@pytest.mark.nightly
def test_trials_that_are_there_are_passed_over(tmp_path: Path) -> None:
    results = tmp_path / "matrix.jsonl"
    given = ["--only", "damaged file", "--share", "0.03", "--results", str(results), "--quiet", "--jobs", "2"]
    assert main(given) == 0
    first = results.read_text()
    assert len(first.splitlines()) == 2 * len(METHODS)
    assert main(given) == 0
    assert results.read_text() == first
    recorded(results, fault="damaged file", lost=True, why="other bits")
    assert main(given) == 1  # what was lost stays so
    assert main([*given, "--lost"]) == 0
    assert len(results.read_text().splitlines()) == 2 * len(METHODS) + 2
    with pytest.raises(SystemExit, match=r"--share 0\.0: must be above 0"):
        main([*given, "--share", "0"])


class Ends:
    """What a worker may end with, by a seed."""

    @staticmethod
    def trial(method: str, seed: int) -> Outcome:
        if seed == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if seed == 2:
            time.sleep(60)
        if seed == 3:
            raise KeyError("a slip of the trial")
        return Outcome("improved")


def test_a_trial_that_hangs_or_dies_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "preloaded", lambda: multiprocessing.get_context("fork"))
    monkeypatch.setattr(problems, "odd_problem", Ends.trial)
    slow = FAULTS["odd problem"]
    monkeypatch.setitem(FAULTS, "odd problem", type(slow)(slow.trial, slow.count, slow.unit, seconds=3.0))
    found: dict[int, dict[str, Any]] = {}
    wanted: list[Cell] = [("odd problem", "default", seed) for seed in range(5)]
    pool.run(wanted, lambda record: found.__setitem__(record["seed"], record), jobs=2)
    assert [found[seed]["lost"] for seed in range(5)] == [False, True, True, True, False]
    assert found[1]["why"] == "its process ended with -9"
    assert found[2]["why"] == "no end after 3 s"
    assert "a slip of the trial" in found[3]["why"]
    assert json.dumps(found[0])


@pytest.mark.nightly
def test_what_is_not_in_the_disk_stays_there(tmp_path: Path) -> None:
    """The limit on files, where no file system can be mounted."""
    path = tmp_path / "x"
    with disturbances.limit(100), pytest.raises(OSError, match="File too large"):
        path.write_bytes(bytes(200))
    path.write_bytes(bytes(200))
    assert FAULTS["rank loss"].seconds > kills.BOUND
