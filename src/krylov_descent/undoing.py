"""Was the last step a good one? If not, back to the point before it, or more samples for the next."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from krylov_descent.acceptance import better_before
from krylov_descent.basis import length
from krylov_descent.confirmation import Confirmation, wanted
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
    return Settlement(earlier, accepted=False), undone(memory)


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


def undone(memory: Memory) -> Memory:
    """The memory after going back: no last step, and a larger C."""
    return replace(memory, d_prev=None, accepted=None, search_growth=memory.search_growth + 1)


def confirmation_of(memory: Memory, draw: StepSets, previous: str | None, notes: list[str]) -> Confirmation | None:
    """What is known of the last steps, if A is not everything; begun anew where the sets have just grown.

    ``notes`` are told why the sets are larger than at the last step.

    Raises:
        ValueError: steps could not be judged.
    """
    known = memory.confirmation or Confirmation()
    if draw.grows and known.doublings > known.misjudged:
        notes.append(
            f"B and C have now {draw.sizes['C']} samples: at the last step the loss on C fell by {known.agreement:.0%} "
            "of what the model promised."
        )
    known = replace(known, agreement=1.0, misjudged=float(known.doublings))
    if draw.grows and previous is None:
        raise ValueError(
            "Sets that grow judge a step by the curvature that the next one finds along it, which previous=None leaves "
            "out: they would never grow. Use previous='step', or Subsets in place of Growing."
        )
    if draw.grows and known.too_little:
        notes.append(
            f"A has now {draw.sizes['A']} samples: of the slope of the last {known.judged:.0f} steps, other samples "
            f"confirmed {known.share:.0%}."
        )
        known = known.anew()
    return replace(known, wanted=wanted(draw.coverage)) if draw.grows and not draw.covers_all else None
