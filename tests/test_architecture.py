"""The rooms of the package and the arrows between them: imports point down, and extras stay where they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import krylov_descent

ROOT = Path(krylov_descent.__file__).parent

# Each room, and the rooms it may import from, all of which stand above it. A room is a folder or a file of the package.
ROOMS = {
    "distributed": "",
    "report": "",
    "samples": "",
    "progress": "report",
    "vectors": "distributed",
    "safety": "distributed vectors",
    "layers": "distributed",
    "state": "distributed vectors",
    "objective": "distributed progress safety samples vectors",
    "curvature": "distributed objective samples vectors",
    "stepping": "distributed objective progress report samples state vectors",
    "preconditioners": "curvature distributed layers objective samples stepping vectors",
    "krylov": "curvature distributed objective preconditioners progress report safety samples state stepping vectors",
    "run": "distributed objective progress report",
    "base": "distributed objective progress report run safety samples state stepping vectors",
    "flow": "base curvature distributed krylov layers objective report safety samples stepping vectors",
    "optimizer": "base curvature distributed krylov objective preconditioners report safety samples stepping vectors",
    "least_squares": "krylov optimizer report",
    "checkpoint": "base distributed safety state vectors",
    "writers": "report",
    "plot": "report",
    "checking": "base curvature distributed flow krylov objective optimizer preconditioners safety samples stepping "
    "vectors",
    "__init__": "checking flow krylov least_squares optimizer preconditioners progress report run safety samples",
    "integrations": "base distributed flow optimizer report run samples",
    "cli": "__init__ base checking checkpoint flow optimizer plot run safety writers",
    "__main__": "cli",
}
# Packages beyond torch and the standard library, by file; each is an extra.
EXTRAS = {
    "progress": "tqdm",
    "writers": "numpy wandb",
    "safety/tensor_file": "safetensors",
    **{f"plot/{name}": "matplotlib" for name in ("pictures", "style")},
    "cli/commands": "tyro",
    "cli/options": "tyro",
    "integrations/lightning": "lightning",
    "integrations/transformers": "accelerate transformers",
    "integrations/skorch": "numpy skorch",
    "integrations/deepxde": "deepxde",
    "integrations/pina": "pina",
}
FILES = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in ROOT.rglob("*.py")}


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Files of the package, and modules of others, that a file imports."""
    own, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            top, *parts = name.split(".")
            if top != "krylov_descent":
                others.add(name)
                continue
            while parts and (file := "/".join(parts)) not in FILES and f"{file}/__init__" not in FILES:
                parts.pop()  # a class or function
            file = "/".join(parts)
            own.add(file if file in FILES else f"{file}/__init__".lstrip("/"))
    return own, others


def room(file: str) -> str:
    return file.split("/")[0]


def test_imports_point_down() -> None:
    assert {room(file) for file in FILES} == set(ROOMS)
    order = list(ROOMS)
    for name, allowed in ROOMS.items():
        files = [file for file in FILES if room(file) == name]
        found = {room(other) for file in files for other in imports(FILES[file])[0]} - {name}
        assert found == set(allowed.split()), name
        assert all(order.index(other) < order.index(name) for other in found), name


def test_no_circle_of_files() -> None:
    arrows = {file: imports(path)[0] - {file} for file, path in FILES.items()}
    while free := {file for file, others in arrows.items() if not others & arrows.keys()}:
        arrows = {file: others for file, others in arrows.items() if file not in free}
    assert not arrows


def test_extras_stay_where_they_are_used() -> None:
    for file, path in FILES.items():
        roots = {other.split(".")[0] for other in imports(path)[1]}
        assert roots - {*sys.stdlib_module_names, "torch"} == set(EXTRAS.get(file, "").split()), file


def test_the_core_imports_no_extra() -> None:
    """Nor does ``import krylov_descent`` in a process of its own, whatever is installed."""
    extras = sorted({name for names in EXTRAS.values() for name in names.split()})
    code = (
        "import sys, torch; torchs = set(sys.modules); import krylov_descent; "
        f"sys.exit(', '.join(m for m in {extras} if m in sys.modules and m not in torchs) or 0)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_one_room_imports_torch_distributed_and_no_file_prints() -> None:
    for file, path in FILES.items():
        distributed = any(other.startswith("torch.distributed") for other in imports(path)[1])
        assert not distributed or room(file) == "distributed", file
        assert " print(" not in path.read_text(), file
