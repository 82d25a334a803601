"""Records of runs that nobody ran, for the tests of tables and figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def header(problem: str, label: str, seed: int, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "run",
        "problem": problem,
        "method": label.partition("-")[0],
        "label": label,
        "settings": {"krylov_dim": 20},
        "seed": seed,
        "budget": "20s",
        "clock": "cpu",
        "threads": 1,
        "parameters": 842_340,
        "samples": 1000,
        "held_out_samples": 500,
        "error_name": "squared error",
        "weight_decay": 2e-5,
        "started": "2026-11-15",
        "machine": {"cpu": "a processor", "cores": 2, "python": "3.11", "torch": "2.13"},
        **changes,
    }


def point(step: int, loss: float | None, **changes: Any) -> dict[str, Any]:
    """One second and five gradients a step; errors as the loss unless given."""
    return {
        "kind": "point",
        "step": step,
        "seconds": float(step),
        "sample_gradients": 5000.0 * step,
        "gradients": 5.0 * step,
        "loss": loss,
        "error": loss,
        "held_out_loss": loss,
        "held_out_error": loss,
        "report": None,
        **changes,
    }


def write(results: Path, lines: Sequence[dict[str, Any]]) -> Path:
    first = lines[0]
    path = results / str(first["problem"]) / f"{first['label']}-seed{first['seed']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
