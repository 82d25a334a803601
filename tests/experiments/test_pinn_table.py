"""Tables and figures of the PINN study, from records whose figures are known."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from experiments.__main__ import main
from experiments.common.markdown import put
from experiments.common.records import read_run
from experiments.common.series import series
from experiments.pinn.problems import PROBLEMS
from experiments.pinn.records import fields, read_groups, until
from experiments.pinn.rivals import METHODS
from experiments.pinn.style import LINES, NAMES
from experiments.pinn.table import short, table

from tests.drawn import words
from tests.experiments.pinn_records import write


def test_numbers_of_two_digits() -> None:
    assert [short(v) for v in (1.234e-5, 0.05, 12.0, math.nan)] == ["1.2e-5", "5.0e-2", "1.2e1", "not finite"]


def rows(text: str, title: str) -> dict[str, list[str]]:
    """The cells of one table by their first, or first two if tables have several groups."""
    part = text.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")
    ]
    n = 2 if lines[0][0] in ("after", "comparison") else 1
    return {" ".join(line[:n]): line[n:] for line in lines}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of three methods on two problems, on a third two methods; a diverged seed, an ablation."""
    folder = tmp_path_factory.mktemp("results")
    for seed, factor in enumerate((1.0, 4.0, 0.5)):
        write(folder, "poisson2d", "flow", 1e-4 * factor, seed=seed, fields=1e-4 if seed == 0 else None)
        write(
            folder,
            "poisson2d",
            "lm",
            1e-3 * factor,
            seed=seed,
            settings={"start": 1},
            fields=2e-3 if seed == 0 else None,
        )
        write(folder, "poisson2d", "soap", 1e-2, seed=seed, loss=1e-12, fields=1e-2 if seed == 0 else None)
        write(folder, "burgers", "flow", 1e-2 * factor, seed=seed)
        write(
            folder, "burgers", "lm", 1e-3, seed=seed, end="diverged" if seed == 1 else "stopped", settings={"start": 1}
        )
        write(folder, "burgers", "soap", 1e-1, seed=seed, settings={"lr": seed})
    write(folder, "wave", "flow", 0.5)
    write(folder, "wave", "lm", 0.25, settings={"start": 1})
    write(folder, "wave", "flow", 1e-9, label="flow-rows800-60s")
    write(folder, "wave", "lm", 0.125, seconds=300.0)
    return folder


def test_changes_are_compared_with_the_same_seeds(tmp_path: Path) -> None:
    for seed, error in enumerate((1e-4, 1e-3)):
        write(tmp_path, "poisson2d", "flow", error, seed=seed)
        write(tmp_path, "wave", "flow", 10 * error, seed=seed)
        write(tmp_path, "wave", "flow", 20 * 4**seed * error, seed=seed, label="without-corrections-60s")
    write(tmp_path, "poisson2d", "flow", 4e-4, label="without-corrections-60s")
    write(tmp_path, "wave", "flow", 5e-4, label="rows-800-60s")
    write(tmp_path, "wave", "flow", 5e-4, seed=7, label="rows-100-60s")  # the flow as it is lacks that seed
    found = rows(table(tmp_path), "GaussNewtonFlow changed in one thing")
    assert found["60 s without-corrections"] == ["4 [4, 4]", "4", "4 [2, 8]"]
    assert found["60 s rows-800"] == ["0.5", "–", "0.5"]
    assert found["60 s rows-100"] == ["–", "–", "–"]
    assert "changed" not in table(tmp_path, ["flow"])


def test_float32_is_compared_with_adam_and_with_float64(tmp_path: Path) -> None:
    write(tmp_path, "kdv", "flow", 1e-6)
    write(tmp_path, "kdv", "flow", 1e-4, label="flow-float32-60s")
    write(tmp_path, "kdv", "adam-lbfgs", 1e-2, label="adam-lbfgs-float32-60s")
    write(tmp_path, "fisher", "flow", 1e-3, label="flow-float32-60s")  # without the rival
    text = table(tmp_path)
    assert rows(text, "float32")["3x32, 60 s kdv"] == ["**1.0e-4**", "1.0e-2", "1.0e-6"]
    assert "100 in the geometric mean" in text
    assert "fisher" not in text.split("## float32")[1].split("##")[0]
    assert "changed in one thing" not in text


