"""The table of the study: for each case the line that was printed, and what it and the best method came to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from experiments.common.markdown import section

_WITHIN = 2.0


def table(results: Path) -> str:
    """One row for each finished case in a folder.

    Raises:
        ValueError: there is none.
    """
    cases = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    cases = [case for case in cases if len(case["runs"]) == len(case["trial"])]
    if not cases:
        raise ValueError(f"{results} has no finished case: python -m experiments unseen run.")
    rows = [_row(case) for case in cases]
    tried, ran = (", ".join(sorted({f"{case['case'][key]:g}" for case in cases})) for key in ("try_seconds", "seconds"))
    head = ["problem", "seed", "line printed", f"its loss at {ran} s", "lowest loss", "by", ""]
    hits = sum(row[-1] == "hit" for row in rows)
    note = (
        f"{hits} of {len(rows)} hits: the line of a trial of {tried} CPU seconds ended within twice the lowest loss of "
        "all methods, and is not Adam's where one of ours ended lower."
    )
    return section("The line of a trial", head, rows, note)


def _row(case: dict[str, Any]) -> list[str]:
    printed = next(row["name"] for row in case["trial"] if row["line"] == case["line"])
    losses = {row["name"]: math.inf if row["loss_after"] is None else row["loss_after"] for row in case["runs"]}
    best = min(losses, key=lambda name: losses[name])
    ours = min(loss for name, loss in losses.items() if not name.startswith("Adam"))
    hit = losses[printed] <= _WITHIN * losses[best] and not (printed.startswith("Adam") and ours < losses[printed])
    problem, seed = case["case"]["problem"], str(case["case"]["seed"])
    shown = [f"{losses[name]:.2e}" for name in (printed, best)]
    return [problem, seed, printed, *shown, best, "hit" if hit else "miss"]
