"""The check before the first step: a mean over samples, the same at every call, that leaves buffers alone.

A closure that is not makes every product and every comparison of losses silently wrong, so it is refused.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from krylov_descent.closure import Evaluation, require_dense, require_outputs
from krylov_descent.data import Microbatch
from krylov_descent.distributed import together
from krylov_descent.objective import FORWARD, PROBE, Objective
from krylov_descent.sets import StepSets
from krylov_descent.sums import WeightedSum


class _Seen:
    """The modules that ran, and their buffers as they were before."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []

    def note(self, module: nn.Module, args: object) -> None:
        if id(module) not in self.modules:
            self.modules[id(module)] = module
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self.buffers.append((module, name, buffer, buffer.detach().clone()))

    def moved(self) -> list[str]:
        """Which buffers changed; all are put back."""
        names = []
        for module, name, buffer, before in self.buffers:
            if module._buffers.get(name) is not buffer or not _same(buffer, before):
                names.append(f"{type(module).__name__}.{name}")
                with torch.no_grad():
                    buffer.copy_(before)
                module._buffers[name] = buffer
        return names

    def training(self, *kinds: type[nn.Module]) -> list[str]:
        """Names of the modules of these kinds that ran in train mode."""
        return sorted({type(m).__name__ for m in self.modules.values() if isinstance(m, kinds) and m.training})


def _same(x: Tensor, y: Tensor) -> bool:
    """Equal bits, as far as a comparison tells: NaN equals NaN."""
    return bool(((x == y) | ((x != x) & (y != y))).all())


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def check_consistency(objective: Objective, draw: StepSets, *, curvature_of_outputs: bool) -> None:
    """Compare a small batch with itself and with its two halves.

    Args:
        objective: with the closure to check.
        draw: the sets of the first step.
        curvature_of_outputs: whether only what passes through the outputs will have curvature (Gauss–Newton,
            Fisher): then warn about the part of the gradient that does not.

    Raises:
        ValueError: naming the likely cause and the remedy.
    """
    together(objective.comm, lambda: _check(objective, draw, curvature_of_outputs))


def _check(objective: Objective, draw: StepSets, curvature_of_outputs: bool) -> None:
    # All ranks look at the same samples.
    probe = draw.probe
    batch = next(iter(draw.a), None) if probe is None else probe[0]
    if batch is None:
        return  # a rank without samples
    with _watching() as seen:
        first = objective.evaluate(batch)
        objective.sample_gradients += FORWARD * first.samples
        whole = first.loss.item()
        again = _value(objective, batch)[0]
        if curvature_of_outputs and first.weight > 0:
            _warn_of_bypass(objective, first)
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in seen.modules.values()):
        raise ValueError(
            "The closure calls a model in DistributedDataParallel, which averages gradients by itself and cannot "
            "be differentiated twice. Call the bare model (model.module) and give the ranks to KSD(process_group=...)."
        )
    moved = seen.moved()
    eps = torch.finfo(first.loss.dtype).eps
    if moved:
        raise ValueError(
            f"The closure changes buffers of the model at every call ({', '.join(sorted(set(moved)))}), so that no two "
            "evaluations of a step are of the same function. Call model.eval() before training with KSD "
            "(BatchNorm then uses its running statistics), or use GroupNorm or LayerNorm."
        )
    if first.weight == 0 or not math.isfinite(whole):
        return  # nothing to compare; the pass over A reports what is not finite
    # The same sums in the same order: what may differ is the order of atomic additions on a GPU.
    if abs(whole - again) > 64 * eps * abs(whole):
        dropout = seen.training(*_DROPOUT, nn.RNNBase, nn.MultiheadAttention)
        cause = f" Dropout is active in {', '.join(dropout)}: call model.eval(), or set p = 0." if dropout else ""
        raise ValueError(
            f"The closure is random: the same batch gave the loss {whole!r} and then {again!r}.{cause} KSD compares "
            "losses within a step, so the closure must be deterministic; draw noise once, outside the closure."
        )
    if probe is None:
        return
    parts = [_value(objective, half) for half in probe[1:]]
    weight = sum(w for _, w in parts)
    mean = sum(w * f for f, w in parts if w > 0) / weight if weight > 0 else math.nan
    # Other sums, so with other rounding; what is looked for is far larger.
    tolerance = math.sqrt(eps) * max(abs(f) for f in (whole, *(f for f, w in parts if w > 0)))
    if abs(whole - mean) <= tolerance:
        return
    likely = "samples influence each other's loss (batch statistics, a contrastive loss, in-batch negatives)"
    remedy = "write the loss as a mean of terms of one sample each"
    norms = seen.training(nn.modules.batchnorm._NormBase)
    if norms:
        likely, remedy = f"{', '.join(norms)} is in train mode", "call model.eval() before training with KSD"
    elif abs(whole - sum(f for f, _ in parts)) <= tolerance:
        likely, remedy = "the loss is a sum (reduction='sum')", "use reduction='mean'"
    elif first.weight == first.samples:
        remedy += (
            "; if it masks or weights terms, return the weight of its mean as a third value: "
            "loss, outputs, mask.sum(), or class_weights[y].sum()"
        )
    raise ValueError(
        f"The loss of a batch is not the weighted mean of its halves' losses: {whole!r} against {mean!r}. "
        f"Most likely {likely}. Remedy: {remedy}."
    )


def _warn_of_bypass(objective: Objective, evaluation: Evaluation) -> None:
    """Compare ∂loss/∂θ with Jᵀ ∂loss/∂z, the part that the outputs z carry."""
    loss, outputs, params = evaluation.loss, evaluation.outputs, objective.parameters.params
    require_outputs(evaluation, "This curvature ('ggn' or 'fisher')")
    both = torch.autograd.grad(loss, (*params, *outputs), retain_graph=True, allow_unused=True)
    require_dense(both[: len(params)])
    carried = [(z, d) for z, d in zip(outputs, both[len(params) :], strict=True) if d is not None]
    if not carried:
        return  # refused where the product is built
    through = torch.autograd.grad(
        [z for z, _ in carried], params, [d for _, d in carried], retain_graph=True, allow_unused=True
    )
    objective.sample_gradients += 2 * PROBE * evaluation.samples
    g, rest = WeightedSum(objective.parameters), WeightedSum(objective.parameters)
    for total in (g, rest):
        total.add(both[: len(params)], 1.0)
    rest.add(through, -1.0)
    bypass, whole = (math.sqrt(float(objective.comm.dot(x, x))) for x in (rest.times(1.0), g.times(1.0)))
    if whole > 0 and bypass > torch.finfo(loss.dtype).eps ** 0.5 * whole:
        warnings.warn(
            f"{bypass / whole:.0%} of the gradient (by norm) does not pass through the outputs that the closure "
            "returned, so that part of the loss has no curvature in the subspace. If a term of the loss was forgotten, "
            "return its outputs too; for L2 regularisation use KSD(weight_decay=...); or use curvature='hessian'.",
            stacklevel=7,
        )


def _value(objective: Objective, batch: Microbatch) -> tuple[float, float]:
    loss, weight = objective.loss_and_weight(batch)
    return loss.item(), weight


@contextmanager
def _watching() -> Iterator[_Seen]:
    seen = _Seen()
    handle = register_module_forward_pre_hook(seen.note)
    try:
        yield seen
    finally:
        handle.remove()