def test_the_longest_runs_have_any_number_of_points(tmp_path: Path) -> None:
    write(tmp_path, "wave", "flow", 1e-6)
    write(tmp_path, "wave", "flow", 1e-9, seconds=900.0, third=300.0, label="flow-points12000-900s")
    write(tmp_path, "burgers", "flow", 1e-9, seconds=900.0, third=300.0, label="flow-resampled-900s")
    found = rows(table(tmp_path), "A quarter of an hour")
    assert found["wave"][-2:] == ["1.0e-6", "1.0e-9"]
    assert [found[name][2] for name in ("wave", "burgers")] == ["fixed", "new"]


def test_runs_that_are_listed_are_left_out_unless_named(tmp_path: Path) -> None:
    for seed in (0, 1):
        write(tmp_path, "wave", "flow", 1e-6, seed=seed)
        write(tmp_path, "wave", "lm", 10.0**-seed, seed=seed)
    write(tmp_path, "wave", "soap", 1e-2)
    listed = [{"why": "other hours", "label": ["lm-60s"], "seed": [1, 2]}, {"label": ["soap-60s"], "problem": ["wave"]}]
    (tmp_path / "pinn" / "left_out.json").write_text(json.dumps(listed))
    found = rows(table(tmp_path), "Error: 3x32, 60 s")
    assert found["problem"] == ["GaussNewtonFlow", "LM"]
    assert found["wave"][1] == "1.0e0"
    named = rows(table(tmp_path, ["lm", "soap"]), "Error: 3x32, 60 s")
    assert named["wave"] == ["5.5e-1 [1.0e-1, 1.0e0]", "**1.0e-2**"]


def test_ratios_are_of_seeds_that_both_have(tmp_path: Path) -> None:
    for seed, error in enumerate((1e-6, 1e-6, 1e-3)):
        write(tmp_path, "wave", "flow", error, seed=seed)
    write(tmp_path, "wave", "lm", 1e-2, seed=2)
    write(tmp_path, "wave", "soap", 1e-2, seed=0)
    write(tmp_path, "wave", "spring", 1e-2, seed=3)
    write(tmp_path, "wave", "flow", 1e-2, seconds=30.0)  # for ablations
    text = table(tmp_path)
    found = rows(text, "Error: 3x32, 60 s")
    ratios = dict(zip(found["problem"], found["ratio to GaussNewtonFlow"], strict=True))
    assert (ratios["LM"], ratios["SOAP"], ratios["SPRING"]) == ("10", "10,000", "–")
    assert "30 s" not in text.replace(" 30 s |", "")


def test_longer_runs_stand_in_for_shorter_ones(tmp_path: Path) -> None:
    """Points are at 0, 1, 60.5 and 300 s, errors e^(2/3) at the third."""
    for method in ("flow", "lm", "soap"):
        write(tmp_path, "wave", method, 1e-2)
        write(tmp_path, "burgers", method, 1e-3, seconds=300.0, third=60.5, fields=1e-3)
    write(tmp_path, "burgers", "spring", 1e-3, seconds=300.0, third=60.5)  # has no runs of a minute
    write(tmp_path, "wave", "lm", 1e-9, seconds=300.0, third=60.5)  # has one on this problem
    write(tmp_path, "burgers", "lm", 1e-6, seed=1, seconds=300.0, third=60.5)
    write(tmp_path, "wave", "lm", 1e-2, seconds=1.0, third=0.5)  # no run is evaluated on purpose at a second
    second, minute, longest = read_groups(tmp_path, PROBLEMS, list(NAMES))
    assert set(second.runs) == {"wave"}
    assert list(minute.columns) == ["flow", "lm", "soap"]
    assert [run.final.error for run in minute.runs["wave"]["lm"]] == [1e-2]
    runs = minute.runs["burgers"]
    assert "soap" not in runs  # its learning rate goes by the budget
    (ours,) = runs["flow"]
    assert (ours.label, ours.seconds, ours.end, ours.spent) == ("flow-60s", 60, "budget", 60.5)
    assert ours.final == ours.points[-1]
    assert ours.final.error == pytest.approx(1e-2)
    assert not fields(ours).exists()  # those are of the end
    assert [run.final.error for run in runs["lm"]] == pytest.approx([1e-2, 1e-4])
    assert [run.final.error for run in longest.runs["burgers"]["lm"]] == [1e-3, 1e-6]


