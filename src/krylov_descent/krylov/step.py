"""Algorithm 3: one step of Krylov Subspace Descent, as a function of what is remembered from the last.

Letters: θ [P], g gradient on A, D preconditioner on A, V and H̄ from B, d = V̄a* the step found on C. Vectors here are
this rank's parts [P_local]; every decision is taken on numbers that are the same on all ranks.

Deviations from the paper:
1. Acceptance (lines 3-4): the pass over A of the next step shows f(θ) at no cost. If the last step raised it, and a
   forward pass at the point before confirms it, that step is undone, d_prev dropped, and C doubled. The paper keeps
   every step; ``rollback=False`` is the paper's way.
2. Line 1: without a previous step none is adjoined, unless the caller passes one (``previous="e1"``).
3. A search that finds nothing better than a = 0, or whose step rounds to something worse, leaves θ alone and d_prev
   empty.
4. Line 5: a preconditioner that remembers takes its statistics from B, or a part of it, and adds them to those of
   earlier steps.
5. Line 3: sets that grow do so by how much of the last steps fresh samples confirm, and by what the loss on C says of
   the model (samples/growing.py); steps on them are only undone where the loss is not finite.
6. Line 6: on sets that have grown to all samples, steps before the last one are adjoined, too.
7. Lines 9-12: ``Search(model=...)`` takes the minimum of the quadratic model, with the gradient on A, where C agrees.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from krylov_descent.distributed import Comm, RankError, added, together
from krylov_descent.krylov.acceptance import (
    LOST_IN_ROUNDING,
    confirmation_of,
    grown,
    loss_taken,
    undoing,
    undone,
    unmoved,
)
from krylov_descent.krylov.basis import Subspace, Turn, length
from krylov_descent.krylov.memory import Memory
from krylov_descent.krylov.search import Found, Search, Walk, search_subspace
from krylov_descent.objective.objective import BatchLosses, Objective, PassAgain, Statistics, relative_noise
from krylov_descent.preconditioners import Precondition, Preconditioner, RememberingPreconditioner
from krylov_descent.progress import Counted
from krylov_descent.report import StepReport, StopReason
from krylov_descent.samples.growing import Growing, Promise
from krylov_descent.samples.subsets import FullBatch, Microbatch, StepSets, Subsets

S = TypeVar("S", bound=Statistics)


def pass_with_statistics(
    objective: Objective, batches: Iterable[Microbatch], start: Callable[[], S]
) -> tuple[BatchLosses, Tensor, S]:
    """f, ∇f and statistics from one pass, or from another if the first was void; ``start`` makes fresh statistics."""
    while True:
        statistics = start()
        try:
            losses, g = objective.value_and_gradient(batches, statistics)
        except PassAgain:
            continue
        return losses, g, statistics


@dataclass(eq=False)
class OnA:
    """What the pass over A gave; its vectors are let go as soon as the basis is built."""

    losses: BatchLosses
    g: Tensor | None
    precondition: Precondition | None


def pass_over_A(
    objective: Objective, batches: Iterable[Microbatch], preconditioner: Preconditioner | None, key: tuple[int, ...]
) -> OnA:
    """f, ∇f and D⁻¹ on A; ``key`` seeds what is random in D."""
    counted = Counted(batches, objective.tell)
    if preconditioner is None:
        return OnA(*objective.value_and_gradient(counted), None)
    start = preconditioner.start
    losses, g, statistics = pass_with_statistics(objective, counted, lambda: start(objective, *key))
    return OnA(losses, g, statistics.solver(objective.comm))


def require_finite(loss: float, grad_norm: float) -> None:
    """Refuse to step from where nothing is known.

    Raises:
        ValueError: f or its gradient on A is not finite.
    """
    for what, value in (("loss", loss), ("gradient's norm", grad_norm)):
        if not math.isfinite(value):
            raise ValueError(
                f"The {what} on A is {value} at the current parameters, and there is no earlier point to return to. "
                "Look for NaN or inf in the data, labels out of range, logarithms or divisions by zero in the "
                "closure, or an initialisation that overflows."
            )


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """End a phase."""
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now


def drawing(sets: Subsets | None, iteration: int, krylov_dim: int, comm: Comm) -> Callable[[Memory], StepSets]:
    """→ this rank's share of the sets of one iteration; without sets, what the closure evaluates is all of them."""
    source = FullBatch() if sets is None else sets
    shard, of_shards = comm.shard_of_sets
    how: dict[str, Any] = {"krylov_dim": krylov_dim}
    how |= {"shard": shard, "of_shards": of_shards} if of_shards > 1 else {}

    def draw(memory: Memory) -> StepSets:
        more: dict[str, Any] = {"search_growth": memory.search_growth}
        if isinstance(source, Growing):
            more = {"search_growth": memory.growths}
            more["model_growth"] = 0 if memory.promise is None else int(memory.promise.doublings)
        return source.draw(iteration, **how, **more)

    return draw


_PHASES = ("gradient", "basis", "search")


