"""Tables: the paper's figures and ours, from curves whose figures are known."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from experiments import paper
from experiments.table import table

from tests.synthetic import header, point, write


def test_paper_figures() -> None:
    assert {row.dataset: float(row.time) for row in paper.TABLE_2} == {
        "CURVES": 0.2,
        "MNIST AE": 0.2,
        "MNIST CL": 0.6,
        "MNIST CL, PT": 0.6,
        "Aurora": 0.3,
        "Starcraft": 0.7,
    }
    spoken = paper.row("spoken-digits")
    assert spoken is not None
    assert spoken is paper.TABLE_2[4]
    assert paper.row("curves") is paper.row("curves5")
    assert paper.row("adding-50") is None


def rows(text: str, title: str) -> dict[str, list[str]]:
    """The cells of one table by their first, the head under its own name."""
    part = text.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")
    ]
    return {line[0]: line for line in lines}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Two seeds of four methods on CURVES that fall as 1 + 9·exp(−rate·t), and one classifier."""
    rates: Mapping[str, tuple[float, float]] = {
        "ksd": (0.2, 0.25),
        "hf": (0.1, 0.1),
        "adam": (0.3, 0.24),
        "hf-hessian": (0.05, 0.05),
    }
    for label, of_seed in rates.items():
        for seed, rate in enumerate(of_seed):
            points = [point(i, 1 + 9 * math.exp(-rate * i)) for i in range(21)]
            write(tmp_path, [header("curves", label, seed), *points, {"kind": "end", "reason": "budget"}])
    for label, errors in {"ksd": (9.0, 1.25), "hf": (9.0, 3.5)}.items():
        points = [point(i, 2.0 - i, error=0.0, held_out_error=e) for i, e in enumerate(errors)]
        write(tmp_path, [header("mnist-class", label, 0, error_name="classification error, %"), *points])
    return tmp_path


def test_table_has_the_papers_figures_and_ours(study: Path) -> None:
    text = table(study)
    found = rows(text, "KSD and HF, the paper's figures and ours")
    assert list(found)[2:] == list(paper.PROBLEMS)
    assert found["curves"][1:5] == ["CURVES ‡", "0.13 / **0.19**", "0.17 / 0.25", "0.2"]
    assert found["mnist-class"][1:5] == ["MNIST CL", "0 % / 2.01 %", "0 % / **1.70 %**", "0.6"]
    assert found["mnist-class"][5:7] == ["0 % / 3.5 % §", "0 % / **1.25 %** §"]
    assert found["adding-50"][1:] == ["–"] * 4 + ["not run"] * 4 + ["–"]
    # Errors are the loss here: HF ends at 1 + 9·exp(−2) on both seeds, KSD at 1 + 9·exp(−4) and 1 + 9·exp(−5).
    assert found["curves"][5] == "2.22 / 2.22"
    assert found["curves"][6] == "1.11 [1.06, 1.16] / **1.11 [1.06, 1.16]**"
    # KSD reaches the end of HF at t = 10 and 8 of 20, in seconds and in gradients alike.
    assert found["curves"][7:] == ["0.45 [0.4, 0.5]", "0.45 [0.4, 0.5]", "2.218"]
    assert "§ A seed that is not finished." in text
    assert "†" not in text


def test_table_says_who_is_ahead(study: Path) -> None:
    found = rows(table(study), "Training loss after equal budgets")
    head, curves = found["problem"], found["curves"]
    assert curves[1] == "20 seconds"
    # 1 + 9·exp(−6) and exp(−4.8) for Adam: mean 1.048; KSD 1.113, though it has the lower loss on seed 1.
    assert curves[head.index("Adam")] == "**1.048 [1.022, 1.074]**"
    assert curves[head.index("KSD")] == "1.113 [1.061, 1.165]"
    assert curves[head.index("L-BFGS")] == "not run"
    assert curves[-1] == "Adam, 1 of 2 seeds"
    variants = table(study).split("Gauss–Newton matrix or Hessian")[1]
    assert "HF, Hessian" in variants
    assert "4.311" in variants  # 1 + 9·exp(−1)
    assert "mnist-class" not in variants.split("##")[0]


def test_a_longer_run_counts_up_to_the_common_budget_only(study: Path) -> None:
    points = [point(i, 1 + 9 * math.exp(-0.01 * i**2)) for i in range(41)]
    write(study, [header("curves", "lbfgs", 0), *points, {"kind": "end", "reason": "budget"}])
    found = rows(table(study), "Training loss after equal budgets")
    assert found["curves"][found["problem"].index("L-BFGS")] == "1.165"  # at 20 s of 40


def test_table_of_nothing_says_not_run(tmp_path: Path) -> None:
    found = rows(table(tmp_path), "Training loss after equal budgets")
    assert all(set(found[name][2:-1]) == {"not run"} for name in paper.PROBLEMS)


def test_every_problem_has_a_row() -> None:
    problems = pytest.importorskip("experiments.problems")
    assert set(problems.PROBLEMS) == set(paper.PROBLEMS)
