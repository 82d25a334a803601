"""Did the last step raise the loss on A? Asked of losses that the next step computes anyway. And on C? Asked at once.

Letters: f on A at the point θ after the step and at the point before it; micro-batches b with weights w_b and loss
differences d_b between the two points.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from krylov_descent.objective import BatchLosses, Objective, relative_noise
from krylov_descent.sets import StepSets


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


LOST_IN_ROUNDING = (
    "The step that the search found is lost in rounding to the parameters' dtype and was not taken; if every step ends "
    "so, training is finished or needs float64."
)


def loss_taken(objective: Objective, draw: StepSets, before: float) -> float | None:
    """f on C where the parameters are now, after a step; None if it is higher than ``before``, beyond rounding.

    The search came to its best point line by line; the step is rounded from V̄a at once, which is another point.
    """
    after = objective.value(draw.c).mean
    rounding = relative_noise(objective.parameters.params[0].dtype) * abs(before)
    return after if after <= before + rounding else None


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
