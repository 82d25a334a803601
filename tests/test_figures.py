"""Figures: every kind from synthetic runs, the same file from the same runs, and what lies behind the drawing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from experiments.figures import KINDS, Kind, figure
from experiments.records import LABELS
from experiments.style import LINES

from tests.synthetic import header, point, write

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


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("convergence", ["convergence-curves", "convergence-mnist-class"]),
        ("held-out", ["held-out-curves", "held-out-mnist-class"]),
        ("anatomy", ["anatomy-all"]),
        ("ritz", ["ritz-curves"]),  # the classifier has no reports
    ],
)
def test_every_kind_is_drawn_and_twice_the_same(kind: Kind, names: list[str], results: Path, tmp_path: Path) -> None:
    first = figure(kind, results, tmp_path / "first")
    assert [path.name for path in first] == [f"{name}.{suffix}" for name in names for suffix in ("png", "svg")]
    for path, again in zip(first, figure(kind, results, tmp_path / "second"), strict=True):
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            assert path.read_bytes() == again.read_bytes()
            assert b"<dc:date>" not in path.read_bytes()
            assert path.stat().st_size < 300_000


def test_one_problem_gives_its_name_to_the_anatomy(results: Path, tmp_path: Path) -> None:
    assert [path.name for path in figure("anatomy", results, tmp_path, ["curves"])] == [
        "anatomy-curves.png",
        "anatomy-curves.svg",
    ]
    assert figure("anatomy", results, tmp_path, ["mnist-class"]) == []


def test_a_figure_is_as_wide_as_a_page(results: Path, tmp_path: Path) -> None:
    png = figure("convergence", results, tmp_path, ["mnist-class"])[0]
    assert int.from_bytes(png.read_bytes()[16:20], "big") == 1400  # 7 inches at 200 dots


def test_runs_of_one_point_are_no_error(tmp_path: Path) -> None:
    write(tmp_path, [header("curves", "ksd", 0), point(0, 9.0)])
    assert figure("convergence", tmp_path, tmp_path) == []
    write(tmp_path, [header("curves", "hf", 0), point(0, 9.0), point(1, 8.0)])
    assert len(figure("convergence", tmp_path, tmp_path)) == 2
    assert len(figure("held-out", tmp_path, tmp_path)) == 2


def test_what_is_not_there_is_said(results: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run of starcraft: there are runs of curves, mnist-class"):
        figure("ritz", results, tmp_path, ["starcraft"])
    with pytest.raises(ValueError, match="choose from convergence, held-out, anatomy, ritz"):
        figure("pie", results, tmp_path)  # type: ignore[arg-type]
    (tmp_path / "empty").mkdir()
    assert all(figure(kind, tmp_path / "empty", tmp_path) == [] for kind in KINDS)


def test_every_method_has_a_look_of_its_own() -> None:
    assert set(LINES) == set(LABELS)
    assert len({line.marker for line in LINES.values()}) == len(LABELS)
    assert len({(line.colour, line.dashes) for line in LINES.values()}) == len(LABELS)
