"""Value and gradient without and with ``compile=True``; what tracing and compiling take."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import Tensor

from benchmarks.problems import Problem, dense
from benchmarks.timing import Ratio, interleaved, ratio
from krylov_descent.compiled import CompiledPasses
from krylov_descent.data import Microbatch
from krylov_descent.distributed import SingleProcess
from krylov_descent.objective import Objective
from krylov_descent.parameters import ParameterVector


def pinn(width: int, points: int) -> tuple[list[Tensor], Any]:
    """Poisson's equation in the unit square by a network of three layers, float64."""
    model = dense((2, width, width, width, 1)).double()
    x = torch.rand(points, 2, dtype=torch.float64)

    def closure(_: Any) -> tuple[Tensor, Tensor]:
        at = x.detach().requires_grad_(True)
        (du,) = torch.autograd.grad(model(at).sum(), at, create_graph=True)
        second = [torch.autograd.grad(du[:, i].sum(), at, create_graph=True)[0][:, i] for i in range(2)]
        r = second[0] + second[1] + torch.sin(torch.pi * at).prod(1)
        return r.square().mean(), r

    return list(model.parameters()), closure


def measure(params: list[Tensor], closure: Any, batch: Microbatch, rounds: int) -> dict[str, Ratio | str | float]:
    """Without ÷ with, and the seconds until the first compiled pass."""
    parameters = ParameterVector([{"params": params, "weight_decay": 0.0}])
    passes = CompiledPasses()
    eager = Objective(closure, parameters, SingleProcess())
    compiled = Objective(closure, parameters, SingleProcess(), compiled=passes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.perf_counter()
        compiled.value_and_gradient([batch])
        built = time.perf_counter() - start
    refused = [str(w.message) for w in caught if "compile=True" in str(w.message)]
    if refused:
        return {"speed-up": "runs without: cannot be traced"}
    seconds = interleaved(
        {
            "eager": lambda: eager.value_and_gradient([batch]),
            "compiled": lambda: compiled.value_and_gradient([batch]),
        },
        rounds,
        warmup=5,
    )
    return {"speed-up": ratio(seconds["eager"], seconds["compiled"]), "seconds to compile": built}


def of_problem(problem: Problem, rounds: int) -> dict[str, Ratio | str | float]:
    """The same for one of the problems."""
    return measure(list(problem.model.parameters()), problem.closure, problem.microbatch, rounds)
