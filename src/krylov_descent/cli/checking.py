"""``krylov-descent check``."""

from __future__ import annotations

import json
import sys
from typing import Literal

from krylov_descent.checking import check
from krylov_descent.cli.screen import show
from krylov_descent.cli.target import UsageError, load


def check_target(target: str, krylov_dim: int, curvature: Literal["ggn", "hessian", "fisher"], *, as_json: bool) -> int:
    """Check a target and show what was found; returns the exit status."""
    problem = load(target)
    try:
        report = check(problem.closure, problem.model, problem.sets, krylov_dim=krylov_dim, curvature=curvature)
    except ValueError as error:
        raise UsageError(str(error), "krylov-descent check --help") from error
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=2, ensure_ascii=False) + "\n")
    else:
        show(report)
    return 0 if report.ok else 1
