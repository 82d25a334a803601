"""Acceptance: a step that raised the loss on A is rolled back, one that raised it on C is not taken.

The loss on A is judged by values that the next step computes anyway. ``grown`` and ``confirmation_of`` apply what
samples/growing.py says of larger sets.

Letters: f on A at the point θ after the step and at the point before it; micro-batches b with weights w_b and loss
differences d_b between the two points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from krylov_descent.krylov.basis import length
from krylov_descent.krylov.memory import Memory
from krylov_descent.objective.objective import BatchLosses, Objective, relative_noise
from krylov_descent.report import Settlement
from krylov_descent.samples.growing import Confirmation, Promise, wanted
from krylov_descent.samples.subsets import StepSets

LOST_IN_ROUNDING = (
    "The step that the search found is lost in rounding to the parameters' dtype and was not taken; if every step ends "
    "so, training is finished or needs float64."
)


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


def better_before(
    objective: Objective,
    draw: StepSets,
    losses: BatchLosses | None,
    earlier: Tensor,
    earlier_loss: float,
) -> float | None:
    """f on A at the earlier point, if it was lower there beyond noise; None if not, or if it cannot be told.

    Only a loss that is higher than remembered costs anything: two or one forward passes over A to confirm it.

    Args:
        objective: f, with its parameters at the point after the step.
        draw: the sets of this step.
        losses: f on A there; None if it or its gradient is not finite.
        earlier: the point before the step, this rank's part [P_local].
        earlier_loss: f on A there, when that step was taken.
    """
    rounding = relative_noise(objective.parameters.params[0].dtype) * abs(earlier_loss)
    if losses is not None and losses.mean <= earlier_loss + rounding:
        return None
    # Confirm on the same samples and with the same closure: A may be a fresh subset, and the user may have changed
    # the loss itself (its weights, a weight decay) since the last step.
    batches = draw.a if draw.covers_all else draw.a_in_parts
    after = losses if losses is None or draw.covers_all else objective.value(batches)
    theta = objective.point()
    objective.move_to(earlier)
    before = objective.value(batches)
    objective.move_to(theta)
    if not math.isfinite(before.mean):
        return None
    if after is None:
        return before.mean
    noise = 0.0 if draw.covers_all else 2 * _standard_error(before, after, objective)
    return before.mean if after.mean - before.mean > max(rounding, noise) else None


def _standard_error(before: BatchLosses, after: BatchLosses, objective: Objective) -> float:
    """Of the mean of d_b, from its scatter."""
    # Σ 1, w, wd, w², w²d, w²d²
    sums = torch.zeros(6, dtype=torch.float64, device="cpu")
    for w, old, new in zip(before.weights, before.losses, after.losses, strict=True):
        if w > 0:
            d = new - old
            sums += torch.tensor([1, w, w * d, w * w, w * w * d, (w * d) ** 2], dtype=torch.float64, device="cpu")
    m, W, wd, ww, wwd, wwdd = (float(x) for x in objective.comm.total(sums))
    if m < 2:
        return math.inf  # one part has no scatter: nothing can be told
    mean = wd / W
    return math.sqrt(max(0.0, wwdd - 2 * mean * wwd + mean * mean * ww) * m / (m - 1)) / W


def loss_taken(objective: Objective, draw: StepSets, before: float) -> float | None:
    """f on C where the parameters are now, after a step; None if it is higher than ``before``, beyond rounding.

    The search came to its best point line by line; the step is rounded from V̄a at once, which is another point.
    """
    after = objective.value(draw.c).mean
    rounding = relative_noise(objective.parameters.params[0].dtype) * abs(before)
    return after if after <= before + rounding else None


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