def test_what_a_run_was_before_is_known_near_its_points_alone(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, "wave", "lm", 1e-3, end="stopped"))  # points at 0, 1, 8 and 60 s, spent 61.5 s
    assert until(run, 7.0) is None
    assert until(run, 60.5) is None
    before = until(run, 7.8)
    assert before is not None
    assert (before.end, before.final.seconds) == ("budget", 8.0)
    whole = until(run, 70.0)
    assert whole is not None
    assert (whole.end, whole.final, whole.label) == ("stopped", run.final, "lm-70s")


def test_ratios_over_time_are_those_of_the_points_until_then(tmp_path: Path) -> None:
    """Points are at 0, 1, 20 and 60 s, errors e^(1/3) at 1 s and e^(2/3) at 20 s."""
    write(tmp_path, "wave", "flow", 1e-6, third=20.0)
    write(tmp_path, "wave", "lm", 1e-3, third=20.0)
    found = rows(table(tmp_path), "Ratios over time")
    assert found["comparison method"] == ["15 s", "30 s", "60 s", "150 s", "300 s", "900 s"]
    assert found["3x32, 60 s LM"] == ["10", "100", "1,000", "–", "–", "–"]


def test_table_of_errors(results: Path) -> None:
    text = table(results)
    found = rows(text, "Error: 3x32, 60 s")
    assert list(found) == [
        "problem",
        found_dashes(found),
        "poisson2d",
        "burgers",
        "wave",
        "geometric mean",
        "ratio to GaussNewtonFlow",
    ]
    assert found["problem"] == ["GaussNewtonFlow", "LM", "SOAP"]
    # Medians of factors 1, 4 and 0.5.
    assert found["poisson2d"][:2] == ["**1.0e-4** [5.0e-5, 4.0e-4]", "1.0e-3 [5.0e-4, 4.0e-3]"]
    assert found["burgers"][1:] == ["**1.0e-3** [1.0e-3, 1.0e-3]", "1.0e-1 [1.0e-1, 1.0e-1]"]
    assert found["wave"] == ["5.0e-1", "**2.5e-1**", "–"]
    # (1e-4 · 1e-2 · 0.5)^(1/3), (1e-3 · 1e-3 · 0.25)^(1/3), (1e-2 · 1e-1)^(1/2), which is over other problems.
    assert found["geometric mean"] == ["7.9e-3", "**6.3e-3**", "3.2e-2 (2 of 3)"]
    # (10 · 0.1 · 0.5)^(1/3); of the two problems that both have (100 · 10)^(1/2).
    assert found["ratio to GaussNewtonFlow"] == ["1", "0.794", "31.6"]
    assert "rows800" not in text


def found_dashes(found: dict[str, list[str]]) -> str:
    return next(key for key in found if set(key) == {"-"})


def test_tables_of_losses_and_runs(results: Path) -> None:
    text = table(results)
    losses = rows(text, "Training / held-out loss of GaussNewtonFlow")
    assert losses["problem"] == ["3x32, 60 s"]
    assert losses["poisson2d"] == ["1.0e-8 / 3.0e-8"]
    setup = rows(text, "Runs")
    assert setup["3x32, 60 s LM"] == ["start=1", "0 1 2", "7", "3 – 3", "2 stopped, 1 diverged"]
    assert setup["3x32, 60 s SOAP"][0] == "– ◊ lr=0 ◊ lr=1 ◊ lr=2"
    assert rows(text, "Error: 3x32, 300 s")["wave"] == ["1.2e-1"]
    only = rows(table(results, ["lm", "flow-rows800"]), "Error: 3x32, 60 s")
    assert only["problem"] == ["LM", "flow-rows800"]
    assert only["wave"] == ["2.5e-1", "**1.0e-9**"]


