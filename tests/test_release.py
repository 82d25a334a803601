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
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text()


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
    files = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
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


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_may_only_read_and_use_actions_of_one_commit(workflow: Path) -> None:
    text = workflow.read_text()
    used = re.findall(r"uses: *(.*)", text)
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []
    assert "\npermissions:\n  contents: read\n" in text
    assert text.count("permissions:") == 1
