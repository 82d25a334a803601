"""First-order methods on mini-batches: torch's SGD, Adam, AdamW and Muon, SOAP of pytorch_optimizer; schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from experiments.common.loop import Advance
from experiments.supervised.interface import Method, closure_of
from experiments.supervised.problems import Problem

WARM_UP = 0.02  # share of the budget in which the learning rate rises from a tenth to the whole
CONSTANT = 0.5  # share of the budget after which the "linear" schedule begins to fall


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _linear(progress: float) -> float:
    return min(1.0, (1 - progress) / (1 - CONSTANT))


def _warm(progress: float) -> float:
    return min(1.0, 0.1 + 0.9 * progress / WARM_UP)


#: Share of the learning rate by the share of the budget that is spent; all end at zero.
SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "plain": _cosine,
    "cosine": lambda progress: _warm(progress) * _cosine(progress),
    "linear": lambda progress: _warm(progress) * _linear(progress),
}


class _Both:
    """Two optimizers with parameters of their own, as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def state_dict(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        self.param_groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]


class Stochastic:
    """An optimizer on mini-batches; epoch e visits the samples in the order of a permutation seeded by (seed, e).

    ``decay`` is the c of ½c‖θ‖² whose gradient is added here: for optimizers that know no other decay than one beside
    the objective.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | _Both,
        problem: Problem,
        model: nn.Module,
        seed: int,
        batch: int,
        schedule: str = "plain",
        decay: float = 0.0,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule={schedule!r}: must be {' or '.join(SCHEDULES)}.")
        if batch < 1:
            raise ValueError(f"batch={batch}: must be at least 1.")
        self._optimizer, self._schedule, self._decay = optimizer, SCHEDULES[schedule], decay
        self._lr = float(optimizer.param_groups[0]["lr"])
        self._closure = closure_of(problem, model)
        self._parameters = list(model.parameters())
        self._data = problem.train
        self._batch = min(batch, len(problem.train[0]))
        self._seed = seed
        self._step = 0
        self._order = torch.empty(0, dtype=torch.long)
        self._epoch = -1

    def advance(self, progress: float) -> Advance:
        """One mini-batch."""
        per_epoch = len(self._data[0]) // self._batch  # what is left over takes its turn in another order
        epoch, position = divmod(self._step, per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(1_000_003 * self._seed + epoch)
            self._order, self._epoch = torch.randperm(len(self._data[0]), generator=generator), epoch
        chosen = self._order[position * self._batch : (position + 1) * self._batch]
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * self._schedule(min(progress, 1.0))
        self._optimizer.zero_grad()
        loss = self._closure(tuple(x[chosen] for x in self._data))[0]
        self._step += 1
        if math.isfinite(loss.item()):  # else SOAP would raise; the loop sees at its next point that this has diverged
            loss.backward()  # type: ignore[no-untyped-call]
            self._add_decay()
            self._optimizer.step()
        return Advance(float(self._batch))

    @torch.no_grad()
    def _add_decay(self) -> None:
        for p in self._parameters:
            if self._decay and p.grad is not None:
                p.grad.add_(p, alpha=self._decay)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, and the step, from which the order of samples follows."""
        return {"optimizer": self._optimizer.state_dict(), "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._step, self._epoch = state["step"], -1


def sgd(
    problem: Problem, model: nn.Module, seed: int, *, lr: float = 0.01, momentum: float = 0.9, batch: int = 200
) -> Method:
    """SGD with Nesterov's momentum; the learning rate falls to zero over the budget along a cosine."""
    return nesterov(problem, model, seed, lr=lr, momentum=momentum, batch=batch, schedule="plain")


def nesterov(
    problem: Problem,
    model: nn.Module,
    seed: int,
    *,
    lr: float = 0.01,
    momentum: float = 0.9,
    batch: int = 200,
    schedule: str = "cosine",
) -> Method:
    """The same with a schedule to choose and a warm-up."""
    decay = problem.weight_decay
    optimizer = torch.optim.SGD(
        model.parameters(), lr=lr, momentum=momentum, nesterov=True, weight_decay=decay, fused=True
    )
    return Stochastic(optimizer, problem, model, seed, batch, schedule)


def adam(problem: Problem, model: nn.Module, seed: int, *, lr: float = 1e-3, batch: int = 200) -> Method:
    """Adam; the learning rate falls to zero over the budget along a cosine."""
    return adamw(problem, model, seed, lr=lr, batch=batch, schedule="plain")


def adamw(
    problem: Problem, model: nn.Module, seed: int, *, lr: float = 1e-3, batch: int = 200, schedule: str = "cosine"
) -> Method:
    """AdamW with no decay of its own, which is torch's Adam: the problem's decay is part of what is minimised."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=problem.weight_decay, fused=True)
    return Stochastic(optimizer, problem, model, seed, batch, schedule)


def muon(
    problem: Problem, model: nn.Module, seed: int, *, lr: float = 1e-3, batch: int = 200, schedule: str = "cosine"
) -> Method:
    """torch's Muon for weight matrices, Adam for embeddings, convolutions, biases and the last layer, as is usual.

    Muon's steps have the root mean square of Adam's, so that one learning rate serves both.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    last = [m.weight for m in model.modules() if isinstance(m, nn.Linear)][-1]
    hidden = [p for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings and p is not last]
    chosen = {id(p) for p in hidden}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizer = _Both(
        torch.optim.Muon(hidden, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.Adam(others, lr=lr, fused=True),
    )
    return Stochastic(optimizer, problem, model, seed, batch, schedule, problem.weight_decay)


def soap(
    problem: Problem, model: nn.Module, seed: int, *, lr: float = 3e-3, batch: int = 200, schedule: str = "cosine"
) -> Method:
    """SOAP."""
    optimizer = soap_of(model.parameters(), lr)
    return Stochastic(optimizer, problem, model, seed, batch, schedule, problem.weight_decay)


def soap_of(parameters: Iterable[nn.Parameter], lr: float, frequency: int = 10) -> torch.optim.Optimizer:
    """SOAP with its authors' settings: β = 0.95 twice, a new eigenbasis every ten steps.

    Raises:
        ModuleNotFoundError: pytorch_optimizer is not installed.
    """
    try:
        from pytorch_optimizer import SOAP
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "SOAP is that of pytorch_optimizer, which is not installed: `pip install pytorch_optimizer==4.1.0`."
        ) from error
    optimizer: torch.optim.Optimizer = SOAP(
        parameters, lr=lr, betas=(0.95, 0.95), precondition_frequency=frequency, weight_decay=0.0
    )
    return optimizer
