"""Every optimizer behind one small interface, so that one loop drives them all and counts the same costs.

KSD, Hessian-free and nonlinear CG are this project's; L-BFGS, SGD, Adam, AdamW and Muon are torch's own, SOAP is that
of pytorch_optimizer. All of them minimise the same f: the mean loss over the training set plus ½·c·‖θ‖².
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from experiments.baselines import HessianFree, NonlinearCG
from experiments.common.loop import Advance
from experiments.common.settings import defaults, given
from experiments.supervised import kronecker, stochastic
from experiments.supervised.interface import Method, Stepping, closure_of
from experiments.supervised.problems import Problem
from krylov_descent import KSD, PAPER, Fisher, Subsets
from krylov_descent.distributed import SingleProcess
from krylov_descent.objective.objective import Objective
from krylov_descent.vectors.parameters import ParameterVector


def _stepping(optimizer: Any, problem: Problem, model: nn.Module, seed: int, fraction: float | None) -> Method:
    """On sets of this fraction; a fraction of 1 is the full batch: A = B = C = everything, in one pass."""
    closure = closure_of(problem, model)
    if fraction == 1:
        return Stepping(optimizer, lambda: closure(problem.train))
    return Stepping(
        optimizer, closure, Subsets(problem.train, batch_size=problem.batch_size, fraction=fraction, seed=seed)
    )


class _LBFGS:
    """torch.optim.LBFGS with its strong-Wolfe search, a few iterations at a time.

    Each of torch's steps begins with an evaluation at a point that the last one has evaluated already, mostly; that
    one is remembered and costs nothing here.
    """

    ITERATIONS = 4

    def __init__(self, problem: Problem, model: nn.Module, seed: int, *, history: int = 10) -> None:
        self._model, self._history = model, history
        self._optimizer = self._make()
        group = {"params": list(model.parameters()), "weight_decay": problem.weight_decay}
        self._parameters = ParameterVector([group])
        self._objective = Objective(closure_of(problem, model), self._parameters, SingleProcess())
        self._all = Subsets(problem.train, batch_size=problem.batch_size, seed=seed).draw(0, krylov_dim=1)
        self._last: dict[str, Tensor] = {}
        self._restarted = False

    def _make(self) -> torch.optim.LBFGS:
        return torch.optim.LBFGS(
            self._model.parameters(),
            max_iter=self.ITERATIONS,
            history_size=self._history,
            tolerance_grad=0,
            tolerance_change=0,
            line_search_fn="strong_wolfe",
        )

    def advance(self, progress: float) -> Advance:
        self._objective.sample_gradients = 0.0
        before = self._parameters.read()
        self._optimizer.step(self._evaluate)  # type: ignore[no-untyped-call]
        moved = not torch.equal(before, self._parameters.read())
        stuck = not moved and self._restarted
        if not moved:  # its history misleads it: begin anew, once
            self._optimizer = self._make()
        self._restarted = not moved
        return Advance(self._objective.sample_gradients, end="finished" if stuck else None)

    def _evaluate(self) -> float:
        theta = self._parameters.read()
        if not self._last or not torch.equal(theta, self._last["theta"]):
            losses, gradient = self._objective.value_and_gradient(self._all.a)
            self._last = {"theta": theta, "gradient": gradient, "loss": torch.tensor(losses.mean, dtype=torch.float64)}
        for p, g in zip(self._parameters.params, self._parameters.unflatten(self._last["gradient"]), strict=True):
            p.grad = g.clone()
        return float(self._last["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict(), "last": self._last, "restarted": self._restarted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self._last, self._restarted = state["last"], state["restarted"]


def _ksd(
    problem: Problem,
    model: nn.Module,
    seed: int,
    *,
    krylov_dim: int = 20,
    floor: float = 1e-2,
    curvature: str = "ggn",
    fraction: float | None = None,
    paper: bool = False,
) -> Method:
    """With a share of the samples in B and in C, 1/K unless given; ``paper`` takes ``PAPER`` for all the rest."""
    options: dict[str, Any] = {**PAPER} if paper else {}
    options.update(krylov_dim=krylov_dim, curvature=curvature, seed=seed, preconditioner=Fisher(floor=floor))
    optimizer = KSD(model.parameters(), weight_decay=problem.weight_decay, **options)
    return _stepping(optimizer, problem, model, seed, fraction)


class _Raised:
    """KSD in the paper's settings, with a larger K after some steps, on sets of the same size."""

    def __init__(
        self,
        problem: Problem,
        model: nn.Module,
        seed: int,
        *,
        krylov_dim: int = 20,
        raised: int = 80,
        after: int = 92,
        fraction: float = 0.05,
    ) -> None:
        self._make = functools.partial(_ksd, problem, model, seed, floor=1e-4, fraction=fraction, paper=True)
        self._now = self._make(krylov_dim=krylov_dim)
        self._raised, self._after, self._steps = raised, after, 0

    def advance(self, progress: float) -> Advance:
        if self._steps == self._after:
            self._raise(self._now.state_dict())
        self._steps += 1
        return self._now.advance(progress)

    def _raise(self, state: dict[str, Any]) -> None:
        self._now = self._make(krylov_dim=self._raised)
        self._now.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "method": self._now.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]
        if self._steps > self._after:
            self._raise(state["method"])
        else:
            self._now.load_state_dict(state["method"])


