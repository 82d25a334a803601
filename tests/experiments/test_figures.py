"""Figures: every kind from synthetic runs, the same file from the same runs, and what lies behind the drawing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from experiments.paper import plan
from experiments.paper.figures import figures
from experiments.paper.style import LABELS, LINES

from tests.drawn import words
from tests.experiments.synthetic import header, point, write

PHASES = {"ksd": ("gradient", "basis", "search"), "hf": ("gradient", "cg", "backtracking")}


def report(method: str, step: int, *, negative: bool) -> dict[str, Any]:
    ritz = [10.0**k * (-1 if negative and k == -2 else 1) + step * 1e-3 for k in range(-6, 2)]
    seconds = dict(zip(PHASES[method], (0.2, 0.5, 0.3), strict=True))
    return {"seconds": seconds, "ritz_values": [*ritz, None, 0.0] if method == "ksd" else []}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All methods and two seeds on CURVES, one of which diverges; two methods and one seed on a classifier."""
    folder = tmp_path_factory.mktemp("results")
    for number, label in enumerate(LABELS):
        for seed in (0, 1):
            method = label.partition("-")[0]
            points = []
            for i in range(15):
                given = report(method, i, negative="hessian" in label) if method in PHASES and i else None
                lost = label == "sgd" and seed == 1 and i > 5
                loss = None if lost else 50 + 500 * math.exp(-i / (2 + number + seed))
                points.append(point(i, loss, report=given))
            write(folder, [header("curves", label, seed), *points, {"kind": "end", "reason": "budget"}])
    for label in ("ksd", "adam"):
        errors = [90.0, 9.0, 0.4, 0.0, 0.0]
        lines = [point(i, 2.0 - 0.1 * i, error=e, held_out_error=e + 1) for i, e in enumerate(errors)]
        write(folder, [header("mnist-class", label, 0, error_name="classification error, %"), *lines])
    return folder


def test_all_are_drawn_and_twice_the_same(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = words(monkeypatch)
    names = ["paper", "paper-dark", "convergence", "anatomy-all", "ritz-curves"]
    first = figures(results, tmp_path / "first")
    assert [path.name for path in first] == [f"{name}.png" for name in names]
    for path, again in zip(first, figures(results, tmp_path / "second"), strict=True):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.read_bytes() == again.read_bytes()
        assert path.stat().st_size < 100_000
        assert int.from_bytes(path.read_bytes()[16:20], "big") == 1350  # 9 inches at 150 dots
    assert {"CURVES autoencoder", "MNIST classifier", "KSD", "Adam", "CPU seconds"} <= said["paper-dark.png"]
    assert not any("paper's settings" in text for texts in said.values() for text in texts)  # five curves at most


def test_light_and_dark_have_their_backgrounds(results: Path, tmp_path: Path) -> None:
    from PIL import Image

    light, dark = (Image.open(path).convert("RGB").getpixel((2, 2)) for path in figures(results, tmp_path)[:2])
    assert (light, dark) == ((255, 255, 255), (0x13, 0x14, 0x16))


def test_runs_of_one_point_are_no_error(tmp_path: Path) -> None:
    write(tmp_path, [header("curves", "ksd", 0), point(0, 9.0)])
    assert figures(tmp_path, tmp_path) == []
    write(tmp_path, [header("curves", "hf", 0), point(0, 9.0), point(1, 8.0)])
    names = ["paper.png", "paper-dark.png", "convergence.png"]
    assert [path.name for path in figures(tmp_path, tmp_path)] == names


def test_without_runs_a_command_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no runs in .*empty: make one with `python -m experiments run"):
        figures(tmp_path / "empty", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_anatomy_has_shares_and_the_seconds_of_the_runs_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = words(monkeypatch)
    # Reports say 0.2, 0.5 and 0.3 s by the wall. On their own clock the runs take 8 and 32 s for 8 steps each, of which
    # every second was recorded: 2.5 s a step.
    for seed in (0, 1):
        points = [
            point(2 * i, 9.0 - i, seconds=(2 + 6 * seed) * i, report=report("ksd", i, negative=False) if i else None)
            for i in range(5)
        ]
        write(tmp_path, [header("curves", "ksd", seed), *points])
    figures(tmp_path, tmp_path)
    expected = {"CURVES autoencoder: KSD", "20", "50", "30", "2.5 s", "share of the wall time of a step, %"}
    assert expected <= said["anatomy-all.png"]
    assert "at the right: mean seconds of a step (CPU, 1 thread)" in said["anatomy-all.png"]
    write(
        tmp_path,
        [
            header("curves", "hf", 0, clock="wall"),
            *(point(i, 9.0, report=report("hf", i, negative=False)) for i in (0, 1)),
        ],
    )
    figures(tmp_path, tmp_path)
    assert "at the right: mean seconds of a step" in said["anatomy-all.png"]


def test_runs_of_another_budget_are_not_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = words(monkeypatch)
    for label, budget in (("ksd", "20s"), ("hf", "20s"), ("adam", "5s")):
        write(tmp_path, [header("curves", label, 0, budget=budget), point(0, 9.0), point(1, 8.0)])
    figures(tmp_path, tmp_path)
    assert {"KSD", "Hessian-free"} <= said["convergence.png"]
    assert "Adam" not in said["convergence.png"]


def test_long_runs_are_drawn_beside_the_papers_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = words(monkeypatch)
    for label in plan.LONG_RUNS:
        points = [point(i, 2.0 / (i + 1), held_out_error=30 / (i + 1), seconds=60 * i) for i in range(20)]
        write(tmp_path, [header("mnist-class", label, 0), *points])
    names = [path.name for path in figures(tmp_path, tmp_path)]
    assert names == ["hours.png", "hours-dark.png"]
    expected = {"MNIST classifier", "KSD", "Hessian-free", "the paper", "CPU minutes", "held-out error"}
    assert expected <= said["hours.png"]


def test_methods_in_figures_have_a_look_of_their_own() -> None:
    assert set(LINES) < set(LABELS)
    assert len({line.colour for line in LINES.values()}) == len(LINES)
