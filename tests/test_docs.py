"""The examples of README, docs and docstrings run, and links between files lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import krylov_descent

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
MODULES = sorted(
    m.name
    for m in pkgutil.walk_packages(krylov_descent.__path__, "krylov_descent.")
    # The integrations' own tests run their examples, with the warnings of their frameworks filtered.
    if not m.name.endswith("__main__") and ".integrations." not in m.name
)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert blocks or page.name != "README.md"
    namespace: dict[str, object] = {}
    default = torch.get_default_dtype()
    try:
        for block in blocks:
            exec(compile(block, str(page), "exec"), namespace)
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_run(name: str) -> None:
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, extraglobs={"torch": torch})
    assert failed == 0


def test_everything_public_has_an_example() -> None:
    for name in krylov_descent.__all__:
        public = getattr(krylov_descent, name)
        if isinstance(public, type):
            assert ">>>" in (public.__doc__ or ""), name


def test_every_figure_is_shown_by_a_page_and_every_shown_one_exists() -> None:
    """A figure that no page shows is deleted; drawing all of them into docs/figures makes more than are shown."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    shown = {name for page in pages for name in re.findall(r"figures/([\w.-]+\.\w+)", page.read_text())}
    assert {path.name for path in (ROOT / "docs" / "figures").iterdir()} == shown
    assert {name.rpartition(".")[2] for name in shown} == {"png"}


def test_paper_map_names_what_exists() -> None:
    text = (ROOT / "docs" / "paper-map.md").read_text()
    files = set(re.findall(r"`((?:\w+/)*\w+\.py)`", text))
    assert files
    source = ""
    for file in files:
        path = (ROOT if file.startswith("experiments/") else ROOT / "src" / "krylov_descent") / file
        assert path.exists(), file
        source += path.read_text()
    for name in re.findall(r"`(_?[A-Za-z]+(?:_[a-z]+)*(?:\.\w+)?)`", text):
        if not name.endswith(".py") and name not in ("PAPER", "weight_decay"):
            assert re.search(rf"(def|class) {re.escape(name.split('.')[-1])}\b", source), name
