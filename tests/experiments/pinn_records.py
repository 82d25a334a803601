"""Records of PINN runs that nobody ran, for the tests of the study, its tables and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def write(
    results: Path,
    problem: str,
    method: str,
    error: float,
    *,
    seed: int = 0,
    seconds: float = 60.0,
    label: str = "",
    end: str = "budget",
    settings: dict[str, Any] | None = None,
    fields: float | None = None,
    loss: float | None = None,
    third: float = 8.0,
) -> Path:
    """A record of a run that nobody ran: its error falls by the same factor at each point."""
    label = label or f"{method}-{seconds:g}s"
    path = results / "pinn" / problem / "3x32" / f"{label}-seed{seed}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    names = {"problem": problem, "method": method, "label": label, "seed": seed, "seconds": seconds}
    header = {"kind": "run", **names, "network": "3x32", "settings": settings or {}}
    loss = error**2 if loss is None else loss
    points = [
        {"seconds": t, "steps": i, "loss": loss**share, "held_out": 3 * loss**share, "error": error**share}
        for i, t in enumerate((0.0, 1.0, third, seconds))
        for share in [i / 3]
    ]
    lines = [
        header,
        *({"kind": "point", **p} for p in points),
        {"kind": "end", "reason": end, "spent": 61.5, **points[-1]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if fields is not None:
        axis = np.linspace(0, 1, 40, dtype=np.float32)
        exact = np.sin(np.pi * axis[:, None]) * axis
        off = fields * np.sin(7 * axis[:, None] + 3 * axis)
        np.savez_compressed(
            path.with_suffix(".npz"), names=np.array(["x", "t"]), first=axis, second=axis, exact=exact, error=off
        )
    return path
