"""Which file may import which: arrows point one way, and maths knows nothing of models, ranks or printing."""

from __future__ import annotations

import ast
from pathlib import Path

import krylov_descent

ROOT = Path(krylov_descent.__file__).parent

# Each module, and all it may import from the package; a module may not import what stands below it.
ALLOWED: dict[str, set[str]] = {
    "report": set(),
    "progress": set(),
    "bar": {"progress", "report"},
    "writers": {"report"},
    "permutation": set(),
    "layer_rules": set(),
    "layer_calls": {"layer_rules"},
    "output_hessian": set(),
    "loading": set(),
    "distributed.comm": set(),
    "distributed.process_group": {"distributed.comm"},
    "distributed": {"distributed.comm", "distributed.process_group"},
    "distributed.sharded": set(),
    "distributed.gathered": set(),
    "distributed.mesh": {"distributed.comm", "distributed.process_group", "distributed.sharded"},
    "parameters": {"distributed.sharded"},
    "distributed.state": {"distributed.comm", "distributed.process_group", "distributed.sharded", "parameters"},
    "distributed.launch": set(),
    "wolfe": set(),
    "bfgs": {"report", "wolfe"},
    "sums": {"distributed", "distributed.sharded", "parameters"},
    "sample_set": {"loading", "permutation"},
    "data": {"loading", "sample_set"},
    "sets": {"data"},
    "closure": {"data", "distributed.sharded"},
    "objective": {"closure", "data", "distributed", "parameters", "progress", "sums"},
    "run": {"bar", "distributed", "objective", "progress", "report"},
    "rows": set(),
    "curvature.convolution": set(),
    "twice": set(),
    "curvature.graph": {"closure"},
    "curvature.linearise": {"curvature.graph"},
    "curvature.gauss_newton": {"closure", "curvature.graph", "curvature.linearise"},
    "curvature.hessian": {"closure", "curvature.graph"},
    "curvature.fisher": {"closure", "curvature.gauss_newton", "curvature.graph", "curvature.linearise"},
    "curvature.product": {
        "closure",
        "curvature.convolution",
        "curvature.gauss_newton",
        "curvature.graph",
        "data",
        "distributed",
        "distributed.sharded",
        "objective",
        "rows",
        "sums",
        "twice",
    },
    "curvature": {
        "curvature.fisher",
        "curvature.gauss_newton",
        "curvature.graph",
        "curvature.hessian",
        "curvature.product",
    },
    "rule_check": {"distributed.sharded", "layer_rules"},
    "fisher_diagonal": {
        "closure",
        "curvature.gauss_newton",
        "distributed",
        "distributed.sharded",
        "layer_rules",
        "objective",
        "parameters",
        "rule_check",
    },
    "precondition": {"data", "distributed", "fisher_diagonal", "objective", "rule_check"},
    "random_root": {"closure", "output_hessian"},
    "kronecker_factors": {"closure", "data", "layer_calls", "objective", "random_root", "twice"},
    "kronecker_inverse": {"distributed", "parameters"},
    "kronecker_state": {"kronecker_factors", "kronecker_inverse", "parameters"},
    "kronecker": {
        "closure",
        "data",
        "distributed",
        "kronecker_factors",
        "kronecker_inverse",
        "kronecker_state",
        "objective",
    },
    "kronecker_memory": {"kronecker_factors", "objective"},
    "budget": set(),
    "carry": set(),
    "basis": {"carry", "distributed", "rows"},
    "starting": {"basis", "carry"},
    "search": {"basis", "bfgs", "carry", "distributed", "report", "rows", "starting"},
    "krylov": {"basis", "budget", "curvature", "data", "distributed", "objective", "progress", "rows"},
    "stepping": {"data", "objective", "precondition", "progress"},
    "acceptance": {"objective", "sets"},
    "consistency": {"closure", "data", "distributed", "objective", "sets", "sums"},
    "walk": {"data", "objective", "progress"},
    "confirmation": set(),
    "growing": {"data", "loading", "sample_set"},
    "memory": {"carry", "confirmation"},
    "drawing": {"data", "distributed", "growing", "memory", "sets"},
    "undoing": {"acceptance", "basis", "confirmation", "memory", "objective", "report", "sets"},
    "ksd": {
        "acceptance",
        "basis",
        "confirmation",
        "data",
        "distributed",
        "memory",
        "objective",
        "precondition",
        "report",
        "search",
        "sets",
        "stepping",
        "undoing",
        "walk",
    },
    "state": {
        "basis",
        "carry",
        "confirmation",
        "distributed",
        "distributed.sharded",
        "distributed.state",
        "memory",
        "parameters",
    },
    "sealing": {"distributed.sharded"},
    "distributed.tensor_file": {"sealing"},
    "atomic": {"distributed", "parameters"},
    "precision": set(),
    "base": {
        "data",
        "distributed",
        "distributed.sharded",
        "objective",
        "parameters",
        "progress",
        "report",
        "run",
        "sealing",
    },
    "jacobian": set(),
    "row_choice": {"closure", "data", "jacobian", "objective", "output_hessian"},
    "row_writing": {"jacobian", "objective", "output_hessian"},
    "batch_rows": {
        "closure",
        "curvature.gauss_newton",
        "data",
        "jacobian",
        "objective",
        "output_hessian",
        "row_choice",
        "row_writing",
        "twice",
    },
    "sketch": {"batch_rows", "closure", "data", "distributed", "objective"},
    "flow": {"basis", "distributed"},
    "sketch_memory": {"budget"},
    "rational": {"basis", "carry", "data", "distributed", "flow", "objective", "rows", "sketch", "sketch_memory"},
    "options": {
        "base",
        "budget",
        "curvature",
        "kronecker",
        "kronecker_memory",
        "krylov",
        "ksd",
        "precondition",
        "rational",
        "search",
    },
    "optimizer": {
        "atomic",
        "base",
        "budget",
        "closure",
        "consistency",
        "data",
        "distributed",
        "distributed.mesh",
        "distributed.sharded",
        "distributed.state",
        "drawing",
        "ksd",
        "memory",
        "objective",
        "options",
        "parameters",
        "precision",
        "precondition",
        "rational",
        "report",
        "search",
        "sets",
        "state",
        "undoing",
    },
    "distributed.checkpoint": {
        "distributed.comm",
        "distributed.state",
        "distributed.tensor_file",
        "optimizer",
        "sealing",
        "state",
    },
    "plot.records": {"report"},
    "plot.style": set(),
    "plot.curves": {"plot.records", "plot.style"},
    "plot.heat": {"plot.records", "plot.style"},
    "plot.panels": {"plot.curves", "plot.heat", "plot.records", "plot.style"},
    "plot": {"plot.curves", "plot.heat", "plot.panels", "plot.records"},
    "checking.as_found": {"consistency"},
    "checking.doubled": set(),
    "checking.finding": set(),
    "checking.naming": set(),
    "checking.trace": set(),
    "checking.problem": {
        "checking.as_found",
        "checking.naming",
        "closure",
        "curvature",
        "data",
        "optimizer",
        "sample_set",
        "sets",
    },
    "checking.advice": {"checking.naming", "checking.problem"},
    "checking.call": {
        "checking.finding",
        "checking.naming",
        "checking.problem",
        "checking.trace",
        "closure",
        "curvature.gauss_newton",
    },
    "checking.difference": {"checking.doubled", "checking.problem", "closure"},
    "checking.locate": {"checking.naming", "checking.problem", "checking.trace", "closure"},
    "checking.choice": {"checking.finding", "checking.problem", "optimizer", "sketch", "sketch_memory"},
    "checking.memory": {"basis", "budget", "checking.finding", "checking.problem", "curvature", "kronecker_memory"},
    "checking.parameters": {
        "checking.finding",
        "checking.naming",
        "checking.problem",
        "distributed.sharded",
        "precision",
    },
    "checking.rules": {"checking.finding", "checking.problem", "precondition", "stepping"},
    "checking.samples": {"checking.finding", "checking.problem", "closure", "consistency"},
    "checking.timing": {"checking.finding", "checking.problem", "curvature", "data", "precondition", "stepping"},
    "checking.twice": {
        "checking.difference",
        "checking.finding",
        "checking.locate",
        "checking.naming",
        "checking.problem",
        "curvature",
    },
    "checking": {
        "base",
        "checking.advice",
        "checking.as_found",
        "checking.call",
        "checking.choice",
        "checking.finding",
        "checking.memory",
        "checking.naming",
        "checking.parameters",
        "checking.problem",
        "checking.rules",
        "checking.samples",
        "checking.timing",
        "checking.twice",
        "closure",
        "curvature",
    },
    "": {
        "budget",
        "checking",
        "data",
        "growing",
        "kronecker",
        "optimizer",
        "precondition",
        "progress",
        "rational",
        "report",
        "run",
        "search",
    },
    "cli.options": set(),
    "integrations": set(),
    "integrations.deepxde": {"optimizer", "rational", "report", "run", "sketch_memory"},
    "integrations.lightning": {"data", "distributed", "optimizer", "report"},
    "integrations.pina": {"base", "optimizer", "report", "sketch_memory"},
    "integrations.skorch": {"base", "data", "optimizer"},
    "integrations.transformers": {"data", "optimizer", "report"},
    "cli.screen": {"checking.finding"},
    "cli.target": {"checking.naming"},
    "cli.plotting": {"checking.finding", "cli.screen", "cli.target", "plot"},
    "cli.training": {
        "checking.finding",
        "checking.naming",
        "cli.options",
        "cli.screen",
        "cli.target",
        "distributed.checkpoint",
        "distributed.tensor_file",
        "optimizer",
        "run",
        "writers",
    },
    "cli.checking": {"checking", "cli.screen", "cli.target"},
    "cli.commands": {"", "cli.checking", "cli.options", "cli.plotting", "cli.screen", "cli.target", "cli.training"},
    "cli": {"cli.commands"},
    "__main__": {"cli"},
}


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: set[str]) -> tuple[set[str], set[str]]:
    """Modules of the package, and others, that a file imports."""
    own, others = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.split(".")[0] != "krylov_descent":
                others.add(name)
                continue
            rest = name.removeprefix("krylov_descent.")
            own.add(rest if rest in known else rest.rpartition(".")[0])
    return own, others


