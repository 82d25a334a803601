"""Was the last step a good one? If not, back to the point before it, or more samples for the next."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from krylov_descent.acceptance import better_before
from krylov_descent.basis import length
from krylov_descent.confirmation import Confirmation, Promise, wanted
from krylov_descent.memory import Memory
from krylov_descent.objective import BatchLosses, Objective
from krylov_descent.report import Settlement
from krylov_descent.sets import StepSets


def settle(objective: Objective, draw: StepSets, memory: Memory) -> tuple[Settlement, Memory]:
    """Judge the last step of a run as the next step would have: by f on A, here with forward passes."""
    losses = objective.value(draw.a)
    earlier = undoing(objective, draw, memory, losses, None) if unmoved(objective, memory) else None
    if earlier is None:
        return Settlement(losses.mean, accepted=True), memory
    assert memory.accepted is not None
    objective.move_to(memory.accepted)
    return Settlement(earlier, accepted=False), undone(memory, draw)


def undoing(
    objective: Objective, draw: StepSets, memory: Memory, losses: BatchLosses, g: Tensor | None
) -> float | None:
    """f on A before the last step, if that step, which has led here (``unmoved``), is to be undone."""
    assert memory.accepted is not None
    finite = math.isfinite(losses.mean) and (g is None or math.isfinite(length(g, objective.comm)))
    return better_before(objective, draw, losses if finite else None, memory.accepted, memory.accepted_loss)


def unmoved(objective: Objective, memory: Memory) -> bool:
    """Whether θ is where the last step left it, bit for bit, on all ranks: if edited since, it is not ours to judge."""
    if memory.accepted is None or memory.d_prev is None:
        return False
    x, left_at = objective.point(), objective.parameters.rounded(memory.accepted + memory.d_prev)
    elsewhere = not torch.equal(x, left_at)
    if elsewhere:  # or NaN, in what the loss does not use
        elsewhere = bool(((x != left_at) & ~(x.isnan() & left_at.isnan())).any())
    return not float(objective.comm.max(torch.tensor(float(elsewhere), device="cpu")))


def undone(memory: Memory, draw: StepSets) -> Memory:
    """The memory after going back: no last step, and a larger C, or larger sets."""
    memory = replace(memory, d_prev=None, earlier=(), accepted=None)
    if draw.grows:
        return replace(memory, growths=memory.growths + 1)
    return replace(memory, search_growth=memory.search_growth + 1)


def grown(memory: Memory, draw_sets: Callable[[Memory], StepSets]) -> tuple[Memory, StepSets, list[str]]:
    """The sets of this step, larger where the last ones asked for it; with the memory that has them, and why B grew."""
    draw, promise = draw_sets(memory), memory.promise
    if not draw.grows:
        return memory, draw, []
    if memory.confirmation is not None and memory.confirmation.too_little:
        memory = replace(memory, growths=memory.growths + 1)
        draw = draw_sets(memory)
    if promise is None or not promise.broken:
        return memory, draw, []
    for more in range(1, 4):  # one doubling may be less than the sets have anyway
        wider = replace(memory, promise=Promise(doublings=promise.doublings + more))
        larger = draw_sets(wider)
        if larger.sizes["B"] > draw.sizes["B"]:
            part = f"fell by {promise.agreement:.0%}" if promise.agreement > 0 else "rose instead"
            note = f"B has now {larger.sizes['B']} samples: of what the model promised, the loss on C {part}."
            return wider, larger, [note]
    return replace(memory, promise=replace(promise, agreement=1.0)), draw, []


def confirmation_of(memory: Memory, draw: StepSets, last: Tensor | None, notes: list[str]) -> Confirmation | None:
    """What is known of the last steps, if A is not everything; begun anew where the sets have just grown.

    ``last`` is the step that has led here; None if there was none, or the parameters were changed since.
    """
    known = memory.confirmation or Confirmation()
    if not draw.grows:
        return None
    if known.too_little:
        notes.append(
            f"A has now {draw.sizes['A']} samples: of the slope of the last {known.judged:.0f} steps, other samples "
            f"confirmed {known.share:.0%}."
        )
        known = Confirmation(slope=known.slope, caution=known.caution)
    if draw.covers_all:
        return None
    if last is None and memory.accepted is not None:
        notes.append("The parameters were changed since the last step: sets do not grow by what it would have told.")
    return replace(known, wanted=wanted(draw.coverage))
