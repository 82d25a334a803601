"""Methods with the Kronecker-factored preconditioner: KSD on sets that grow, and K-FAC alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from experiments.interface import Advance, Method, Stepping, closure_of
from experiments.problems import Problem
from experiments.settings import KFACSettings, KroneckerSettings
from krylov_descent import DEEP, KSD, Growing, Kronecker, Search
from krylov_descent.curvature import CURVATURES
from krylov_descent.distributed import SingleProcess
from krylov_descent.krylov.builder import KrylovBuilder
from krylov_descent.objective.objective import Objective
from krylov_descent.vectors.parameters import ParameterVector


class _NeverGrowing(Growing):
    """For ablations: the sets of the first step's size at every step."""

    def draw(self, iteration: int, **how: Any) -> Any:
        return super().draw(iteration, **{**how, "search_growth": 0, "model_growth": 0})


def ksd(problem: Problem, model: nn.Module, seed: int, settings: KroneckerSettings) -> Method:
    """``KSD(**DEEP)`` on ``Growing`` sets; settings other than their defaults are for ablations."""
    options: dict[str, Any] = {**DEEP, "krylov_dim": settings.krylov_dim, "seed": seed}
    if settings.preconditioner == "kronecker":
        options["preconditioner"] = Kronecker(damping=settings.damping, memory=settings.memory)
    else:
        options["preconditioner"] = None if settings.preconditioner == "none" else settings.preconditioner
    if settings.searches:
        options["search"] = Search(evaluations=8)
    optimizer = KSD(model.parameters(), weight_decay=problem.weight_decay, **options)
    if not settings.earlier:  # no setting: users need none
        optimizer._settings = dataclasses.replace(optimizer._settings, earlier=0)
    kind = Growing if settings.grows else _NeverGrowing
    sets = kind(problem.train, batch_size=problem.batch_size, start=settings.start, seed=seed)
    return Stepping(optimizer, closure_of(problem, model), sets)


class _KFAC:
    """K-FAC alone: the minimum of the quadratic model over F⁻¹g and the last step, on a fixed number of fresh samples.

    As in Martens & Grosse 2015, section 7, with damping in the preconditioner alone, a constant one that is tuned. No
    loss is looked at before a step is taken.
    """

    def __init__(self, problem: Problem, model: nn.Module, seed: int, settings: KFACSettings) -> None:
        group = {"params": list(model.parameters()), "weight_decay": problem.weight_decay}
        self._parameters = ParameterVector([group])
        self._objective = Objective(closure_of(problem, model), self._parameters, SingleProcess())
        self._sets = Growing(problem.train, batch_size=problem.batch_size, start=settings.batch, seed=seed)
        self._preconditioner = Kronecker(damping=settings.damping).prepare()
        self._builder = KrylovBuilder(CURVATURES["ggn"], 1, None)
        self._seed, self._step = seed, 0
        self._factors: dict[str, Tensor] = {}
        self._last: Tensor | None = None

    def advance(self, progress: float) -> Advance:
        objective = self._objective
        objective.sample_gradients = 0.0
        draw = self._sets.draw(self._step, krylov_dim=1)
        _, g = objective.value_and_gradient(draw.a)
        solve, factors = self._preconditioner.refresh(
            objective, draw.b, self._factors or None, (self._seed, self._step)
        )
        assert solve is not None
        self._factors, self._step = dict(factors), self._step + 1
        subspace = self._builder(objective, draw.b, solve, g.clone(), self._last)
        V = subspace.V.tensor()
        c = -torch.linalg.lstsq(subspace.H, (V @ g).double()[:, None]).solution[:, 0]
        self._last = c.to(V) @ V
        objective.move_to(objective.point() + self._last)
        return Advance(objective.sample_gradients, stuck=not bool(self._last.isfinite().all()))

    def state_dict(self) -> dict[str, Any]:
        return {"factors": self._factors, "last": self._last, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._factors, self._last, self._step = state["factors"], state["last"], state["step"]


def kfac(problem: Problem, model: nn.Module, seed: int, settings: KFACSettings) -> Method:
    """K-FAC with the quadratic step."""
    return _KFAC(problem, model, seed, settings)
