"""Tables and figures of the PINN study, from records whose figures are known."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from experiments.__main__ import main
from experiments.common.markdown import put
from experiments.common.records import read_run
from experiments.common.series import series
from experiments.pinn import figures as drawing
from experiments.pinn.problems import PROBLEMS
from experiments.pinn.records import fields, read_groups, until
from experiments.pinn.rivals import METHODS
from experiments.pinn.style import NAMES, looks
from experiments.pinn.table import short, table

from tests.drawn import words
from tests.experiments.pinn_records import write


def test_numbers_of_two_digits() -> None:
    assert [short(v) for v in (1.234e-5, 0.05, 12.0, math.nan)] == ["1.2e-5", "5.0e-2", "1.2e1", "not finite"]


def rows(text: str, title: str) -> dict[str, list[str]]:
    """The cells of one table by their first, the head under its own name."""
    part = text.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")
    ]
    return {line[0]: line[1:] for line in lines}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of three methods on two problems, on a third two methods; a diverged seed, an ablation."""
    folder = tmp_path_factory.mktemp("results")
    for seed, factor in enumerate((1.0, 4.0, 0.5)):
        write(folder, "poisson2d", "ksd-rational", 1e-4 * factor, seed=seed, fields=1e-4 if seed == 0 else None)
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
        write(folder, "burgers", "ksd-rational", 1e-2 * factor, seed=seed)
        write(
            folder, "burgers", "lm", 1e-3, seed=seed, end="diverged" if seed == 1 else "stopped", settings={"start": 1}
        )
        write(folder, "burgers", "soap", 1e-1, seed=seed, settings={"lr": seed})
    write(folder, "wave", "ksd-rational", 0.5)
    write(folder, "wave", "lm", 0.25, settings={"start": 1})
    write(folder, "wave", "ksd-rational", 1e-9, label="ksd-rational-rows800-60s")
    write(folder, "wave", "lm", 0.125, seconds=300.0)
    return folder


def test_changes_stand_beside_the_same_seeds_as_it_is(tmp_path: Path) -> None:
    for seed, error in enumerate((1e-4, 1e-3)):
        write(tmp_path, "poisson2d", "ksd-rational", error, seed=seed)
        write(tmp_path, "wave", "ksd-rational", 10 * error, seed=seed)
    write(tmp_path, "poisson2d", "ksd-rational", 4e-4, label="without-bend-60s")
    write(tmp_path, "wave", "ksd-rational", 9e-3, label="without-bend-60s")
    write(tmp_path, "wave", "ksd-rational", 5e-4, label="rows-800-60s")
    text = table(tmp_path)
    found = rows(text, "KSD, rational, changed in one thing: relative L2 error after 60 s, network 3x32")
    assert found["change"] == ["poisson2d", "wave", "ratio"]
    assert found["KSD, rational"] == ["1.0e-4", "1.0e-3", "1"]  # of seed 0 alone
    assert found["without-bend"] == ["4.0e-4", "9.0e-3", "6"]  # (4 · 9)^(1/2)
    assert found["rows-800"] == ["–", "5.0e-4", "0.5"]
    assert "changed" not in table(tmp_path, ["ksd-rational"])


def test_ratios_are_of_seeds_that_both_have(tmp_path: Path) -> None:
    """Seeds may be of days on which the machine was not equally fast."""
    for seed, error in enumerate((1e-6, 1e-6, 1e-3)):
        write(tmp_path, "wave", "ksd-rational", error, seed=seed)
    write(tmp_path, "wave", "lm", 1e-2, seed=2)
    write(tmp_path, "wave", "soap", 1e-2, seed=0)
    write(tmp_path, "wave", "nncg", 1e-2, seed=3)
    write(tmp_path, "wave", "ksd-rational", 1e-2, seconds=30.0)  # for ablations
    text = table(tmp_path)
    found = rows(text, "Relative L2 error after 60 s, network 3x32")
    ratios = dict(zip(found["problem"], found["ratio to KSD, rational"], strict=True))
    assert (ratios["LM"], ratios["SOAP"], ratios["NNCG"]) == ("10", "1e+04", "–")
    assert "after 30 s" not in text


def test_longer_runs_stand_in_for_shorter_ones(tmp_path: Path) -> None:
    """Points are at 0, 1, 60.5 and 300 s, errors e^(2/3) at the third."""
    for method in ("ksd-rational", "lm", "soap"):
        write(tmp_path, "wave", method, 1e-2)
        write(tmp_path, "burgers", method, 1e-3, seconds=300.0, third=60.5, fields=1e-3)
    write(tmp_path, "burgers", "nncg", 1e-3, seconds=300.0, third=60.5)  # has no runs of a minute
    write(tmp_path, "wave", "lm", 1e-9, seconds=300.0, third=60.5)  # has one on this problem
    write(tmp_path, "burgers", "lm", 1e-6, seed=1, seconds=300.0, third=60.5)
    write(tmp_path, "wave", "lm", 1e-2, seconds=1.0, third=0.5)  # no run is evaluated on purpose at a second
    second, minute, longest = read_groups(tmp_path, PROBLEMS, list(NAMES))
    assert set(second.runs) == {"wave"}
    assert list(minute.columns) == ["ksd-rational", "lm", "soap"]
    assert [run.final.error for run in minute.runs["wave"]["lm"]] == [1e-2]
    runs = minute.runs["burgers"]
    assert "soap" not in runs  # its learning rate goes by the budget
    (ours,) = runs["ksd-rational"]
    assert (ours.label, ours.seconds, ours.end, ours.spent) == ("ksd-rational-60s", 60, "budget", 60.5)
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
    """Points are at 0, 1, 8 and 60 s, errors e^(1/3) at 1 s and e^(2/3) at 8 s."""
    write(tmp_path, "wave", "ksd-rational", 1e-6)
    write(tmp_path, "wave", "lm", 1e-3)
    found = rows(table(tmp_path), "Ratio to KSD, rational over time, network 3x32, budget 60 s")
    assert found["method"] == ["3.75 s", "7.5 s", "15 s", "30 s", "60 s"]
    assert found["LM"] == ["10", "10", "100", "100", "1e+03"]