def test_the_table_goes_between_its_marks(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- pinn-table -->\nwhat stood here\n<!-- /pinn-table -->\nafter\n")
    main(["pinn", "table", "--results", str(results), "--into", str(page)])
    text = page.read_text()
    assert text.startswith("before\n<!-- pinn-table -->\n\n## Error: 3x32, 60 s\n")
    assert text.endswith("\n\n<!-- /pinn-table -->\nafter\n")
    assert "what stood here" not in text
    with pytest.raises(ValueError, match="lacks the lines <!-- a --> and <!-- /a -->"):
        put("text", page, ("<!-- a -->", "<!-- /a -->"))


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "wave", "lm", 0.1)
    path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(ValueError, match=r"lm-60s-seed0.jsonl is no record of a run .*: remove it and repeat the run"):
        table(tmp_path)


def test_tables_of_packed_runs_are_the_same(results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(results, tmp_path, dirs_exist_ok=True)
    main(["pack", "--results", str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path / 'pinn' / '3x32.jsonl'}\n"
    for folder in (path for path in (tmp_path / "pinn").iterdir() if path.is_dir()):
        shutil.rmtree(folder)
    assert table(tmp_path) == table(results)


def test_an_exact_curve_is_at_the_points_of_all_seeds(results: Path) -> None:
    group = read_groups(results, PROBLEMS, list(NAMES))[0]
    curve = series(group.runs["poisson2d"]["flow"], "seconds", "error", exact=True)
    assert curve is not None
    assert curve.times == (1.0, 8.0, 60.0)
    assert curve.middle == pytest.approx([1e-4 ** (1 / 3), 1e-4 ** (2 / 3), 1e-4])


def test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for method in ("flow", "soap", "spring"):
        for problem in ("kdv", "burgers01", "wave"):
            write(tmp_path, problem, method, 1e-3)
    write(tmp_path, "kdv", "spring", 1e-3, seconds=300.0)
    said = words(monkeypatch)
    main(["pinn", "figure", "--results", str(tmp_path), "--out", str(tmp_path)])
    names = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    # Of 300 s there is no method that is drawn.
    assert names == ["readme.png", "readme-dark.png", "pinn.png", "pinn-dark.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert {"Burgers, ν = 0.01", "GaussNewtonFlow", "CPU seconds", "relative error"} <= said["readme-dark.png"]
    assert "Korteweg–de Vries" in said["pinn.png"] - said["readme.png"]  # three equations are enough there
    assert "SOAP" in said["pinn.png"] - said["readme.png"]
    # No method without a look, and none of the equations that constants are chosen on.
    assert not any(word in text for texts in said.values() for text in texts for word in ("SPRING", "wave"))


def test_the_best_rival_of_each_problem(tmp_path: Path) -> None:
    """Points are at 0, 1, 20 and 60 s, errors e^(1/3) at 1 s and e^(2/3) at 20 s."""
    for problem, base, lm in (("kdv", 1e-6, 1e-3), ("fisher", 1e-6, 1e-7), ("wave", 1e-9, 1e-3)):
        write(tmp_path, problem, "flow", base, third=20.0)
        write(tmp_path, problem, "lm", lm, third=20.0)
    write(tmp_path, "kdv", "soap", 1e-4, third=20.0)
    write(tmp_path, "fisher", "flow", 1e-6, seconds=300.0)  # alone: nothing is compared
    text = table(tmp_path)
    found = rows(text, "Best rival ÷ GaussNewtonFlow")
    assert {name: found[name] for name in ("problem", "fisher", "kdv", "geometric mean")} == {
        "problem": ["3x32, 60 s, unseen equations"],
        "fisher": ["0.1 LM"],
        "kdv": ["100 SOAP"],
        "geometric mean": ["3.2"],
    }
    assert "wave" not in found  # constants are chosen on it
    over_time = rows(text, "Ratios over time")["3x32, 60 s, unseen equations best rival"]
    assert over_time[:3] == ["1.5", "2.2", "3.2"]


def test_every_method_has_a_name_and_those_in_figures_a_look_of_their_own() -> None:
    assert set(NAMES) == set(METHODS)
    assert set(LINES) < set(NAMES)
    assert len({line.colour for line in LINES.values()}) == len({str(line.dashes) for line in LINES.values()}) + 1 == 5
