"""Acceptance: whether the last step is kept, judged by f on A when the next step begins.

Letters: f on A at the point θ after the step and at the point before it; micro-batches b with weights w_b and loss
differences d_b between the two points.

The next step's pass over A yields f(θ) and its gradient at no extra cost. Where either is not finite the step is
undone, whatever the acceptance rule. Only if f has risen, forward passes confirm the rise on the same samples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from krylov_descent.objective.objective import BatchLosses, Objective, Statistics, relative_noise
from krylov_descent.progress import Counted
from krylov_descent.report import Settlement
from krylov_descent.samples.interface import Choice, Microbatch, SamplePolicy, StepKey, StepSets, StepWatch
from krylov_descent.state import vector
from krylov_descent.stepping.gradient_pass import GradientPass, pass_with_statistics, require_finite
from krylov_descent.vectors.products import length


@dataclass(frozen=True, eq=False)
class AcceptanceState:
    """The loss by which the last step is judged.

    Attributes:
        loss: f on A before the step, above which the step is rolled back; inf for no such bound.
    """

    loss: float = math.inf


@dataclass(frozen=True, eq=False, kw_only=True)
class MethodState:
    """The state between two steps that all methods share; each method adds its own fields.

    Attributes:
        iteration: the number of the next step, from 0.
        seed: the seed of a step's random draws.
        policy: the class name of the sample policy.
        samples: the state of the sample policy.
        acceptance: the state by which the last step is judged.
        last_step: the previous step [P_local], or None if none was taken.
        earlier: θ before that step [P_local], to which it may be rolled back.
        wary: whether steps must end where the gradient is finite; True once one did not.
    """

    iteration: int = 0
    seed: int
    policy: str
    samples: Any
    acceptance: AcceptanceState
    last_step: Tensor | None = vector()
    earlier: Tensor | None = vector()
    wary: bool = False


class Acceptance(ABC):
    """Decides whether the last step is kept; subclass it for a rule of your own."""

    def init(self) -> AcceptanceState:
        """Return the state of a new run."""
        return AcceptanceState()

    @abstractmethod
    def loss_before(
        self, objective: Objective, sets: StepSets, state: AcceptanceState, losses: BatchLosses, earlier: Tensor
    ) -> float | None:
        """Return f on A before the last step if that step must be rolled back; None to keep it.

        Args:
            objective: f, with its parameters at the point after the step.
            sets: the sets of the next step.
            state: the state by which the last step is judged.
            losses: f on A after the last step, finite.
            earlier: θ before the last step [P_local].
        """

    @abstractmethod
    def after(self, at: GradientPass) -> AcceptanceState:
        """Return the state by which to judge a step from this point."""


@dataclass(frozen=True)
class Rollback(Acceptance):
    """Rolls back a step after which the loss on A is higher beyond noise."""

    def loss_before(
        self, objective: Objective, sets: StepSets, state: AcceptanceState, losses: BatchLosses, earlier: Tensor
    ) -> float | None:
        """Return f before the step if it was lower beyond noise, confirmed on the same samples."""
        return better_before(objective, sets, losses, earlier, state.loss)

    def after(self, at: GradientPass) -> AcceptanceState:
        """Return the loss before the step; no bound if C is A, where a step cannot raise the loss, or if sets grow."""
        bounded = not (at.sets.searches_all or at.sets.grows)
        return AcceptanceState(at.losses.mean) if bounded else AcceptanceState()


@dataclass(frozen=True)
class KeepEveryStep(Acceptance):
    """Keeps every step, as the paper does."""

    def loss_before(
        self, objective: Objective, sets: StepSets, state: AcceptanceState, losses: BatchLosses, earlier: Tensor
    ) -> None:
        """Return None: no step is rolled back."""
        return

    def after(self, at: GradientPass) -> AcceptanceState:
        """Return no bound."""
        return AcceptanceState()


def acceptance_of(rollback: bool | Acceptance) -> Acceptance:
    """Return the strategy of an optimizer's argument.

    Raises:
        ValueError: it is none.
    """
    if isinstance(rollback, Acceptance):
        return rollback
    if rollback not in (True, False):
        raise ValueError(f"rollback={rollback!r}: must be True, False, or an Acceptance of your own.")
    return Rollback() if rollback else KeepEveryStep()


@dataclass(frozen=True)
class Sampler:
    """A sample policy, with K and the rank's shard."""

    policy: SamplePolicy
    krylov_dim: int
    shard: int = 0
    of_shards: int = 1

    def choose(self, iteration: int, state: Any) -> Choice:
        """Algorithm 3, line 3: choose this rank's shards of A, B and C."""
        return self.policy.choose(
            iteration, state, krylov_dim=self.krylov_dim, shard=self.shard, of_shards=self.of_shards
        )

    def reviewed(self, iteration: int, choice: Choice, losses: BatchLosses, objective: Objective) -> Choice:
        """Return the choice, or another one if the loss on A where the step begins asks for it."""
        return self.policy.reviewed(iteration, choice, losses.mean, lambda batches: objective.value(batches).mean)

    def watch(self, at: GradientPass) -> StepWatch:
        """Return the policy's observer of the step from this point."""
        return self.policy.watch(at.sets, at.samples, at.led_by)


