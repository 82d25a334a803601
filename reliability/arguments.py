"""How an optimizer is called on a random problem: its arguments, and the data set cut in some way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent import KSD, PAPER, GaussNewtonFlow, Search, Storage, Subsets
from reliability.recipe import Problem


def wide(p: Tensor) -> torch.dtype:
    """The dtype in which KSD computes with a parameter."""
    return torch.float32 if p.dtype == torch.bfloat16 else p.dtype


def sets_of(problem: Problem, data: tuple[Tensor, Tensor]) -> Subsets | None:
    """A data set cut in some way, or None for the full batch."""
    options: dict[str, dict[str, Any]] = {
        "subsets": {"batch_size": 4},
        "half": {"batch_size": 5, "fraction": 0.5},
        "tenth": {"batch_size": 100, "fraction": 0.1},
        "single batches": {"batch_size": 1, "fraction": 0.4},
    }
    return None if problem.sets == "full" else Subsets(data, seed=problem.seed, **options[problem.sets])


def optimizer_of(problem: Problem, model: nn.Module) -> KSD | GaussNewtonFlow:
    """The method of a problem, with its settings."""
    shared: dict[str, Any] = {
        "weight_decay": problem.weight_decay,
        "rollback": problem.rollback,
        "seed": problem.seed,
    }
    if problem.method != "ksd":
        rows = 3 if problem.method == "flow of 3 rows" else 400
        return GaussNewtonFlow(model.parameters(), rows=rows, **shared)
    return KSD(model.parameters(), **_of_ksd(problem, model), **shared)


def _of_ksd(problem: Problem, model: nn.Module) -> dict[str, Any]:
    paper = problem.preconditioner == "paper"
    size = sum(p.numel() * wide(p).itemsize for p in model.parameters() if p.requires_grad)
    budgets = {"rebuilt graphs": (problem.krylov_dim + 1) * size + 1, "no room": 1}
    stored = {"bfloat16 basis": torch.bfloat16, "float32 basis": torch.float32}
    searches = {
        "default": Search(),
        "absolute": Search(negative="absolute"),
        "short": Search(2, 3),
        "tiny floor": Search(floor=1e-300),
    }
    return {
        "krylov_dim": problem.krylov_dim,
        "curvature": problem.curvature,
        "preconditioner": PAPER["preconditioner"] if paper else None if problem.preconditioner == "none" else "fisher",
        "previous": None if problem.previous == "none" else problem.previous,
        "search": PAPER["search"] if paper else searches[problem.search],
        "memory_budget": budgets.get(problem.memory),
        "storage": Storage(stored.get(problem.memory)),
    }
