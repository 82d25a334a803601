"""What the commands ``run`` of the paper's study and of that of deep networks do."""

from __future__ import annotations

from pathlib import Path

import torch

from experiments.common.progress import follow
from experiments.supervised.problems import load_problem
from experiments.supervised.run import RunConfig, run


def train(
    problem: str,
    config: RunConfig,
    results: Path,
    *,
    data: Path | None,
    samples: int | None,
    quiet: bool,
    tensorboard: Path | None = None,
) -> None:
    """Run, or continue, with a bar, and print the file."""
    # Saturated units have gradients below the normal range of float32, on which a pass takes up to eight times as long.
    torch.set_flush_denormal(True)
    loaded = load_problem(problem, data, samples)
    follow(
        lambda watch: run(loaded, config, results, watch),
        f"{problem}, {config.name}, seed {config.seed}",
        config.budget,
        ("step", "loss", "error", "held_out_error"),
        interrupted="the same command continues from the last checkpoint",
        quiet=quiet,
        tensorboard=tensorboard,
    )
