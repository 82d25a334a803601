"""Tables of the docs are those of the results, and the examples of the studies' docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch

import experiments

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    m.name for m in pkgutil.walk_packages(experiments.__path__, "experiments.") if not m.name.endswith("__main__")
)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_run(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch})
    assert failed == 0


def test_the_tables_of_the_experiments_are_those_of_the_results() -> None:
    """``python -m experiments table --into docs/appendix/paper.md`` was run after the last change of results."""
    from experiments.paper.commands import MARKS
    from experiments.paper.table import table

    page = (ROOT / "docs" / "appendix" / "paper.md").read_text()
    inside = page.partition(MARKS[0])[2].partition(MARKS[1])[0]
    assert inside.strip() == table(ROOT / "results").strip()


def test_the_tables_of_the_physics_informed_networks_are_those_of_the_results() -> None:
    """``python -m experiments pinn table --into docs/appendix/pinn.md`` was run after the last change of results."""
    from experiments.pinn.commands import MARKS
    from experiments.pinn.table import table

    page = (ROOT / "docs" / "appendix" / "pinn.md").read_text()
    inside = page.partition(MARKS[0])[2].partition(MARKS[1])[0]
    assert inside.strip() == table(ROOT / "results").strip()


def test_the_table_of_the_trial_is_that_of_the_results() -> None:
    """``python -m experiments unseen table --into docs/appendix/trial.md`` was run after the last change of results."""
    from experiments.unseen.commands import MARKS
    from experiments.unseen.table import table

    page = (ROOT / "docs" / "appendix" / "trial.md").read_text()
    inside = page.partition(MARKS[0])[2].partition(MARKS[1])[0]
    assert inside.strip() == table(ROOT / "results" / "unseen").strip()


def test_the_tables_of_deep_networks_are_those_of_the_results() -> None:
    """``python -m experiments deep table --into docs/appendix/deep.md`` was run after the last change of results."""
    from experiments.deep.commands import MARKS
    from experiments.deep.table import table

    page = (ROOT / "docs" / "appendix" / "deep.md").read_text()
    inside = page.partition(MARKS[0])[2].partition(MARKS[1])[0]
    assert inside.strip() == table(ROOT / "results" / "deep").strip()