class BasisBuilder(Protocol):
    """A way to build the subspace; the search does not know which was used."""

    def __call__(
        self,
        objective: Objective,
        batches: Sequence[Microbatch],
        precondition: Precondition,
        g: Tensor,
        d_prev: Tensor | None,
        turn: Turn,
    ) -> Subspace:
        """The subspace from the objective on B, the preconditioner, the gradient and the previous step.

        It may write over g.
        """
        ...


@dataclass(frozen=True)
class Settings:
    """What stays the same from step to step.

    ``earlier`` is how many steps before the last one the builder has use for, on sets that have grown to all samples.
    """

    builder: BasisBuilder
    preconditioner: Preconditioner | RememberingPreconditioner | None
    search: Search
    previous: str | None
    rollback: bool
    earlier: int = 0

    @property
    def gatherer(self) -> Preconditioner | None:
        """The preconditioner, if it is one that gathers along the pass over A."""
        return None if isinstance(self.preconditioner, RememberingPreconditioner) else self.preconditioner


def ksd_step(
    objective: Objective,
    draw_sets: Callable[[Memory], StepSets],
    memory: Memory,
    settings: Settings,
    theta: Callable[[], Tensor] | None = None,
) -> tuple[StepReport, Memory]:
    """One pass of the loop of Algorithm 3 (lines 3-13); if it raises, θ is anywhere: putting it back is the caller's.

    Args:
        objective: f and its derivatives on micro-batches.
        draw_sets: what is remembered of growth → the sets A, B and C of this iteration.
        memory: of the last step.
        settings: of the run.
        theta: → θ [P] where the step begins, if the caller has it.

    Raises:
        ValueError: f or its gradient on A is not finite and there is no earlier point to return to, or ``previous`` is
            None on sets that are to grow.
    """
    clock = Clock()
    try:
        return _step(objective, draw_sets, memory, settings, theta, clock)
    except RankError as error:
        raise error.during(next(phase for phase in _PHASES if phase not in clock.laps)) from error.__cause__


def _step(
    objective: Objective,
    draw_sets: Callable[[Memory], StepSets],
    memory: Memory,
    settings: Settings,
    theta: Callable[[], Tensor] | None,
    clock: Clock,
) -> tuple[StepReport, Memory]:
    sent = objective.comm.sent
    memory, draw, notes = grown(memory, draw_sets)  # line 3
    if draw.grows and not draw.covers_all and settings.previous is None:
        raise ValueError(
            "Sets that grow judge a step by the curvature that the next one finds along it, which previous=None leaves "
            "out: they would never grow. Use previous='step', or Subsets in place of Growing."
        )
    gatherer = settings.gatherer
    on_A = pass_over_A(objective, draw.a, gatherer, (memory.seed, memory.iteration, 0))  # lines 4-5
    led_here = unmoved(objective, memory)
    raised = settings.rollback and led_here and undoing(objective, draw, memory, on_A.losses, on_A.g) is not None
    if not raised:
        here = _here(objective, theta)
        last = memory.d_prev if led_here else None
        return _descend(objective, draw, on_A, memory, settings, here, last, notes, clock, sent, accepted=True)
    before = memory.accepted
    assert before is not None
    del on_A  # its vectors are large
    objective.move_to(before)
    memory = undone(memory, draw)
    draw = draw_sets(memory)
    on_A = pass_over_A(objective, draw.a, gatherer, (memory.seed, memory.iteration, 1))
    return _descend(objective, draw, on_A, memory, settings, lambda: before, None, notes, clock, sent, accepted=False)


