"""The site builds without a warning, every code block on it is executed, and its links lead somewhere."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import krylov_descent

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("site")]  # the site is built once

pytest.importorskip("myst_nb")  # the extra "docs"

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCES = sorted(DOCS.rglob("*.md"))
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))

_FENCE = re.compile(r"^(`{3,})(\S*) ?([^\n]*)\n(.*?)^\1\s*$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass
class Page(HTMLParser):
    """What the tests look at in a built page."""

    path: Path
    links: list[str] = dataclasses.field(default_factory=list)
    names: set[str] = dataclasses.field(default_factory=set)
    pictures: list[str] = dataclasses.field(default_factory=list)
    drawn: int = 0
    printed: str = ""
    _depth: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "img":
            self.pictures.append(found["src"])
            self.drawn += bool(self._depth)
        if "id" in found:
            self.names.add(found["id"])
        if tag == "div" and (self._depth or "cell_output" in found.get("class", "")):
            self._depth += 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "div" and self._depth:
            self._depth -= 1

    def handle_data(self, data: str) -> None:
        if self._depth:
            self.printed += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The built site, and what went wrong."""
    out = tmp_path_factory.mktemp("site")
    warnings = out / "warnings.txt"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(out / "doctrees")]
    done = subprocess.run(
        [*command, "-w", str(warnings), str(DOCS), str(out / "html")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    told = warnings.read_text() if warnings.exists() else ""
    return out / "html", told or ("" if done.returncode == 0 else done.stderr)


@cache
def page(path: Path) -> Page:
    return Page(path)


def fences(path: Path) -> Iterator[tuple[str, str, str]]:
    """(language or directive, argument, content) of each block of a source."""
    for found in _FENCE.finditer(path.read_text(encoding="utf-8")):
        yield found[2], found[3].strip(), found[4]


@cache
def _tested_examples() -> frozenset[str]:
    """Programs of examples/ that some test names."""
    names = {program.stem for program in (ROOT / "examples").glob("*.py")}
    files = {*(ROOT / "tests").rglob("test_*.py")} - {Path(__file__)}
    tests = [file.read_text(encoding="utf-8") for file in files]
    return frozenset(name for name in names if any(re.search(rf"\b{name}\b", test) for test in tests))


def is_notebook(path: Path) -> bool:
    return path.read_text(encoding="utf-8").startswith("---\nfile_format: mystnb\n")


def test_builds_without_a_warning(site: tuple[Path, str]) -> None:
    html, wrong = site
    assert wrong == ""
    assert (html / "index.html").is_file()


def test_every_page_is_in_the_contents(site: tuple[Path, str]) -> None:
    listed = {DOCS / "index.md"}
    for source in SOURCES:
        for kind, _, content in fences(source):
            if kind == "{toctree}":
                entries = [line for line in content.splitlines() if line and not line.startswith(":")]
                listed |= {source.parent / f"{entry}.md" for entry in entries}
    assert listed == set(SOURCES)
    for source in SOURCES:
        assert (site[0] / source.relative_to(DOCS).with_suffix(".html")).is_file(), source


@pytest.mark.parametrize("source", TUTORIALS, ids=lambda path: path.stem)
def test_every_tutorial_draws_a_picture(source: Path, site: tuple[Path, str]) -> None:
    assert page(site[0] / "tutorials" / f"{source.stem}.html").drawn >= 1


def test_links_and_pictures_lead_somewhere(site: tuple[Path, str]) -> None:
    dead = []
    for path in sorted(site[0].rglob("*.html")):
        for link in page(path).links + page(path).pictures:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("data:"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = target.is_file() and (not parts.fragment or target.suffix != ".html")
            if not known and not (target.is_file() and unquote(parts.fragment) in page(target).names):
                dead.append(f"{path.name}: {link}")
    assert dead == []


def test_outputs_are_those_of_any_machine(site: tuple[Path, str]) -> None:
    """No path of the machine that built the site, and no object shown by its address."""
    for path in sorted(site[0].rglob("*.html")):
        printed = page(path).printed
        for foreign in (str(ROOT), str(Path.home()), sys.prefix, tempfile.gettempdir(), " at 0x", "Traceback"):
            assert foreign not in printed, (path.name, foreign)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(DOCS)))
def test_python_is_executed_by_one_mechanism(source: Path) -> None:
    """Cells by the build, plain fences by test_docs.py, included programs by tests that name them."""
    kinds = [kind for kind, _, _ in fences(source)]
    plain = {kind for kind in kinds if kind in ("python", "py", "python3", "ipython", "ipython3", "pycon")}
    if is_notebook(source):
        assert not plain
        assert "{code-cell}" in kinds
    else:
        assert plain <= {"python"}
        assert "{code-cell}" not in kinds
    for kind, argument, _ in fences(source):
        assert kind not in ("{code-block}", "{code}", "{sourcecode}"), argument
        if kind == "{literalinclude}":
            program = (source.parent / argument).resolve()
            assert program.is_file()
            assert program.stem in _tested_examples(), program.name


def test_everything_public_is_in_the_reference(site: tuple[Path, str]) -> None:
    described = set().union(*(page(path).names for path in (site[0] / "reference").glob("*.html")))
    for name in krylov_descent.__all__:
        assert {f"krylov_descent.{name}", f"krylov_descent.optimizer.{name}"} & described, name


def test_the_reference_has_the_options_of_the_command_line() -> None:
    pytest.importorskip("tyro")
    from krylov_descent.cli.options import Check, Plot, Train

    sections = (DOCS / "reference" / "command_line.md").read_text().split("\n## ")[1:]
    assert len(sections) == 3
    for section, command in zip(sections, (Check, Train, Plot), strict=True):
        assert section.startswith(f"`krylov-descent {command.__name__.lower()} ")
        fields = [each.name for each in dataclasses.fields(command)][1:]  # the first is TARGET or LOG
        options = [{"try_for": "try"}.get(name, name.replace("_", "-")) for name in fields]
        assert re.findall(r"^\| `--(\S+)` \|", section, re.MULTILINE) == options


def test_the_quickstart_does_what_it_says(tmp_path: Path) -> None:
    pytest.importorskip("tyro")
    blocks = list(fences(DOCS / "start" / "quickstart.md"))
    cell = next(content for kind, _, content in blocks if kind == "{code-cell}")
    (tmp_path / "problem.py").write_text(cell.partition("%%writefile problem.py\n")[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "MPLBACKEND": "agg"}
    ran = 0
    for kind, _, content in blocks:
        command, _, told = content.partition("\n")
        if kind != "console" or not command.startswith("$ krylov-descent "):
            continue
        ran += 1
        done = subprocess.run(
            [sys.executable, "-m", "krylov_descent", *command.split()[2:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert _words(told) == _words(done.stdout)
    assert ran == 3
    assert (tmp_path / "overview.png").is_file()


def _words(transcript: str) -> list[str]:
    """What is the same in every run: no numbers, no units of time, no lines of single steps."""
    lines = [line for line in transcript.splitlines() if not line.startswith(("step ", "…"))]
    return re.sub(r"\b[\d.e+-]*\d( (ms|s|µs))?\b", "#", " ".join(lines)).split()
