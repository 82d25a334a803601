"""Every optimizer behind one small interface, so that one loop drives them all and counts the same costs.

KSD, Hessian-free and nonlinear CG are this project's; L-BFGS, SGD and Adam are torch's own. All of them minimise the
same f: the mean loss over the training set plus ½·c·‖θ‖².
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from experiments.problems import Problem
from experiments.settings import (
    AdamSettings,
    CGSettings,
    HessianFreeSettings,
    KSDSettings,
    LBFGSSettings,
    SGDSettings,
    changed,
)
from krylov_descent import KSD, PAPER, Fisher, StepReport, Subsets
from krylov_descent.baselines import HessianFree, NonlinearCG
from krylov_descent.distributed import SingleProcess
from krylov_descent.objective import Objective
from krylov_descent.parameters import ParameterVector


@dataclasses.dataclass(frozen=True)
class Advance:
    """What one advance cost, in gradients of one sample; whether the method can go no further."""

    sample_gradients: float
    report: StepReport | None = None
    stuck: bool = False


class Method(Protocol):
    """An optimizer as the loop sees it."""

    def advance(self, progress: float) -> Advance:
        """Go on by one step; ``progress`` ∈ [0, 1] is the share of the budget that is spent, for schedules."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that a continued run needs beside the model."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        ...


class _Stepping:
    """An optimizer of this project: one step is one advance.

    A fraction of 1 is the full batch: A = B = C = everything, in one pass.
    """

    def __init__(self, optimizer: Any, problem: Problem, model: nn.Module, seed: int, fraction: float | None) -> None:
        self._optimizer = optimizer
        closure = _closure(problem, model)
        if fraction == 1:
            self._arguments: tuple[Any, ...] = (lambda: closure(problem.train),)
        else:
            sets = Subsets(problem.train, batch_size=problem.batch_size, fraction=fraction, seed=seed)
            self._arguments = (closure, sets)

    def advance(self, progress: float) -> Advance:
        report: StepReport = self._optimizer.step(*self._arguments)
        return Advance(report.sample_gradients, report)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state)


class _LBFGS:
    """torch.optim.LBFGS with its strong-Wolfe search, a few iterations at a time.

    Each of torch's steps begins with an evaluation at a point that the last one has evaluated already, mostly; that
    one is remembered and costs nothing here.
    """

    ITERATIONS = 4

    def __init__(self, problem: Problem, model: nn.Module, seed: int, settings: LBFGSSettings) -> None:
        self._model, self._history = model, settings.history
        self._optimizer = self._make()
        group = {"params": list(model.parameters()), "weight_decay": problem.weight_decay}
        self._parameters = ParameterVector([group])
        self._objective = Objective(_closure(problem, model), self._parameters, SingleProcess())
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
        return Advance(self._objective.sample_gradients, stuck=stuck)

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


class _Stochastic:
    """SGD or Adam on mini-batches; epoch e visits the samples in the order of a permutation seeded by (seed, e)."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, problem: Problem, model: nn.Module, seed: int, batch: int
    ) -> None:
        self._optimizer = optimizer
        self._lr = float(optimizer.param_groups[0]["lr"])
        self._closure = _closure(problem, model)
        self._data = problem.train
        self._batch = min(batch, len(problem.train[0]))
        self._seed = seed
        self._step = 0
        self._order = torch.empty(0, dtype=torch.long)
        self._epoch = -1

    def advance(self, progress: float) -> Advance:
        per_epoch = len(self._data[0]) // self._batch  # what is left over takes its turn in another order
        epoch, position = divmod(self._step, per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(1_000_003 * self._seed + epoch)
            self._order, self._epoch = torch.randperm(len(self._data[0]), generator=generator), epoch
        chosen = self._order[position * self._batch : (position + 1) * self._batch]
        for group in self._optimizer.param_groups:
            group["lr"] = 0.5 * self._lr * (1 + math.cos(math.pi * min(progress, 1.0)))
        self._optimizer.zero_grad()
        self._closure(tuple(x[chosen] for x in self._data))[0].backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._step += 1
        return Advance(float(self._batch))

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict(), "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self._step, self._epoch = state["step"], -1


def _closure(problem: Problem, model: nn.Module) -> Callable[[Any], tuple[Tensor, Tensor]]:
    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return problem.loss(outputs, batch[-1]), outputs

    return closure


def _ksd(problem: Problem, model: nn.Module, seed: int, settings: KSDSettings) -> Method:
    options: dict[str, Any] = {**PAPER} if settings.paper else {}
    options.update(krylov_dim=settings.krylov_dim, curvature=settings.curvature, seed=seed)
    options["preconditioner"] = Fisher(floor=settings.floor)
    optimizer = KSD(model.parameters(), weight_decay=problem.weight_decay, **options)
    return _Stepping(optimizer, problem, model, seed, settings.fraction)


def _hessian_free(problem: Problem, model: nn.Module, seed: int, settings: HessianFreeSettings) -> Method:
    optimizer = HessianFree(
        model.parameters(),
        damping=settings.damping,
        curvature=settings.curvature,
        cg_iterations=settings.cg_iterations,
        weight_decay=problem.weight_decay,
    )
    return _Stepping(optimizer, problem, model, seed, settings.fraction)


def _cg(problem: Problem, model: nn.Module, seed: int, settings: CGSettings) -> Method:
    optimizer = NonlinearCG(model.parameters(), weight_decay=problem.weight_decay)
    return _Stepping(optimizer, problem, model, seed, None)


def _sgd(problem: Problem, model: nn.Module, seed: int, settings: SGDSettings) -> Method:
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=True,
        weight_decay=problem.weight_decay,
        fused=True,
    )
    return _Stochastic(optimizer, problem, model, seed, settings.batch)


def _adam(problem: Problem, model: nn.Module, seed: int, settings: AdamSettings) -> Method:
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr, weight_decay=problem.weight_decay, fused=True)
    return _Stochastic(optimizer, problem, model, seed, settings.batch)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A method by name: its settings, how to make it, and whether its learning rate follows the budget."""

    settings: Any
    make: Callable[..., Method]
    scheduled: bool = False


KINDS: Mapping[str, Kind] = {
    "ksd": Kind(KSDSettings(), _ksd),
    "ksd-paper": Kind(KSDSettings(floor=1e-4, paper=True), _ksd),
    "ksd-hessian": Kind(KSDSettings(curvature="hessian"), _ksd),
    "hf": Kind(HessianFreeSettings(), _hessian_free),
    "hf-hessian": Kind(HessianFreeSettings(curvature="hessian"), _hessian_free),
    "cg": Kind(CGSettings(), _cg),
    "lbfgs": Kind(LBFGSSettings(), _LBFGS),
    "sgd": Kind(SGDSettings(), _sgd, scheduled=True),
    "adam": Kind(AdamSettings(), _adam, scheduled=True),
}


def settings_of(name: str, changes: Mapping[str, Any]) -> Any:
    """The settings of a method, with some changed; strings are read as the type of the field.

    Raises:
        ValueError: no such method or setting, or a value that cannot be read.
    """
    if name not in KINDS:
        raise ValueError(f"There is no optimizer {name!r}; there are {', '.join(KINDS)}.")
    return changed(name, KINDS[name].settings, changes)