Gather = Callable[[Objective, StepKey], Statistics | None]
"""Returns the preconditioner's collector of statistics for the pass over A, or None."""


def arrive(
    objective: Objective,
    samples: Sampler,
    state: MethodState,
    acceptance: Acceptance,
    gather: Gather = lambda objective, key: None,
    theta: Callable[[], Tensor] | None = None,
) -> GradientPass:
    """Algorithm 3, lines 3-4: draw the sets, compute f and g on A, and roll the last step back if it is not accepted.

    A step is also rolled back if f or g is not finite where it ended; steps are wary from then on.

    Args:
        objective: f and its derivatives on micro-batches.
        samples: draws the sets.
        state: the state after the last step.
        acceptance: judges the last step.
        gather: returns the preconditioner's collector of statistics for the pass over A.
        theta: returns θ [P] where the step begins, if the caller has it.

    Raises:
        ValueError: f or its gradient on A is not finite, and not at an earlier point either.
    """
    choice, key = samples.choose(state.iteration, state.samples), StepKey(state.seed, state.iteration)
    losses, g, gathered = _pass(objective, choice, key, gather)
    reviewed = samples.reviewed(state.iteration, choice, losses, objective)
    if reviewed.sets is not choice.sets:
        del g, gathered  # vectors [P], and a graph
        losses, g, gathered = _pass(objective, reviewed, key, gather)
    choice, details = reviewed, reviewed.details
    grad_norm = length(g, objective.comm)
    notes, last, earlier = list(choice.notes), state.last_step, state.earlier
    led = last if leads_here(objective, state) else None
    if led is None and earlier is not None and choice.sets.grows and not choice.sets.covers_all:
        notes.append("The parameters were changed since the last step, which is therefore no evidence for larger sets.")
    finite, rose = math.isfinite(losses.mean) and math.isfinite(grad_norm), False
    if led is not None and finite:
        assert earlier is not None
        rose = acceptance.loss_before(objective, choice.sets, state.acceptance, losses, earlier) is not None
    kept = led is None or (finite and not rose)
    here = _here(objective, theta) if kept else lambda: earlier
    if not kept:
        assert earlier is not None
        del g, gathered  # vectors [P]
        objective.move_to(earlier)
        sizes = choice.sets.sizes
        choice = samples.choose(state.iteration, samples.policy.rolled_back(choice.state))
        key, last, led = replace(key, attempt=1), None, None
        losses, g, gathered = _pass(objective, choice, key, gather)
        grad_norm = length(g, objective.comm)
        what = "raised the loss on A" if rose else "ended where the loss on A or its gradient is not finite"
        larger = f"; C now has {choice.sets.sizes['C']} samples" if choice.sets.sizes != sizes else ""
        notes.append(f"The previous step had {what} and was undone{larger}.")
    require_finite(losses.mean, grad_norm)
    wary = state.wary or not (kept or rose)
    found = (losses, g, grad_norm, gathered, last, led, kept, choice.state, wary, notes)
    return GradientPass(objective, choice.sets, key, here, *found, details=details)  # type: ignore[arg-type]


def _pass(
    objective: Objective, choice: Choice, key: StepKey, gather: Gather
) -> tuple[BatchLosses, Tensor, Statistics | None]:
    counted = Counted(choice.sets.a, objective.tell)
    return pass_with_statistics(objective, counted, lambda: gather(objective, key))