def test_table_of_errors(results: Path) -> None:
    text = table(results)
    found = rows(text, "Relative L2 error after 60 s, network 3x32")
    assert list(found) == [
        "problem",
        found_dashes(found),
        "poisson2d",
        "burgers",
        "wave",
        "geometric mean",
        "ratio to KSD, rational",
    ]
    assert found["problem"] == ["KSD, rational", "LM", "SOAP"]
    assert found["poisson2d"] == ["**1.0e-4**", "1.0e-3", "1.0e-2"]  # medians of factors 1, 4 and 0.5
    assert found["burgers"] == ["1.0e-2", "**1.0e-3** †", "1.0e-1 ◊"]
    assert found["wave"] == ["5.0e-1", "**2.5e-1**", "–"]
    # (1e-4 · 1e-2 · 0.5)^(1/3), (1e-3 · 1e-3 · 0.25)^(1/3), (1e-2 · 1e-1)^(1/2), which is over other problems.
    assert found["geometric mean"] == ["7.9e-3", "**6.3e-3**", "3.2e-2 (2 of 3)"]
    # (10 · 0.1 · 0.5)^(1/3); of the two problems that both have (100 · 10)^(1/2).
    assert found["ratio to KSD, rational"] == ["1", "0.794", "31.6"]
    assert "† A seed whose loss was not finite at the end." in text
    assert "rows800" not in text


def found_dashes(found: dict[str, list[str]]) -> str:
    return next(key for key in found if set(key) == {"-"})


def test_table_of_ranges_losses_and_settings(results: Path) -> None:
    text = table(results)
    ranges = rows(text, "Lowest and highest error after 60 s, network 3x32")
    assert ranges["poisson2d"] == ["5.0e-5 – 4.0e-4", "5.0e-4 – 4.0e-3", "1.0e-2 – 1.0e-2"]
    losses = rows(text, "Training loss / held-out loss after 60 s, network 3x32")
    assert losses["poisson2d"] == ["1.0e-8 / 3.0e-8", "1.0e-6 / 3.0e-6", "**1.0e-12** / **3.0e-12**"]
    setup = rows(text, "What was run after 60 s, network 3x32")
    assert setup["LM"] == ["start=1", "0 1 2", "7", "3 – 3", "61.5", "2 stopped, 1 diverged"]
    assert setup["SOAP"][0] == "– ◊ lr=0 ◊ lr=1 ◊ lr=2"
    assert rows(text, "Relative L2 error after 300 s, network 3x32")["wave"] == ["1.2e-1"]
    assert "Lowest and highest error after 300 s" not in text  # one seed
    only = rows(table(results, ["lm", "ksd-rational-rows800"]), "Relative L2 error after 60 s, network 3x32")
    assert only["problem"] == ["LM", "ksd-rational-rows800"]
    assert only["wave"] == ["2.5e-1", "**1.0e-9**"]


def test_the_table_goes_between_its_marks(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- pinn-table -->\nwhat stood here\n<!-- /pinn-table -->\nafter\n")
    main(["pinn", "table", "--results", str(results), "--into", str(page)])
    text = page.read_text()
    assert text.startswith("before\n<!-- pinn-table -->\n\n## Relative L2 error")
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
    main(["pinn", "figure", "--results", str(tmp_path), "--out", str(tmp_path)])
    assert "No pictures of solutions" in capsys.readouterr().out


def test_medians_over_seeds_hold_the_last_point(results: Path) -> None:
    group = read_groups(results, PROBLEMS, list(NAMES))[0]
    curve = series(group.runs["poisson2d"]["ksd-rational"], "seconds", "error", exact=True)
    assert curve is not None
    assert curve.times == (1.0, 8.0, 60.0)
    assert curve.middle == pytest.approx([1e-4 ** (1 / 3), 1e-4 ** (2 / 3), 1e-4])


def test_figures(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = words(monkeypatch, drawing)
    paths = drawing.figures(results, tmp_path)
    kinds = ("error-3x32-60s", "fields-3x32-60s", "held-out-3x32-60s", "error-3x32-300s", "held-out-3x32-300s")
    assert [path.name for path in paths] == [f"pinn-{kind}.png" for kind in kinds]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    fields = said["pinn-fields-3x32-60s.png"]
    assert "poisson2d: u*" in fields
    assert "|u − u*|, LM" in fields  # the best rival, not SOAP
    assert not any("SOAP" in text for text in fields)


def test_every_method_has_a_name_and_a_look_of_its_own() -> None:
    assert set(NAMES) == set(METHODS)
    assert len({(look.colour, str(look.dashes)) for look in looks([*NAMES, "other"]).values()}) == len(NAMES) + 1
    assert len({look.marker for look in looks(list(NAMES)).values()}) == len(NAMES)