def _hessian_free(
    problem: Problem,
    model: nn.Module,
    seed: int,
    *,
    damping: float = 45.0,
    curvature: str = "ggn",
    fraction: float = 0.25,
    cg_iterations: int = 250,
) -> Method:
    """From λ₀ = ``damping``, with a share of the samples in curvature products, 1 for all."""
    options: dict[str, Any] = {"damping": damping, "curvature": curvature, "cg_iterations": cg_iterations}
    optimizer = HessianFree(model.parameters(), weight_decay=problem.weight_decay, **options)
    return _stepping(optimizer, problem, model, seed, fraction)


def _cg(problem: Problem, model: nn.Module, seed: int) -> Method:
    optimizer = NonlinearCG(model.parameters(), weight_decay=problem.weight_decay)
    return _stepping(optimizer, problem, model, seed, None)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A method by name: how it is made of problem, model, seed and settings, and whether a run depends on its budget.

    It does where a learning rate follows the budget, or where a setting is tuned for each: K-FAC's samples.
    """

    make: Callable[..., Method]
    scheduled: bool = False


KINDS: Mapping[str, Kind] = {
    "ksd": Kind(_ksd),
    "ksd-paper": Kind(functools.partial(_ksd, floor=1e-4, paper=True)),
    "ksd-raised": Kind(_Raised),
    "ksd-hessian": Kind(functools.partial(_ksd, curvature="hessian")),
    "deep": Kind(kronecker.ksd),
    "kfac": Kind(kronecker.KFAC, scheduled=True),
    "hf": Kind(_hessian_free),
    "hf-hessian": Kind(functools.partial(_hessian_free, curvature="hessian")),
    "cg": Kind(_cg),
    "lbfgs": Kind(_LBFGS),
    "sgd": Kind(stochastic.sgd, scheduled=True),
    "nesterov": Kind(stochastic.nesterov, scheduled=True),
    "adam": Kind(stochastic.adam, scheduled=True),
    "adamw": Kind(stochastic.adamw, scheduled=True),
    "muon": Kind(stochastic.muon, scheduled=True),
    "soap": Kind(stochastic.soap, scheduled=True),
}


def settings_of(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a method, with some changed; strings are read.

    Raises:
        ValueError: no such method or setting, or a value that cannot be read.
    """
    if name not in KINDS:
        raise ValueError(f"There is no optimizer {name!r}; there are {', '.join(KINDS)}.")
    return {**defaults(KINDS[name].make), **given(name, KINDS[name].make, changes)}