def settle(
    objective: Objective, samples: Sampler, state: MethodState, acceptance: Acceptance
) -> tuple[Settlement, Any]:
    """Judge the last step of a run by f on A, computed by forward passes, and roll it back if it is not accepted.

    Returns:
        The final loss, and the state of the sample policy.
    """
    choice = samples.choose(state.iteration, state.samples)
    losses = objective.value(choice.sets.a)
    lower = None
    if state.earlier is not None and leads_here(objective, state):
        if math.isfinite(losses.mean):
            lower = acceptance.loss_before(objective, choice.sets, state.acceptance, losses, state.earlier)
        else:
            before = value_at(objective, state.earlier, choice.sets.a).mean
            lower = before if math.isfinite(before) else None
    if lower is None:
        return Settlement(losses.mean, accepted=True), state.samples
    assert state.earlier is not None
    objective.move_to(state.earlier)
    return Settlement(lower, accepted=False), samples.policy.rolled_back(choice.state)


def leads_here(objective: Objective, state: MethodState) -> bool:
    """Return whether θ is bit for bit where the last step left it, on all ranks; otherwise the user has changed it."""
    if state.earlier is None or state.last_step is None:
        return False
    x, left_at = objective.point(), objective.parameters.rounded(state.earlier + state.last_step)
    elsewhere = not torch.equal(x, left_at)
    if elsewhere:  # parameters that the loss does not use may be NaN at both
        elsewhere = bool(((x != left_at) & ~(x.isnan() & left_at.isnan())).any())
    return not float(objective.comm.max(torch.tensor(float(elsewhere), device="cpu")))


def better_before(
    objective: Objective, sets: StepSets, losses: BatchLosses, earlier: Tensor, earlier_loss: float
) -> float | None:
    """Return f on A at the earlier point if it was lower there beyond noise; otherwise, or if it is unclear, None.

    Args:
        objective: f, with its parameters at the point after the step.
        sets: the sets of the next step.
        losses: f on A after the step, finite.
        earlier: the point before the step, this rank's part [P_local].
        earlier_loss: f at the earlier point on the A of its own step.
    """
    rounding = relative_noise(objective.parameters.params[0].dtype) * abs(earlier_loss)
    if losses.mean <= earlier_loss + rounding:
        return None
    # Confirm on the same samples and with the same closure: A may be a fresh subset, and the user may have changed
    # the loss itself (its weights, a weight decay) since the last step.
    batches = sets.a if sets.covers_all else sets.a_in_parts
    after = losses if sets.covers_all else objective.value(batches)
    before = value_at(objective, earlier, batches)
    if not math.isfinite(before.mean):
        return None
    noise = 0.0 if sets.covers_all else 2 * _standard_error(before, after, objective)
    return before.mean if after.mean - before.mean > max(rounding, noise) else None


def value_at(objective: Objective, point: Tensor, batches: Iterable[Microbatch]) -> BatchLosses:
    """Return f at another point [P_local], and come back."""
    theta = objective.point()
    objective.move_to(point)
    losses = objective.value(batches)
    objective.move_to(theta)
    return losses


def _standard_error(before: BatchLosses, after: BatchLosses, objective: Objective) -> float:
    """Return the standard error of the weighted mean of d_b."""
    # Σ 1, w, wd, w², w²d, w²d²
    sums = torch.zeros(6, dtype=torch.float64, device="cpu")
    for w, old, new in zip(before.weights, before.losses, after.losses, strict=True):
        if w > 0:
            d = new - old
            sums += torch.tensor([1, w, w * d, w * w, w * w * d, (w * d) ** 2], dtype=torch.float64, device="cpu")
    m, W, wd, ww, wwd, wwdd = (float(x) for x in objective.comm.total(sums))
    if m < 2:
        return math.inf  # one micro-batch has no variance
    mean = wd / W
    return math.sqrt(max(0.0, wwdd - 2 * mean * wwd + mean * mean * ww) * m / (m - 1)) / W


def _here(objective: Objective, theta: Callable[[], Tensor] | None) -> Callable[[], Tensor]:
    """Return a function that returns θ [P_local] where the step begins."""
    if theta is not None:
        return lambda: objective.comm.shard(theta())
    here = objective.point()
    return lambda: here
