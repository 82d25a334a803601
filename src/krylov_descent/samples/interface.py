"""The interface of a sample policy, which chooses the samples of a step and may learn from the step.

A policy is a frozen configuration. Its state is a frozen dataclass of its own, which the optimizer saves (state.py).
Policies exchange numbers only and are independent of any model.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Stateless:
    """The state of a strategy that remembers nothing."""


@dataclasses.dataclass(frozen=True)
class Microbatch:
    """A part of a sample set small enough for one forward pass.

    Attributes:
        data: the argument of the closure.
        samples: the number of samples; None if only the closure knows.
        position: the position of its first sample in the set.

    Example:
        >>> import torch

        >>> Microbatch(data=torch.zeros(3, 2), samples=3).samples
        3
    """

    data: Any
    samples: int | None
    position: int = 0


@dataclasses.dataclass(frozen=True)
class StepKey:
    """The key of a step's random draws.

    Attributes:
        seed: the seed of the run.
        iteration: the number of the step, from 0.
        attempt: 0, or 1 if the step begins anew after a rollback.
    """

    seed: int
    iteration: int
    attempt: int = 0

    def __iter__(self) -> Any:
        return iter((self.seed, self.iteration, self.attempt))


class StepSets(Protocol):
    """A, B and C of one step; each may be iterated several times."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of samples in "A", "B" and "C", as far as known."""
        ...

    @property
    def a(self) -> Iterable[Microbatch]:
        """The set of the gradient."""
        ...

    @property
    def a_in_parts(self) -> Iterable[Microbatch]:
        """The same samples in enough micro-batches to estimate the variance of a loss."""
        ...

    @property
    def b(self) -> Sequence[Microbatch]:
        """The set of the curvature."""
        ...

    @property
    def statistics(self) -> Sequence[Microbatch]:
        """The part of B, or all of it, from which a preconditioner takes its statistics."""
        ...

    @property
    def c(self) -> Sequence[Microbatch]:
        """The set of the search."""
        ...

    @property
    def probe(self) -> tuple[Microbatch, Microbatch, Microbatch] | None:
        """A small batch and its two halves, or None if there are none."""
        ...

    @property
    def covers_all(self) -> bool:
        """Whether A is all samples, so that losses on it compare from step to step."""
        ...

    @property
    def searches_all(self) -> bool:
        """Whether C is A, so that a step cannot raise the loss on A."""
        ...

    @property
    def searches_b(self) -> bool:
        """Whether C is B, so that one pass serves both."""
        ...

    @property
    def holds_out(self) -> bool:
        """Whether C has samples outside of A, so that it judges steps that A's samples make."""
        ...

    @property
    def grows(self) -> bool:
        """Whether the sets grow: A is drawn anew at each step, and larger when noise demands it."""
        ...

    def warn_if_random(self) -> None:
        """Warn if the same samples, loaded twice, have different values."""
        ...


class StepWatch:
    """Observes one step for a policy that learns from it; this base class learns nothing.

    Attributes:
        gradient_noise: ν, the noise of the gradient on A: 1 if A is a small part of all samples, 0 if it is all; a
            preconditioner scales its damping by it.
        needs_gradient: whether ``see_step`` needs the slope along the step.
    """

    gradient_noise: float = 1.0
    needs_gradient: bool = False
    notes: Sequence[str] = ()

    def __init__(self, state: Any) -> None:
        self._state = state

    def see_gradient(self, slope: Callable[[Tensor], float]) -> None:
        """Observe the slope of f on A along any vector, where the step begins."""

    def see_curvature(self, curvature: Callable[[Tensor], float]) -> None:
        """Observe the curvature on B along any vector in the subspace."""

    def see_step(self, slope: Callable[[], float] | None, agreement: float) -> None:
        """Observe the step that was taken, if any.

        Args:
            slope: returns the slope of f on A along the step, where it begins; None if no step was taken.
            agreement: the ratio of actual to predicted decrease of the loss on C; NaN if not known.
        """

    def after(self) -> Any:
        """Return the policy's state after the step."""
        return self._state


class SamplePolicy(ABC):
    """Draws the sets of each step; subclass it for a policy of your own, and give it to ``step`` as ``sets``."""

    #: The class of the state, a frozen dataclass of numbers and tensors; a loaded state is checked against it.
    State: ClassVar[type[Any]] = Stateless

    def init(self) -> Any:
        """Return the state of a new run."""
        return self.State()

    @abstractmethod
    def choose(self, iteration: int, state: Any, *, krylov_dim: int, shard: int, of_shards: int) -> Choice:
        """Choose the sets of one step.

        Args:
            iteration: the number of the step: with the same state, the same number gives the same sets.
            state: the policy's state.
            krylov_dim: K, the dimension of the subspace.
            shard: the index of this rank's shard of each set, from 0.
            of_shards: the number of shards of each set.
        """

    def reviewed(
        self, iteration: int, choice: Choice, loss: float, value: Callable[[Iterable[Microbatch]], float]
    ) -> Choice:
        """Return the choice, or one with other sets, on which the step then begins anew.

        Args:
            iteration: the number of the step.
            choice: the choice of this step.
            loss: f on its A where the step begins.
            value: returns f on other micro-batches there, by forward passes.
        """
        return choice

    def rolled_back(self, state: Any) -> Any:
        """Return the state after a rollback of a step that raised the loss on A, with larger sets for example."""
        return state

    def fingerprint(self) -> int:
        """Return a number by which ranks notice that they hold different samples; 0 if that cannot be told."""
        return 0

    def interrupted(self) -> None:  # noqa: B027 — an optional one
        """Give up what a step that raised may have left half done, such as worker processes that load samples."""

    def watch(self, sets: StepSets, state: Any, last_step: Tensor | None) -> StepWatch:
        """Return the observer of the step on these sets; ``last_step`` is the step that ended here, if any."""
        return StepWatch(state)

    def __repr__(self) -> str:
        """Return a description that is the same on all ranks."""
        return f"{type(self).__name__}()"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The sets of one step, the policy's new state, and notes and further numbers for the report."""

    sets: StepSets
    state: Any
    notes: tuple[str, ...] = ()
    details: Mapping[str, float] = dataclasses.field(default_factory=dict)


class FullBatch(SamplePolicy):
    """Uses all samples at every step, A = B = C, as torch.optim.LBFGS does."""

    sizes: Mapping[str, int] = {}
    b: Sequence[Microbatch] = (Microbatch(None, None),)
    a = a_in_parts = statistics = c = b
    probe = None
    covers_all = searches_all = searches_b = True
    grows = holds_out = False

    def choose(self, iteration: int, state: Any, **_: object) -> Choice:
        """Return the same sets at every step; each rank's closure evaluates that rank's samples."""
        return Choice(self, state)

    def warn_if_random(self) -> None:
        """Do nothing: no samples are loaded."""


def kinds_of_policy(name: object) -> list[type[Any]]:
    """Return the classes of the states of all policies of this name whose ``init`` returns one as it is."""
    found, waiting = [], [SamplePolicy]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__name__ == name:
            found += [kind] * (1 if kind.init is SamplePolicy.init else 2)  # two: its own init may return any state
    return [kind.State for kind in found]