def _descend(
    objective: Objective,
    draw: StepSets,
    on_A: OnA,
    memory: Memory,
    settings: Settings,
    theta: Callable[[], Tensor],
    last: Tensor | None,
    notes: list[str],
    clock: Clock,
    sent: int,
    *,
    accepted: bool,
) -> tuple[StepReport, Memory]:
    """Lines 6-13, from the point θ that was kept; ``last`` is the step that has led there, if one has."""
    parameters, comm, losses, g = objective.parameters, objective.comm, on_A.losses, on_A.g
    assert g is not None
    grad_norm = length(g, objective.comm)
    require_finite(losses.mean, grad_norm)
    clock.lap("gradient")

    if not accepted:
        larger = f"; C has now {draw.sizes['C']} samples" if draw.sizes else ""
        notes.append(f"The previous step had raised the loss on A and was undone{larger}.")
    confirmation = confirmation_of(memory, draw, last, notes)
    last = None if confirmation is None else last
    ends = math.nan if last is None else _dot(comm, g, last)  # before the builder writes over g
    preconditioner, factors = settings.preconditioner, memory.factors
    if isinstance(preconditioner, RememberingPreconditioner):
        together(comm, lambda: len(draw.statistics))  # load it
        key = memory.seed, memory.iteration, int(not accepted)
        doubt = 1.0 if confirmation is None else confirmation.caution
        doubt *= 1 - draw.coverage if draw.grows else 1.0
        on_A.precondition, factors = preconditioner.refresh(objective, draw.statistics, factors, key, noise=doubt)
        notes += filter(None, [getattr(preconditioner, "note", "")])
    if on_A.precondition is None and preconditioner is not None:
        notes.append(
            "The closure gave the preconditioner nothing to go by (it returned only the loss, or what is not finite or "
            "has no curvature): no preconditioner."
        )
    name = "none" if on_A.precondition is None else _name(preconditioner)

    all_grown = draw.grows and draw.covers_all  # before that, nothing was gained along steps before the last
    subspace: Subspace | None = None
    known = (losses.mean, g) if draw.searches_all else None
    kept = g if known or confirmation is not None or settings.search.model is not None else None
    if grad_norm > 0:
        d_prev = memory.d_prev
        if d_prev is None and memory.iteration == 0 and settings.previous == "e1":  # line 1
            d_prev = comm.shard(parameters.first_unit())
        if settings.previous is None:
            d_prev = None
        g = g if kept is None else g.clone()  # the builder may write over it
        together(comm, lambda: len(draw.b))  # load it
        turn = Turn(memory.seed, memory.iteration, memory.carry, memory.earlier if all_grown else ())
        subspace = settings.builder(objective, draw.b, on_A.precondition or (lambda w: w), g, d_prev, turn)  # line 6
        if confirmation is not None:
            bent = math.nan if last is None or d_prev is None else subspace.bend(last, comm)
            confirmation = confirmation.after(bent - ends)
        if not subspace.finite:
            notes.append("A curvature product was not finite; the directions it concerns were left out.")
        if subspace.note:
            notes.append(subspace.note)
    g = on_A.g = on_A.precondition = None
    clock.lap("basis")

    if subspace is None:
        found = Found(None, losses.mean, losses.mean, 0, 0, StopReason.ZERO_GRADIENT)
    else:
        together(comm, lambda: len(draw.c))  # load it
        noise = relative_noise(parameters.params[0].dtype)
        # The walk has vectors of all parameters: it must not outlive the search.
        found = search_subspace(Walk(objective, draw.c), subspace, settings.search, noise, comm, known, kept)  # 7-12
    d = None if found.d is None else parameters.rounded(found.d)
    here = theta()
    objective.move_to(here if d is None else here + d)  # line 13
    # Where the loss was computed at this very point, once more would tell nothing.
    if d is not None and not (found.exact and d is found.d):
        after = loss_taken(objective, draw, found.before)
        if after is None:
            d = None
            objective.move_to(here)
            notes.append(LOST_IN_ROUNDING)
            found = replace(found, after=found.before, coefficients=(), stop_reason=StopReason.NOISE)
        else:
            found = replace(found, after=after)
    clock.lap("search")

    report = StepReport(
        iteration=memory.iteration,
        loss=losses.mean,
        search_loss_before=found.before,
        search_loss_after=found.after,
        grad_norm=grad_norm,
        krylov_dim=0 if subspace is None else subspace.krylov_dim,
        ritz_values=() if subspace is None else tuple(torch.linalg.eigvalsh(subspace.H).tolist()),
        inner_iterations=found.iterations,
        inner_evaluations=found.evaluations,
        stop_reason=found.stop_reason,
        accepted=accepted,
        seconds=clock.laps,
        sample_gradients=added(comm, objective.sample_gradients),
        orthogonality_error=0.0 if subspace is None else subspace.orthogonality_error,
        set_sizes=draw.sizes,
        preconditioner=name,
        notes=tuple(notes),
        bytes_sent=comm.sent - sent,
        coefficients=found.coefficients,
    )
    # Where A is what was searched, the step cannot have raised it: nothing to go back to, unless other samples follow.
    keep = d is not None and (draw.grows or (settings.rollback and not draw.searches_all))
    if confirmation is not None and d is not None and kept is not None:
        confirmation = replace(confirmation, slope=-_dot(comm, kept, d))
    earlier: tuple[Tensor, ...] = ()
    if all_grown and d is not None and memory.d_prev is not None and comm.bounds(parameters.numel) is not None:
        earlier = (memory.d_prev, *memory.earlier)[: settings.earlier]
    promise = memory.promise
    if draw.grows and not math.isnan(found.agreement):
        promise = replace(promise or Promise(), agreement=found.agreement)
    return report, replace(
        memory,
        iteration=memory.iteration + 1,
        d_prev=found.kept if d is None else d,
        accepted=here if keep else None,
        accepted_loss=losses.mean if keep and not draw.grows else math.inf,
        carry=found.carry or memory.carry,
        confirmation=confirmation,
        promise=promise if draw.grows else None,
        factors=factors,
        earlier=earlier,
    )


def _dot(comm: Comm, x: Tensor, y: Tensor) -> float:
    return float(comm.sum(x @ y))


def _here(objective: Objective, theta: Callable[[], Tensor] | None) -> Callable[[], Tensor]:
    """→ θ [P_local] where the step begins."""
    if theta is not None:
        return lambda: objective.comm.shard(theta())
    here = objective.point()
    return lambda: here


def _name(preconditioner: object) -> str:
    return str(getattr(preconditioner, "name", type(preconditioner).__name__.lower()))
