"""The study of the trial: its problems, a case that is continued, and the verdict on the line that was printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.__main__ import main
from experiments.unseen.problems import PROBLEMS, Made, Rows
from experiments.unseen.run import Case, execute, finished
from experiments.unseen.table import table
from torch import Tensor, nn

from tests.experiments.test_table import rows

SHORT = Case("line", 0, 0.02, 0.04)


@pytest.mark.parametrize(("name", "shape"), [("heat32", (1300,)), ("heat64", (1300,)), ("ode", (40, 2))])
def test_problems_are_those_of_their_seed(name: str, shape: tuple[int, ...]) -> None:
    (loss, residual), (again, _), (other, _) = (PROBLEMS[name](seed, None)[1]() for seed in (0, 0, 1))
    assert residual.shape == shape
    assert residual.dtype == (torch.float64 if name == "heat64" else torch.float32)
    assert loss.item() == pytest.approx(residual.square().mean().item())
    assert loss.item() == again.item() != other.item()


def test_the_recurrent_network_reads_rows() -> None:
    torch.manual_seed(0)
    model, x = Rows(), torch.rand(3, 28, 28)
    changed = x.clone()
    changed[1, 5] += 1
    assert (model(x) != model(changed)).any(1).tolist() == [False, True, False]


def line(seed: int, _: Path | None) -> Made:
    """Faster than those of the study."""
    torch.manual_seed(seed)
    model, x = nn.Linear(1, 1), torch.linspace(0, 1, 20)[:, None]

    def closure() -> tuple[Tensor, Tensor]:
        residual = model(x) - x
        return residual.square().mean(), residual

    return model, closure, None


def test_a_case_goes_on_where_it_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROBLEMS, "line", line)
    execute(SHORT, tmp_path, None)
    path = SHORT.path(tmp_path)
    known = json.loads(path.read_text())
    assert [row["name"] for row in known["runs"]] == [row["name"] for row in known["trial"]]
    assert known["line"] in [row["line"] for row in known["trial"]]
    assert all(row["seconds"] >= 0.04 for row in known["runs"])
    assert finished(SHORT, tmp_path)
    path.write_text(json.dumps({**known, "runs": known["runs"][:-1]}))
    assert not finished(SHORT, tmp_path)
    seconds = ["--try-seconds", "0.02", "--seconds", "0.04"]
    main(["unseen", "run", "line", "--seeds", "0", *seconds, "--results", str(tmp_path)])
    assert json.loads(path.read_text())["runs"][:-1] == known["runs"][:-1]
    assert finished(SHORT, tmp_path)
    with pytest.raises(ValueError, match=r"holds .*0\.02"):
        finished(Case("line", 0), tmp_path)


def case(results: Path, seed: int, printed: str, **losses: float | None) -> None:
    found: list[dict[str, Any]] = [{"name": name, "line": name, "loss_after": loss} for name, loss in losses.items()]
    known = {"case": {"problem": "ode", "seed": seed, "try_seconds": 20.0, "seconds": 60.0}, "line": printed}
    (results / f"ode-seed{seed}.json").write_text(json.dumps({**known, "trial": found, "runs": found}))


def test_hits_and_misses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no finished case"):
        table(tmp_path)
    case(tmp_path, 0, "KSD", KSD=1.9, Adam=1.0)
    case(tmp_path, 1, "KSD", KSD=2.1, Adam=1.0)
    case(tmp_path, 2, "Adam", KSD=1.0, Adam=1.1)  # ours ended lower
    case(tmp_path, 3, "Adam", KSD=None, Adam=1.1)
    text = table(tmp_path)
    found = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| ode")]
    assert [row[-1].strip() for row in found] == ["hit", "miss", "miss", "hit"]
    assert [row[2].strip() for row in found] == ["KSD", "KSD", "Adam", "Adam"]
    assert rows(text, "The line of a trial")["problem"][3] == "its loss at 60 s"
    assert "2 of 4 hits" in text
