"""The line to paste: imports, and ``KSD`` with the arguments that differ from its defaults."""

from __future__ import annotations

from krylov_descent.checking.naming import Names
from krylov_descent.checking.problem import Curvature, Problem


def line(names: Names, krylov_dim: int, curvature: Curvature, problem: Problem | None) -> str:
    """What to paste, from what was asked for and what was found."""
    arguments = [("params" if names.model is None else "model.parameters()", "")]
    rational = problem is not None and "basis" in problem.line
    deep = problem is not None and "**DEEP" in problem.line
    if krylov_dim != 20 and not rational and not deep:  # which have none, or their own
        arguments.append(("krylov_dim", str(krylov_dim)))
    chosen = curvature if problem is None or problem.working is None else problem.working
    if chosen != "ggn":
        arguments.append(("curvature", repr(chosen)))
    if problem is not None:
        arguments += problem.line.items()
    imports = "from krylov_descent import DEEP, KSD" if deep else "from krylov_descent import KSD"
    if any(name == "storage" for name, _ in arguments):
        imports = "import torch\n\nfrom krylov_descent import KSD, Storage"
    call = ", ".join(f"{name}={value}" if value else name for name, value in arguments)
    return f"{imports}\n\noptimizer = KSD({call})"
