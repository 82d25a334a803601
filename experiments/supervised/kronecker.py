"""Methods with the Kronecker-factored preconditioner: KSD on sets that grow, and K-FAC alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from experiments.common.loop import Advance
from experiments.supervised.interface import Method, Stepping, closure_of
from experiments.supervised.problems import Problem
from krylov_descent import DEEP, KSD, Growing, Kronecker, Search
from krylov_descent.curvature import CurvatureProduct, GaussNewtonGraph
from krylov_descent.distributed import SingleProcess
from krylov_descent.krylov.orthonormal_basis import shortest_basis
from krylov_descent.krylov.subspace import Krylov
from krylov_descent.objective.objective import Objective
from krylov_descent.state import Parts, put_together, taken_apart
from krylov_descent.vectors.parameters import ParameterVector
from krylov_descent.vectors.storage import BasisStorage


class _LastStepOnly(Krylov):
    """For ablations: no step before the last one is adjoined."""

    earlier = 0


class NeverGrowing(Growing):
    """The sets of the first step's size at every step."""

    def draw(self, iteration: int, **how: Any) -> Any:
        """Draw them as before any growth."""
        return super().draw(iteration, **{**how, "search_growth": 0, "model_growth": 0})


def ksd(
    problem: Problem,
    model: nn.Module,
    seed: int,
    *,
    krylov_dim: int = 1,
    preconditioner: str = "kronecker",
    damping: float = 1e-2,
    memory: float = 0.98,
    start: int = 500,
    grows: bool = True,
    searches: bool = False,
    earlier: bool = True,
) -> Method:
    """``KSD(**DEEP)`` on ``Growing`` sets; settings other than their defaults are for ablations.

    ``searches`` minimises the loss over the subspace in every step; without ``earlier``, only the last step is ever in
    it. ``preconditioner`` is kronecker, fisher or none.
    """
    options: dict[str, Any] = {**DEEP, "krylov_dim": krylov_dim, "seed": seed}
    if preconditioner == "kronecker":
        options["preconditioner"] = Kronecker(damping=damping, memory=memory)
    else:
        options["preconditioner"] = None if preconditioner == "none" else preconditioner
    if searches:
        options["search"] = Search(evaluations=8)
    if not earlier:  # no setting: users need none
        options["subspace"] = _LastStepOnly(krylov_dim)
    optimizer = KSD(model.parameters(), weight_decay=problem.weight_decay, **options)
    kind = Growing if grows else NeverGrowing
    sets = kind(problem.train, batch_size=problem.batch_size, start=start, seed=seed)
    return Stepping(optimizer, closure_of(problem, model), sets)


class KFAC:
    """K-FAC alone: the minimum of the quadratic model over F⁻¹g and the last step, on a fixed number of fresh samples.

    As in Martens & Grosse 2015, section 7, with damping in the preconditioner alone, a constant one that is tuned. No
    loss is looked at before a step is taken.
    """

    def __init__(
        self, problem: Problem, model: nn.Module, seed: int, *, batch: int = 1000, damping: float = 1e-2
    ) -> None:
        group = {"params": list(model.parameters()), "weight_decay": problem.weight_decay}
        self._parameters = ParameterVector([group])
        self._objective = Objective(closure_of(problem, model), self._parameters, SingleProcess())
        self._sets = Growing(problem.train, batch_size=problem.batch_size, start=batch, seed=seed)
        self._preconditioner = Kronecker(damping=damping)
        self._seed, self._step = seed, 0
        self._state = self._preconditioner.init()
        self._last: Tensor | None = None

    def advance(self, progress: float) -> Advance:
        """One step."""
        objective = self._objective
        objective.sample_gradients = 0.0
        draw = self._sets.draw(self._step, krylov_dim=1)
        _, g = objective.value_and_gradient(draw.a)
        found = self._preconditioner.refresh(objective, draw.b, self._state, (self._seed, self._step))
        assert found.solve is not None
        self._state, self._step = found.state, self._step + 1
        product = CurvatureProduct(GaussNewtonGraph, objective, draw.b)
        previous = () if self._last is None else (self._last,)
        subspace = shortest_basis(product.within, found.solve, g, previous, BasisStorage(2, g), objective.comm)
        if subspace is None:
            return Advance(objective.sample_gradients, end="finished")
        V = subspace.V.tensor()
        c = -torch.linalg.lstsq(subspace.H, (V @ g).double()[:, None]).solution[:, 0]
        self._last = c.to(V) @ V
        objective.move_to(objective.point() + self._last)
        return Advance(objective.sample_gradients, end=None if bool(self._last.isfinite().all()) else "finished")

    def state_dict(self) -> dict[str, Any]:
        """The factors, the last step, and how many were taken."""
        return {"preconditioner": taken_apart(self._state)._asdict(), "last": self._last, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self._state = put_together(self._preconditioner.init(), Parts(**state["preconditioner"]))
        self._last, self._step = state["last"], state["step"]
