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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from krylov_descent.acceptance import LOST_IN_ROUNDING, better_before, loss_taken
from krylov_descent.basis import Carry, Subspace, Turn, length
from krylov_descent.data import Microbatch
from krylov_descent.distributed import RankError, added, together
from krylov_descent.objective import BatchLosses, Objective, relative_noise
from krylov_descent.precondition import Precondition, Preconditioner
from krylov_descent.report import Settlement, StepReport, StopReason
from krylov_descent.search import Found, Search, search_subspace
from krylov_descent.sets import StepSets
from krylov_descent.stepping import Clock, OnA, pass_over_A, require_finite
from krylov_descent.walk import Walk

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
    """What stays the same from step to step."""

    builder: BasisBuilder
    preconditioner: Preconditioner | None
    search: Search
    previous: str | None
    rollback: bool


@dataclass(frozen=True, eq=False)
class Memory:
    """What a step hands to the next: everything a resumed run needs.

    Attributes:
        iteration: of the step to come, from 0.
        seed: of the sign probes.
        d_prev: the last step [P_local], or None; or what a builder wants remembered in its place, if none was taken.
        accepted: the point [P_local] from which it was taken, or None if there is nothing to go back to.
        accepted_loss: f on A there.
        search_growth: how often C was doubled.
        carry: for the builder, where it adapts.
    """

    iteration: int
    seed: int
    d_prev: Tensor | None = None
    accepted: Tensor | None = None
    accepted_loss: float = math.inf
    search_growth: int = 0
    carry: Carry | None = None


def ksd_step(
    objective: Objective,
    draw_sets: Callable[[int], StepSets],
    memory: Memory,
    settings: Settings,
    theta: Callable[[], Tensor] | None = None,
) -> tuple[StepReport, Memory]:
    """One pass of the loop of Algorithm 3 (lines 3-13); if it raises, θ is anywhere: putting it back is the caller's.

    Args:
        objective: f and its derivatives on micro-batches.
        draw_sets: how often C was doubled → the sets A, B and C of this iteration.
        memory: of the last step.
        settings: of the run.
        theta: → θ [P] where the step begins, if the caller has it.

    Raises:
        ValueError: f or its gradient on A is not finite and there is no earlier point to return to.
    """
    clock = Clock()
    try:
        return _step(objective, draw_sets, memory, settings, theta, clock)
    except RankError as error:
        raise error.during(next(phase for phase in _PHASES if phase not in clock.laps)) from error.__cause__


def _step(
    objective: Objective,
    draw_sets: Callable[[int], StepSets],
    memory: Memory,
    settings: Settings,
    theta: Callable[[], Tensor] | None,
    clock: Clock,
) -> tuple[StepReport, Memory]:
    sent = objective.comm.sent
    draw = draw_sets(memory.search_growth)  # line 3
    on_A = pass_over_A(objective, draw.a, settings.preconditioner, (memory.seed, memory.iteration, 0))  # lines 4-5
    if not settings.rollback or _undoing(objective, draw, memory, on_A.losses, on_A.g) is None:
        here = _here(objective, theta)
        return _descend(objective, draw, on_A, memory, settings, here, clock, sent, accepted=True)
    before = memory.accepted
    assert before is not None
    del on_A  # its vectors are large
    objective.move_to(before)
    undone = _undone(memory)
    draw = draw_sets(undone.search_growth)
    on_A = pass_over_A(objective, draw.a, settings.preconditioner, (memory.seed, memory.iteration, 1))
    return _descend(objective, draw, on_A, undone, settings, lambda: before, clock, sent, accepted=False)


