"""The command line of the PINN study, which runs it starts, and what tuning chooses."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from experiments.__main__ import main
from experiments.common import study as common
from experiments.common.packed import pack
from experiments.common.processes import Task
from experiments.common.records import read_run
from experiments.pinn import study
from experiments.pinn.ablations import CHANGES, PARTS
from experiments.pinn.problems import problem as make_problem
from experiments.pinn.records import fields, geometric_mean
from experiments.pinn.rivals import METHODS
from experiments.pinn.study import Plan, tune

from tests.experiments.pinn_records import write


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "burger", "lm"], "There is no problem 'burger'; there are poisson2d"),
        (["run", "burgers", "sgd"], "There is no method 'sgd'; there are flow"),
        (["run", "burgers", "lm", "--set", "rate=3"], "lm has no setting 'rate'; it has start"),
        (["run", "burgers", "lm", "--set", "start"], "write --set key=value"),
        (["run", "burgers", "lm", "--seconds", "0"], "--seconds 0: must be above 0"),
        (["study", "burgers", "--methods", "sgd"], "There is no method 'sgd'"),
        (["study", "burgers", "--jobs", "0"], "--jobs 0: must be at least 1"),
        (["ablate", "burgers", "--changes", "luck"], "There is no change 'luck'; there are without-corrections"),
        (["tune", "sgd"], "sgd has nothing to tune; ksd"),
        (["table"], "There are no runs in .*pinn: make them with `python -m experiments pinn study"),
        (["figure"], "There are no runs in"),
    ],
)
def test_mistakes_end_with_a_sentence(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["pinn", *arguments, "--results", str(tmp_path)])


def test_the_command_line_runs_a_real_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = tmp_path / "tuned.json"
    tuned.write_text(json.dumps({"3x32": {"lm": {"settings": {"start": 0.25, "down": 4.0}, "trials": []}}}))
    monkeypatch.setattr(study, "TUNED", tuned)
    threads = torch.get_num_threads()
    command = ["pinn", "run", "poisson2d", "lm", "--seconds", "0.01", "--points", "60"]
    main([*command, "--set", "start=0.5", "--results", str(tmp_path)])
    torch.set_num_threads(threads)
    path = tmp_path / "pinn" / "poisson2d" / "3x32" / "lm-points60-0.01s-seed0.jsonl"
    assert str(path) in capsys.readouterr().out
    found = read_run(path)
    assert found.settings == {"start": 0.5, "down": 4.0}
    assert found.final.step == 1
    assert found.final.loss < found.points[0].loss
    assert fields(found).stat().st_size < 100_000


def test_a_study_runs_what_is_not_finished_and_first_seeds_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Task] = []

    def pretend(tasks: Sequence[Task], jobs: int) -> list[str]:
        started.extend(tasks)
        return ["burgers lm: it broke"]

    monkeypatch.setattr(common, "run_all", pretend)
    monkeypatch.setattr(study, "TUNED", tmp_path / "tuned.json")
    study.TUNED.write_text(json.dumps({"3x32": {"soap": {"settings": {"lr": 0.001}, "trials": []}}}))
    packed = write(tmp_path, "wave", "lm", 1e-3)
    pack(tmp_path)
    packed.unlink()
    write(tmp_path, "wave", "soap", 1e-3, settings={"lr": 0.01})  # not those of the study: the run will say so
    plan = Plan(("burgers", "wave"), ("lm", "soap"), seeds=2, networks=("3x32", "4x64"))
    with pytest.raises(SystemExit, match="burgers lm: it broke"):
        study.study(plan, tmp_path, 2)
    names = [task.name for task in started]
    assert names[:4] == [
        "burgers 3x32 lm-60s seed 0",
        "burgers 3x32 soap-60s seed 0",
        "wave 3x32 soap-60s seed 0",
        "burgers 4x64 lm-60s seed 0",
    ]
    assert len(names) == len(set(names)) == 15
    assert [name.endswith("seed 0") for name in names] == [True] * 7 + [False] * 8
    # A network that was not tuned has the settings of the usual one.
    command = next(task.command for task in started if task.name == "wave 4x64 soap-60s seed 1")
    assert command[command.index("--set") + 1] == "lr=0.001"
    assert "--no-tuned" in command


def test_a_study_of_real_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "TUNED", tmp_path / "tuned.json")
    arguments = [
        "pinn",
        "study",
        "poisson2d",
        "--methods",
        "lm",
        "--seeds",
        "1",
        "--seconds",
        "0.01",
        "--jobs",
        "1",
    ]
    main([*arguments, "--results", str(tmp_path)])
    path = tmp_path / "pinn" / "poisson2d" / "3x32" / "lm-0.01s-seed0.jsonl"
    header = json.loads(path.read_text().splitlines()[0])
    assert (header["threads"], header["clock"], header["settings"]) == (1, "cpu", {})
    monkeypatch.setattr("subprocess.Popen", None)  # nothing is started again
    main([*arguments, "--results", str(tmp_path)])


def test_tuning_takes_the_lowest_geometric_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By the arithmetic mean a=1 would be chosen; a=3 has the lowest errors, but failed on one problem.
    errors = {1: (0.1, 0.1), 2: (0.2, 1e-4), 3: (1e-6, None)}

    def pretend(tasks: Sequence[Task], jobs: int) -> list[str]:
        for a, both in errors.items():
            for problem, error in zip(("wave", "burgers"), both, strict=True):
                label = f"lm-start={a}-30s"
                assert any(task.name == f"{problem} 3x32 {label} seed 100" for task in tasks)
                if error is not None:
                    write(tmp_path, problem, "lm", error, seed=100, seconds=30, label=label, settings={"start": a})
        return []

    monkeypatch.setattr(common, "run_all", pretend)
    monkeypatch.setattr(study, "GRIDS", {"lm": [{"start": (1, 2, 3)}]})
    monkeypatch.setattr(study, "TUNED", tmp_path / "tuned.json")
    earlier = {"settings": {"start": 9}, "error": 1e-9, "errors": {"wave": 1e-9, "burgers": 1e-9}, "seconds": 20}
    given = {"soap": {"settings": {"lr": 1}}, "lm": {"settings": {"start": 9}, "trials": [earlier]}}
    study.TUNED.write_text(json.dumps({"3x32": given, "4x64": {}}))
    tune((), tmp_path, 1, problems=("wave", "burgers"))
    known = json.loads(study.TUNED.read_text())
    assert known["3x32"]["soap"] == {"settings": {"lr": 1}}
    assert known["3x32"]["lm"]["settings"] == {"start": 2} == study.settings("lm", "3x32")
    assert study.settings("lm", "4x64") == {}
    trials = known["3x32"]["lm"]["trials"]
    assert [trial["settings"]["start"] for trial in trials] == [1, 2, 3, 9]
    assert trials[3] == earlier  # of another grid: kept, and not asked
    assert trials[1]["error"] == pytest.approx(math.sqrt(0.2e-4))
    assert trials[2] == {
        "settings": {"start": 3},
        "error": None,
        "errors": {"wave": 1e-6, "burgers": None},
        "seconds": 30,
    }
    again: list[str] = []

    def note(tasks: Sequence[Task], jobs: int) -> list[str]:
        again.extend(task.name for task in tasks)
        return []

    monkeypatch.setattr(common, "run_all", note)
    tune((), tmp_path / "other", 1, problems=("wave", "burgers"))  # where none of the files is
    assert again == ["wave 3x32 lm-start=3-30s seed 100", "burgers 3x32 lm-start=3-30s seed 100"]
    assert json.loads(study.TUNED.read_text())["3x32"]["lm"]["trials"][:2] == trials[:2]
    assert len(json.loads(study.TUNED.read_text())["3x32"]["lm"]["trials"]) == 4


def test_geometric_mean() -> None:
    assert geometric_mean([1e-3, 1e-1]) == pytest.approx(1e-2)
    assert geometric_mean([0.0, 1.0]) == 0
    assert math.isnan(geometric_mean([]))
    assert math.isnan(geometric_mean([1.0, math.inf]))


def test_ablations_take_a_part_away_for_the_run_and_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Task] = []

    def pretend(tasks: Sequence[Task], jobs: int) -> list[str]:
        started.extend(tasks)
        return []

    monkeypatch.setattr(common, "run_all", pretend)
    study.ablate(Plan(("wave",), seconds=30.0, seeds=1), (), tmp_path, 1)
    assert [task.name for task in started] == [f"wave 3x32 {change}-30s seed 0" for change in CHANGES]
    commands = {change: " ".join(task.command) for change, task in zip(CHANGES, started, strict=True)}
    assert "without=corrections" in commands["without-corrections"]
    assert "rows=1600" in commands["rows-1600"]
    assert "--dtype float32" in commands["flow-float32"]
    assert "--resample 10" in commands["flow-resample10"]
    assert "--resample" not in commands["without-corrections"]
    for part, (name, constants, value) in PARTS.items():
        module, names = importlib.import_module(name), constants.split()
        usual = [getattr(module, constant) for constant in names]
        assert value not in usual
        steps = METHODS["flow"](make_problem("poisson2d", seed=0, points=60), seed=0, without=part)
        assert math.isfinite(next(steps))
        assert [getattr(module, constant) for constant in names] == [value] * len(names)
        steps.close()  # type: ignore[attr-defined]
        assert [getattr(module, constant) for constant in names] == usual
    with pytest.raises(ValueError, match="no part 'luck'"):
        next(METHODS["flow"](make_problem("poisson2d", seed=0, points=60), seed=0, without="luck"))
