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
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
MODULES = sorted(
    m.name
    for m in pkgutil.walk_packages(krylov_descent.__path__, "krylov_descent.")
    # The integrations' own tests run their examples, with the warnings of their frameworks filtered.
    if not m.name.endswith("__main__") and ".integrations." not in m.name
)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
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


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
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


def words(page: Path) -> int:
    """Words outside of code, front matter, directives and comments; those of tables count."""
    text = re.sub(r"\A---\n.*?\n---\n", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"^(```+)[^\n]*\n.*?^\1\s*$", "", text, flags=re.DOTALL | re.MULTILINE)
    return len(re.findall(r"\S*\w\S*", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)))


def test_pages_are_short() -> None:
    """A person gives a README sixty seconds and a results page two minutes; the rest is in appendices."""
    assert words(ROOT / "README.md") <= 450
    for page in (ROOT / "docs" / "results").glob("*.md"):
        assert words(page) <= 800, page.name
    assert sum(words(page) for page in DOCS if page.parent.name not in ("appendix", "reference")) <= 12_000


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "results").glob("*.md")), ids=lambda p: p.stem)
def test_numbers_of_the_results_stand_in_the_appendix(page: Path) -> None:
    """Numbers with a decimal point in the tables of a results page are numbers of its appendix, rounded."""
    number = r"(?<![\w.])\d+\.\d+(?![\w.]\d)"
    known = set(map(float, re.findall(r"\d+(?:\.\d+)?", (ROOT / "docs" / "appendix" / page.name).read_text())))
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    cited = {x for row in rows for x in re.findall(number, row)}
    assert {x for x in cited if not any(f"{k:.{len(x.partition('.')[2])}f}" == x for k in known)} == set()


def test_every_figure_is_shown_by_a_page_and_every_shown_one_exists() -> None:
    """The commands of the studies draw just these."""
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
