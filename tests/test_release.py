"""What is released: one version everywhere, files that belong, an import that costs little more than torch's."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import entry_points, metadata, requires
from pathlib import Path

import pytest

import krylov_descent

ROOT = Path(__file__).parent.parent


def test_one_version_everywhere() -> None:
    version = krylov_descent.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+(rc\d+)?", version)
    assert metadata("krylov-descent")["Version"] == version
    assert tagged(ROOT, f"v{version}").returncode == 0
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD", "v*"], cwd=ROOT, capture_output=True, text=True)
    assert set(tags.stdout.split()) <= {f"v{version}"}


def tagged(root: Path, tag: str) -> subprocess.CompletedProcess[str]:
    """Run the check of the release workflow, which prints the notes of a tag."""
    command = [sys.executable, str(root / ".github/release_notes.py"), tag]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8")


RELEASED = (".github/release_notes.py", "src/krylov_descent/__init__.py", "CHANGELOG.md", "CITATION.cff")


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A tree with one release, 1.2.0."""
    texts = (
        (ROOT / RELEASED[0]).read_text(encoding="utf-8"),
        '__version__ = "1.2.0"\n',
        "# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2030-01-02\n\n- New.\n\n## [1.1.0] - 2029-01-02\n\n- Old.\n",
        "cff-version: 1.2.0\nversion: 1.2.0\ndate-released: 2030-01-02\n",
    )
    for name, text in zip(RELEASED, texts, strict=True):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_the_notes_of_a_tag_are_its_section_of_the_changelog(release: Path) -> None:
    done = tagged(release, "v1.2.0")
    assert (done.stdout, done.stderr, done.returncode) == ("- New.\n", "", 0)


@pytest.mark.parametrize(
    ("name", "before", "after", "told"),
    [
        (RELEASED[1], "1.2.0", "1.3.0", "The tag is v1.2.0, and the version is 1.3.0"),
        (RELEASED[2], "[1.2.0]", "[1.2.1]", "no section '## [1.2.0]"),
        (RELEASED[2], "- New.\n", "", "no section '## [1.2.0]"),
        (RELEASED[2], "2030-01-02", "soon", "no section '## [1.2.0]"),
        (RELEASED[3], "\nversion: 1.2.0", "\nversion: 1.1.0", "no line 'version: 1.2.0'"),
        (RELEASED[3], "2030", "2029", "no line 'date-released: 2030-01-02'"),
    ],
)
def test_a_tag_is_refused_where_files_disagree(release: Path, name: str, before: str, after: str, told: str) -> None:
    text = (release / name).read_text(encoding="utf-8")
    assert text.count(before) == 1
    (release / name).write_text(text.replace(before, after), encoding="utf-8")
    done = tagged(release, "v1.2.0")
    assert done.returncode == 1
    assert told in done.stderr


def test_what_is_declared_is_in_the_matrix_of_ci() -> None:
    """Classifiers name the Pythons of all tests, requires-python the oldest that is built, and torch what was run."""
    ci = (ROOT / ".github/workflows/ci.yml").read_text()
    tested = set(re.findall(r'python-version: "(.*)"', ci))
    built = {*tested, *re.findall(r'"(3\.\d+)"', ci.partition("matrix:")[2])}
    about = metadata("krylov-descent")
    declared = about.get_all("Classifier") or []
    assert {line.rpartition(" ")[2] for line in declared if re.search(r":: 3\.\d+$", line)} == tested
    assert about["Requires-Python"] == f">={min(built, key=lambda version: int(version.partition('.')[2]))}"
    (torch_run,) = re.findall(r"pip\" install torch==(\d+\.\d+)", (ROOT / ".ci/environment").read_text())
    assert f"torch>={torch_run}" in (requires("krylov-descent") or [])


def test_torch_is_all_it_needs() -> None:
    needed = [line for line in requires("krylov-descent") or [] if "extra ==" not in line]
    assert [re.split(r"[<>=!~ ]", line)[0] for line in needed] == ["torch"]


def test_the_console_script_leads_to_the_command_line() -> None:
    (script,) = (e for e in entry_points(group="console_scripts") if e.name == "krylov-descent")
    assert script.value == "krylov_descent.cli:main"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packaged = {name for name in names if name.startswith("krylov_descent/")}
    source = ROOT / "src" / "krylov_descent"
    expected = {f"krylov_descent/{path.relative_to(source).as_posix()}" for path in source.rglob("*.py")}
    assert packaged == expected | {"krylov_descent/py.typed"}
    info = f"krylov_descent-{krylov_descent.__version__}.dist-info/"
    assert {name for name in names if not name.startswith("krylov_descent/")} == {
        info + name for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
    }


def test_the_source_distribution_holds_source_tests_and_what_tells_of_them(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    folders = {name.partition("/")[0] for name in names}
    files = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert folders == {"src", "tests", *files}
    assert {"src/krylov_descent/__init__.py", "tests/krylov/test_step.py"} <= names
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0:
        assert names - {"PKG-INFO"} <= set(tracked.stdout.split())


def test_the_import_brings_nothing_beyond_torch_and_no_room_that_training_does_without() -> None:
    code = "import sys, torch; torchs = set(sys.modules); import krylov_descent; print(*(set(sys.modules) - torchs))"
    brought = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    rooms = {name.split(".")[1] for name in brought if name.startswith("krylov_descent.")}
    assert [name for name in brought if name.partition(".")[0] != "krylov_descent"] == []
    assert not rooms & {"checking", "checkpoint", "cli", "integrations", "plot", "writers"}


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
#: The rights beyond reading, by workflow: release.yml publishes to PyPI, and makes a release on GitHub.
RIGHTS = {"release": ["id-token: write", "contents: write"]}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_use_actions_of_one_commit_and_no_more_rights_than_needed(workflow: Path) -> None:
    text = workflow.read_text()
    pinned = re.compile(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    assert [line for line in re.findall(r"uses: *(.*)", text) if not pinned.fullmatch(line)] == []
    assert "\npermissions:\n  contents: read\n" in text
    assert text.count("permissions:") == 1 + len(RIGHTS.get(workflow.stem, []))
    assert re.findall(r"[\w-]+: write\b.*", text) == RIGHTS.get(workflow.stem, [])
