"""Adam then L-BFGS, both torch's own, and SOAP of pytorch_optimizer."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from experiments.pinn.rivals.least_squares import LeastSquares, Trainable, in_turn
from experiments.supervised.stochastic import soap_of

_EVERY = 20  # steps of a first-order method, or iterations of L-BFGS, between two yields
#: Of the loss that L-BFGS sees: torch's keeps no pair with yᵀs below 1e-10, and creeps from there on. In float32 a
#: larger one overflows.
_SCALE = {torch.float64: 2.0**30, torch.float32: 2.0**10}


def adam_lbfgs(
    problem: Trainable,
    *,
    seed: int,
    adam_steps: int = 200,
    lr: float = 1e-3,
    decay: float = 1.0,
    history: int = 100,
) -> Iterator[float]:
    """Adam, then L-BFGS until it moves no more.

    Args:
        problem: what is solved.
        seed: not used: nothing is random.
        adam_steps: before L-BFGS begins.
        lr: of Adam.
        decay: of it, what is left at its last step; exponential.
        history: of L-BFGS.
    """
    return in_turn(adam(problem, adam_steps, lr, decay), lbfgs(problem, history))


def adam(problem: Trainable, steps: int, lr: float, decay: float = 1.0) -> Iterator[float]:
    """So many steps of Adam; yields the loss of the last evaluation."""
    optimizer = torch.optim.Adam(problem.model.parameters(), lr=lr, fused=True)
    for start in range(0, steps, _EVERY):
        loss = math.nan
        for step in range(start, min(start + _EVERY, steps)):
            optimizer.param_groups[0]["lr"] = lr * decay ** (step / max(1, steps - 1))
            loss = _step(problem, optimizer)
            if not math.isfinite(loss):
                break
        yield loss


def lbfgs(problem: Trainable, history: int, iterations: float = math.inf) -> Iterator[float]:
    """L-BFGS with torch's strong Wolfe search, up to so many iterations; restarted once where it stops moving."""
    squares, evaluations = LeastSquares(problem), _Remembered(problem)
    done, stuck = 0, False
    optimizer = _lbfgs(problem, history)
    while done < iterations:
        before = squares.point()
        optimizer.step(evaluations)  # type: ignore[no-untyped-call]
        done += _EVERY
        moved = not torch.equal(before, squares.point())
        if not moved:
            if stuck:
                return
            optimizer = _lbfgs(problem, history)
        stuck = not moved
        yield evaluations() / evaluations.scale
        if squares.renewed():
            evaluations.forget()
            for state in optimizer.state.values():  # a change of the gradient from one loss to another is no curvature
                state["d"].zero_()


def soap(
    problem: Trainable,
    *,
    seed: int,
    lr: float = 3e-3,
    frequency: int = 10,
    seconds: float | None = None,
    schedule: str = "cosine",
) -> Iterator[float]:
    """SOAP.

    Args:
        problem: what is solved.
        seed: not used: nothing is random.
        lr: at the beginning.
        frequency: steps between two changes of the preconditioner's basis.
        seconds: of this process, in which the learning rate falls; None for never. Steps alone are counted.
        schedule: "cosine" to 0, or "exponential" to a hundredth.

    Raises:
        ModuleNotFoundError: pytorch_optimizer is not installed.
        ValueError: there is no such schedule.
    """
    if schedule not in ("cosine", "exponential"):
        raise ValueError(f"schedule={schedule!r}: must be 'cosine' or 'exponential'.")
    optimizer = soap_of(problem.model.parameters(), lr, frequency)
    return _soap(problem, optimizer, lr, seconds, schedule)


def _soap(problem: Trainable, optimizer: Any, lr: float, seconds: float | None, schedule: str) -> Iterator[float]:
    spent = 0.0
    while True:
        began = time.process_time()
        share = 0.0 if seconds is None else min(1.0, spent / seconds)
        if share >= 1 and schedule == "cosine":
            return
        left = 0.5 * (1 + math.cos(math.pi * share)) if schedule == "cosine" else 0.01**share
        for group in optimizer.param_groups:
            group["lr"] = lr * left
        loss = math.nan
        for _ in range(_EVERY):
            loss = _step(problem, optimizer)
            if not math.isfinite(loss):
                break
        spent += time.process_time() - began
        if not math.isfinite(loss):
            yield math.nan
            return
        yield loss


def _step(problem: Trainable, optimizer: torch.optim.Optimizer) -> float:
    params = list(problem.model.parameters())
    loss, _ = problem.closure()
    value = float(loss.detach())
    if math.isfinite(value):  # SOAP would raise
        # Not backward: it would find the gradients of the points, too.
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = g
        optimizer.step()
    return value


def _lbfgs(problem: Trainable, history: int) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(
        problem.model.parameters(),
        max_iter=_EVERY,
        max_eval=5 * _EVERY,
        history_size=history,
        tolerance_grad=0,
        tolerance_change=0,
        line_search_fn="strong_wolfe",
    )


class _Remembered:
    """f times ``scale``, with .grad set; the point evaluated last, where torch's steps begin, costs nothing."""

    def __init__(self, problem: Trainable) -> None:
        self._squares = LeastSquares(problem)
        self._theta: Tensor | None = None
        self.scale = _SCALE[self._squares.parameters.dtype]

    def forget(self) -> None:
        """The loss is another."""
        self._theta = None

    def __call__(self) -> float:
        parameters, theta = self._squares.parameters, self._squares.point()
        if self._theta is None or not torch.equal(theta, self._theta):
            loss, gradient = self._squares.gradient()
            self._loss, self._gradient, self._theta = self.scale * loss, self.scale * gradient, theta
        for p, g in zip(parameters.params, parameters.unflatten(self._gradient), strict=True):
            p.grad = g.clone()
        return self._loss
