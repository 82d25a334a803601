"""The check before the first step: the loss is a mean over samples, the same at every call, and changes no buffers.

Any other closure is refused, as it makes every product and every comparison of losses silently wrong.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from krylov_descent.distributed import run_on_all
from krylov_descent.objective.closure import Evaluation, require_outputs
from krylov_descent.objective.drop_in import outside
from krylov_descent.objective.objective import FORWARD, PROBE, Objective
from krylov_descent.safety.footprint import Footprint
from krylov_descent.samples.interface import Microbatch, StepSets

Name = Callable[[nn.Module, str], str]
"""A module and a suffix (".running_mean", or none) → its name in messages."""


def kind(module: nn.Module, suffix: str = "") -> str:
    """Return the class name of a module: KSD is given parameters, and knows no module paths."""
    return f"{type(module).__name__}{suffix}"


@dataclass(frozen=True)
class Inconsistency:
    """A property of the closure that makes losses of a step incomparable."""

    what: Literal["wrapper", "buffers", "random", "mean"]
    detail: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.detail} {self.remedy}"


def in_training(seen: Footprint, kinds: tuple[type[nn.Module], ...], name: Name = kind) -> list[str]:
    """Return the names of the modules of these kinds that ran in train mode."""
    return sorted({name(m, "") for m in seen.modules.values() if isinstance(m, kinds) and m.training})


def dropping(seen: Footprint, name: Name = kind) -> list[str]:
    """Return the names of the modules that ran with active dropout."""
    return sorted({name(m, "") for m in seen.modules.values() if m.training and _dropout(m) > 0})


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _dropout(module: nn.Module) -> float:
    """Return the dropout probability of a module in train mode."""
    if isinstance(module, _DROPOUT):
        return module.p
    if isinstance(module, nn.RNNBase):
        return module.dropout if module.num_layers > 1 else 0.0
    return module.dropout if isinstance(module, nn.MultiheadAttention) else 0.0


def check_consistency(objective: Objective, draw: StepSets, *, curvature_of_outputs: bool) -> None:
    """Compare a small batch with itself and with its two halves.

    Args:
        objective: the objective with the closure to check.
        draw: the sets of the first step.
        curvature_of_outputs: whether curvature passes through the outputs alone (Gauss–Newton, Fisher): then warn
            about the part of the gradient that does not.

    Raises:
        ValueError: the closure is inconsistent; the message names the likely cause and the remedy.
    """
    run_on_all(objective.comm, lambda: _check(objective, draw, curvature_of_outputs))


def _check(objective: Objective, draw: StepSets, curvature_of_outputs: bool) -> None:
    # All ranks check the same samples.
    probe = draw.probe
    batch = next(iter(draw.a), None) if probe is None else probe[0]
    if batch is None:
        return  # a rank without samples
    first = objective.evaluate(batch)
    objective.sample_gradients += FORWARD * first.samples
    with Footprint() as seen:  # of the second call: the first may fill caches
        again = _value(objective, batch)[0]
    if curvature_of_outputs and first.weight > 0:
        _warn_of_bypass(objective, first)
    halves = None if probe is None else probe[1:]
    for found in inconsistencies(objective, first, again, seen, halves):
        raise ValueError(str(found))


def steady(evaluate: Callable[[], Evaluation], seen: Footprint) -> Evaluation:
    """Check the first evaluation of a later step, as train or eval mode may have been switched, and return it.

    An evaluation that changes a buffer or the generator is repeated, to tell a cache from a layer in train mode.

    Raises:
        ValueError: the closure is inconsistent.
    """
    generator = torch.get_rng_state()
    with seen:
        first = evaluate()
    if not (seen.changed(kind) or dropping(seen)) and torch.equal(generator, torch.get_rng_state()):
        return first
    with Footprint() as again:
        second = evaluate()
    losses = first.loss.item(), second.loss.item()
    for found in (*_moving(again.changed(kind)), *_random(*losses, second, seen, kind)):
        raise ValueError(str(found))
    return second


def inconsistencies(
    objective: Objective,
    first: Evaluation,
    again: float,
    seen: Footprint,
    halves: tuple[Microbatch, ...] | None,
    name: Name = kind,
) -> Iterator[Inconsistency]:
    """Yield the inconsistencies of a closure, the gravest first; halves are evaluated last.

    Args:
        objective: the objective with the closure.
        first: an evaluation of a small batch.
        again: the loss of the same batch at a second call.
        seen: the modules that ran in the second call.
        halves: the two halves of that batch, or None.
        name: the function that names modules.
    """
    wrapped = [m for m in seen.modules.values() if isinstance(m, nn.parallel.DistributedDataParallel)]
    if wrapped:
        yield Inconsistency(
            "wrapper",
            "The closure calls a model in DistributedDataParallel, which averages gradients by itself and cannot "
            "be differentiated twice.",
            "Call the bare model (model.module) and give the ranks to KSD(process_group=...).",
        )
    moved = seen.changed(name)
    eps = torch.finfo(first.loss.dtype).eps
    yield from _moving(moved)
    whole = first.loss.item()
    if first.weight == 0:
        return  # nothing to compare
    random = tuple(_random(whole, again, first, seen, name))
    yield from random
    if random or not math.isfinite(whole):
        return  # halves would add nothing; the pass over A reports losses that are not finite
    if halves is None:
        return
    parts = [_value(objective, half) for half in halves]
    weight = sum(w for _, w in parts)
    mean = sum(w * f for f, w in parts if w > 0) / weight if weight > 0 else math.nan
    # Rounding differs between these sums; a real discrepancy is far larger.
    tolerance = math.sqrt(eps) * max(abs(f) for f in (whole, *(f for f, w in parts if w > 0)))
    if abs(whole - mean) <= tolerance:
        return
    likely = "samples influence each other's loss (batch statistics, a contrastive loss, in-batch negatives)"
    remedy = "write the loss as a mean of terms of one sample each"
    norms = in_training(seen, (nn.modules.batchnorm._NormBase,), name)
    if norms:
        likely, remedy = f"{', '.join(norms)} is in train mode", "call model.eval() before training with KSD"
    elif abs(whole - sum(f for f, _ in parts)) <= tolerance:
        likely, remedy = "the loss is a sum (reduction='sum')", "use reduction='mean'"
    elif first.weight == first.samples:
        remedy += (
            "; if it masks or weights terms, return the weight of its mean as a third value: "
            "loss, outputs, mask.sum(), or class_weights[y].sum()"
        )
    yield Inconsistency(
        "mean",
        f"The loss of a batch is not the weighted mean of its halves' losses: {whole!r} against {mean!r}. "
        f"Most likely {likely}.",
        f"Remedy: {remedy}.",
    )


def _moving(moved: Sequence[str]) -> Iterator[Inconsistency]:
    if moved:
        yield Inconsistency(
            "buffers",
            f"The closure changes buffers of the model at every call ({', '.join(moved)}), so that no two "
            "evaluations of a step are of the same function.",
            "Call model.eval() before training with KSD "
            "(BatchNorm then uses its running statistics), or use GroupNorm or LayerNorm.",
        )


def _random(loss: float, again: float, evaluation: Evaluation, seen: Footprint, name: Name) -> Iterator[Inconsistency]:
    # The same sums in the same order, except for atomic additions on a GPU.
    differs = math.isfinite(loss) != math.isfinite(again)
    differs |= abs(loss - again) > 64 * torch.finfo(evaluation.loss.dtype).eps * abs(loss)
    dropout = dropping(seen, name)
    if differs or dropout:  # dropout of few values may by chance be the same twice
        cause = f" Dropout is active in {', '.join(dropout)}: call model.eval(), or set p = 0." if dropout else ""
        yield Inconsistency(
            "random",
            f"The closure is random: the same batch gave the loss {loss!r} and then "
            f"{repr(again) if differs else 'the same, which is chance'}.{cause}",
            "KSD compares losses within a step, so the closure must be deterministic; draw noise once, outside the "
            "closure.",
        )


def _warn_of_bypass(objective: Objective, evaluation: Evaluation) -> None:
    part = bypass(objective, evaluation)
    if part > 0:
        warnings.warn(bypass_text(part), stacklevel=7)


def bypass(objective: Objective, evaluation: Evaluation) -> float:
    """Return the part of ∂loss/∂θ, by norm, outside of Jᵀ ∂loss/∂z of the outputs z; 0 if it is rounding."""
    require_outputs(evaluation, "This curvature ('ggn' or 'fisher')")
    objective.sample_gradients += 2 * PROBE * evaluation.samples
    return outside(evaluation.loss, evaluation.outputs, objective.parameters.params)


def bypass_text(part: float) -> str:
    """Return the warning about this part of the gradient."""
    return (
        f"{part:.0%} of the gradient (by norm) does not pass through the outputs that the closure "
        "returned, so that part of the loss has no curvature in the subspace. If a term of the loss was forgotten, "
        "return its outputs too; for L2 regularisation use KSD(weight_decay=...); or use curvature='hessian'."
    )


def _value(objective: Objective, batch: Microbatch) -> tuple[float, float]:
    evaluation = objective.forward(batch)
    return evaluation.loss.item(), evaluation.weight
