"""What each way to a smaller memory costs: the basis phase and an evaluation of the search, ÷ those without it."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import torch

from benchmarks.problems import Problem
from benchmarks.timing import Ratio, ratio
from krylov_descent import KSD, Storage, Subsets

K = 20


def ways(P: int, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Name → arguments of KSD."""
    smaller = torch.bfloat16 if dtype == torch.float32 else torch.float32
    return {
        "all kept": {},
        "graphs rebuilt": {"memory_budget": (K + 1) * P * dtype.itemsize},
        f"{str(smaller).removeprefix('torch.')} basis": {"storage": Storage(dtype=smaller)},
    }


def measure(problem: Problem, *, batch_size: int, rounds: int) -> dict[str, dict[str, Ratio]]:
    """Steps of each way in turn, each on its own copy of the model."""
    P = sum(p.numel() for p in problem.model.parameters())
    runs = {}
    for name, settings in ways(P, problem.x.dtype).items():
        own = dataclasses.replace(problem, model=copy.deepcopy(problem.model))
        optimizer = KSD(own.model.parameters(), krylov_dim=K, **settings)
        runs[name] = (own, optimizer, Subsets((problem.x, problem.y), batch_size=batch_size, seed=0))
    basis: dict[str, list[float]] = {name: [] for name in runs}
    evaluation: dict[str, list[float]] = {name: [] for name in runs}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that graphs are rebuilt
        for turn in range(rounds + 1):
            for name, (own, optimizer, sets) in runs.items():
                report = optimizer.step(own.closure, sets)
                if turn:  # the first has checks of its own
                    basis[name].append(report.seconds["basis"] / len(report.ritz_values))
                    evaluation[name].append(report.seconds["search"] / report.inner_evaluations)
    return {
        name: {
            "a basis vector": ratio(basis[name], basis["all kept"]),
            "an evaluation": ratio(evaluation[name], evaluation["all kept"]),
        }
        for name in runs
        if name != "all kept"
    }
