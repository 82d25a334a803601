"""What the loop asks of an optimizer, and the closure that optimizers are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from experiments.common.loop import Advance
from experiments.supervised.problems import Problem
from krylov_descent import StepReport


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


def closure_of(problem: Problem, model: nn.Module) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """The mean loss over a batch, without weight decay, and the outputs."""

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return problem.loss(outputs, batch[-1]), outputs

    return closure


class Stepping:
    """An optimizer of this project, and what its ``step`` is given: one step is one advance."""

    def __init__(self, optimizer: Any, *arguments: Any) -> None:
        self._optimizer, self._arguments = optimizer, arguments

    def advance(self, progress: float) -> Advance:
        """One step."""
        report: StepReport = self._optimizer.step(*self._arguments)
        return Advance(report.sample_gradients, report)

    def state_dict(self) -> dict[str, Any]:
        """Of the optimizer."""
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Into the optimizer."""
        self._optimizer.load_state_dict(state)