def test_arrows() -> None:
    found = modules()
    assert set(found) == set(ALLOWED)
    order = list(ALLOWED)
    for name, path in found.items():
        own, _ = imports(path, set(found))
        assert own == ALLOWED[name], name
        assert all(order.index(other) < order.index(name) for other in own), name


# What is more than torch, and where; these packages are extras.
EXTRAS: dict[str, set[str]] = {
    "bar": {"tqdm"},
    **{f"plot.{name}": {"matplotlib"} for name in ("curves", "heat", "panels", "style")},
    "writers": {"numpy", "wandb"},
    "cli.screen": {"rich"},
    "distributed.tensor_file": {"safetensors"},
    "cli.commands": {"tyro"},
    "cli.options": {"tyro"},
    "integrations.lightning": {"lightning"},
    "integrations.transformers": {"accelerate", "transformers"},
    "integrations.skorch": {"numpy", "skorch"},
    "integrations.deepxde": {"deepxde"},
    "integrations.pina": {"pina"},
}


def test_only_torch_and_the_standard_library() -> None:
    import sys

    for name, path in modules().items():
        _, others = imports(path, set())
        roots = {other.split(".")[0] for other in others}
        assert roots - {*sys.stdlib_module_names, "torch"} == EXTRAS.get(name, set()), name


def test_the_core_imports_no_extra() -> None:
    """Nor does ``import krylov_descent`` in a process of its own, whatever is installed."""
    import subprocess
    import sys

    extras = sorted(set().union(*EXTRAS.values()))
    code = (
        "import sys, torch; torchs = set(sys.modules); import krylov_descent; "
        f"sys.exit(', '.join(m for m in {extras} if m in sys.modules and m not in torchs) or 0)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_one_folder_imports_torch_distributed_and_no_file_prints() -> None:
    for name, path in modules().items():
        _, others = imports(path, set())
        if not name.startswith("distributed."):
            assert not any(other.startswith("torch.distributed") for other in others), name
        assert "print(" not in path.read_text(), name


def test_files_stay_small() -> None:
    for name, path in modules().items():
        assert len(path.read_text().splitlines()) <= 300, name