def _descend(
    objective: Objective,
    draw: StepSets,
    on_A: OnA,
    memory: Memory,
    settings: Settings,
    theta: Callable[[], Tensor],
    clock: Clock,
    sent: int,
    *,
    accepted: bool,
) -> tuple[StepReport, Memory]:
    """Lines 6-13, from the point θ that was kept."""
    parameters, comm, losses, g = objective.parameters, objective.comm, on_A.losses, on_A.g
    assert g is not None
    grad_norm = length(g, objective.comm)
    require_finite(losses.mean, grad_norm)
    clock.lap("gradient")

    notes = []
    if not accepted:
        notes.append(f"The previous step had raised the loss on A and was undone; C has now {draw.sizes['C']} samples.")
    if on_A.precondition is None and settings.preconditioner is not None:
        notes.append("The closure returned only the loss, so there are no per-sample gradients: no preconditioner.")
    name = "none" if on_A.precondition is None else _name(settings.preconditioner)

    subspace: Subspace | None = None
    # Compiled passes round otherwise: what the search compares comes from one of the two.
    known = (losses.mean, g) if draw.searches_all and objective.compiled is None else None
    if grad_norm > 0:
        d_prev = memory.d_prev
        if d_prev is None and memory.iteration == 0 and settings.previous == "e1":  # line 1
            d_prev = comm.shard(parameters.first_unit())
        if settings.previous is None:
            d_prev = None
        g = g.clone() if known else g  # the builder may write over it
        together(comm, lambda: len(draw.b))  # load it
        turn = Turn(memory.seed, memory.iteration, memory.carry)
        subspace = settings.builder(objective, draw.b, on_A.precondition or (lambda w: w), g, d_prev, turn)  # line 6
        if not subspace.finite:
            notes.append("A curvature product was not finite; the directions it concerns were left out.")
    g = on_A.g = on_A.precondition = None
    clock.lap("basis")

    if subspace is None:
        found = Found(None, losses.mean, losses.mean, 0, 0, StopReason.ZERO_GRADIENT)
    else:
        together(comm, lambda: len(draw.c))  # load it
        noise = relative_noise(parameters.params[0].dtype)
        # The walk has vectors of all parameters: it must not outlive the search.
        found = search_subspace(Walk(objective, draw.c), subspace, settings.search, noise, comm, known)  # 7-12
    d = None if found.d is None else parameters.rounded(found.d)
    here = theta()
    objective.move_to(here if d is None else here + d)  # line 13
    if d is not None:
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
        sample_gradients=float(
            added(comm, torch.tensor(objective.sample_gradients, dtype=torch.float64, device="cpu"))
        ),
        orthogonality_error=0.0 if subspace is None else subspace.orthogonality_error,
        set_sizes=draw.sizes,
        preconditioner=name,
        notes=tuple(notes),
        bytes_sent=comm.sent - sent,
        coefficients=found.coefficients,
    )
    # Where A is what was searched, the step cannot have raised it: nothing to go back to.
    keep = settings.rollback and d is not None and not draw.searches_all
    return report, replace(
        memory,
        iteration=memory.iteration + 1,
        d_prev=found.kept if d is None else d,
        accepted=here if keep else None,
        accepted_loss=losses.mean if keep else math.inf,
        carry=found.carry or memory.carry,
    )


def settle(objective: Objective, draw: StepSets, memory: Memory) -> tuple[Settlement, Memory]:
    """Judge the last step of a run as the next step would have: by f on A, here with forward passes."""
    losses = objective.value(draw.a)
    earlier = _undoing(objective, draw, memory, losses, None)
    if earlier is None:
        return Settlement(losses.mean, accepted=True), memory
    assert memory.accepted is not None
    objective.move_to(memory.accepted)
    return Settlement(earlier, accepted=False), _undone(memory)


def _undoing(
    objective: Objective, draw: StepSets, memory: Memory, losses: BatchLosses, g: Tensor | None
) -> float | None:
    """f on A before the last step, if that step is to be undone."""
    if memory.accepted is None or memory.d_prev is None:
        return None
    if not _unmoved(objective, memory):
        return None  # edited since the last step: its outcome is not ours to judge
    finite = math.isfinite(losses.mean) and (g is None or math.isfinite(length(g, objective.comm)))
    return better_before(objective, draw, losses if finite else None, memory.accepted, memory.accepted_loss)


def _unmoved(objective: Objective, memory: Memory) -> bool:
    """Whether θ is where the last step left it, bit for bit, on all ranks."""
    if memory.accepted is None or memory.d_prev is None:
        return False
    x, left_at = objective.point(), objective.parameters.rounded(memory.accepted + memory.d_prev)
    elsewhere = not torch.equal(x, left_at)
    if elsewhere:  # or NaN, in what the loss does not use
        elsewhere = bool(((x != left_at) & ~(x.isnan() & left_at.isnan())).any())
    return not float(objective.comm.max(torch.tensor(float(elsewhere), device="cpu")))


def _here(objective: Objective, theta: Callable[[], Tensor] | None) -> Callable[[], Tensor]:
    """→ θ [P_local] where the step begins."""
    if theta is not None:
        return lambda: objective.comm.shard(theta())
    here = objective.point()
    return lambda: here


def _undone(memory: Memory) -> Memory:
    return replace(memory, d_prev=None, accepted=None, search_growth=memory.search_growth + 1)


def _name(preconditioner: Preconditioner | None) -> str:
    return str(getattr(preconditioner, "name", type(preconditioner).__name__.lower()))
