"""Exact sums of squared per-sample gradients, for any module.

Letters: z the outputs of a micro-batch, δ = ∂loss/∂z, gᵢ = Jᵢᵀδᵢ the gradient of sample i.

Row i of δ alone, pulled back to the parameters, is gᵢ. Through the graph of a micro-batch of n samples, each row would
cost a backward pass over all n. So the closure is called again on parts of up to 8 samples, and the rows of a part are
pulled back together, by one batched backward pass. A gradient of a mean over parts is never taken: δ is that of the
whole micro-batch, so that weights and masks of the loss keep their meaning.

A part must reproduce its rows of z. The graph of the whole micro-batch is used where it does not (rows depend on each
other, the closure needs whole micro-batches), and where the data cannot be divided (no sets, other than tensors).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.curvature.linearise import pull_back_each
from krylov_descent.distributed.sharded import beside, is_sharded, local_part
from krylov_descent.layers.verify import tolerance
from krylov_descent.objective.closure import Evaluation, row_scaled
from krylov_descent.objective.objective import FORWARD, PROBE
from krylov_descent.samples.interface import Microbatch
from krylov_descent.samples.loading import select_samples

_PART = 8  # samples: more take more arithmetic, fewer more calls of the closure
_CHUNK = 1 << 22  # numbers in the per-sample gradients formed at a time, unless one gradient has more

_Graph = tuple[Evaluation, Sequence[Tensor | None], Tensor]
"""An evaluation, ∂loss/∂z of its outputs, and the samples whose rows are pulled back."""


@dataclass
class Parts:
    """Whether the closure was ever called on a part of a micro-batch with success."""

    work: bool = False


class SampleSquares:
    """Adds Σᵢ gᵢ∘gᵢ of micro-batches.

    Args:
        params: the parameters, by index.
        evaluate: calls the closure on a part of a micro-batch.
        parts: what is known of such calls, kept from step to step.
    """

    def __init__(self, params: Sequence[Tensor], evaluate: Callable[[Microbatch], Evaluation], parts: Parts) -> None:
        self._params, self._evaluate, self._parts = params, evaluate, parts
        self._spread = any(map(is_sharded, params))  # layers on a mesh take neither parts nor batched passes

    def add(
        self, evaluation: Evaluation, dL_dz: Sequence[Tensor | None], scale: float, into: Mapping[int, Tensor]
    ) -> float:
        """Add scale² Σᵢ gᵢ∘gᵢ to ``into``, by parameter; return the cost in gradients per sample."""
        params = [self._params[i] for i in into]
        numbers = sum(x.numel() for x in into.values())
        at_once = 1 if self._spread else max(1, min(_PART, _CHUNK // max(1, numbers)))
        cost, divisible = 0.0, True
        for samples in _parts(_with_influence(evaluation, dL_dz), max(2, at_once)):
            graph = self._part(evaluation, dL_dz, samples) if divisible else None
            divisible = graph is not None
            cost += FORWARD * len(samples) * divisible
            graph = graph or (evaluation, dL_dz, samples)
            cost += PROBE * graph[0].samples * len(samples)
            for rows in torch.split(graph[2], at_once):
                for gradient in _gradients(*graph[:2], rows, params, scale):
                    for p, x, squares in zip(params, gradient, into.values(), strict=True):
                        if x is not None:
                            x = local_part(x, p).to(squares.dtype)
                            squares.addcmul_(x, x)
        return cost / max(1, evaluation.samples)

    def _part(self, evaluation: Evaluation, dL_dz: Sequence[Tensor | None], samples: Tensor) -> _Graph | None:
        """Return the graph of these samples alone; None if there is none that has their rows of the outputs."""
        if self._spread or not evaluation.aligned or len(samples) >= evaluation.samples:
            return None
        try:
            data = select_samples(evaluation.data, samples, evaluation.samples)
            part = self._evaluate(Microbatch(data, len(samples), evaluation.position))
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            if self._parts.work or isinstance(error, torch.OutOfMemoryError):
                raise
            return None  # the closure expects whole micro-batches
        rows = [z[samples.to(z.device)] for z in evaluation.outputs]
        if len(part.outputs) != len(rows) or not all(map(_same, part.outputs, rows)):
            return None
        self._parts.work = True
        deltas = [None if d is None else d[samples.to(d.device)] for d in dL_dz]
        return part, deltas, torch.arange(len(samples), device="cpu")


def _same(z: Tensor, rows: Tensor) -> bool:
    """Whether outputs are equal up to rounding."""
    if z.shape != rows.shape or z.dtype != rows.dtype or z.requires_grad != rows.requires_grad:
        return False
    size = float(rows.detach().abs().max()) if rows.numel() else 0.0
    near = tolerance(torch.finfo(z.dtype).eps) * size
    return torch.allclose(z.detach(), rows.detach(), rtol=0.0, atol=near, equal_nan=True)


def _with_influence(evaluation: Evaluation, dL_dz: Sequence[Tensor | None]) -> Tensor:
    """Return the samples with δ ≠ 0; those without (masked, of weight zero) add nothing."""
    found = []
    for z, d in zip(evaluation.outputs, dL_dz, strict=True):
        n = z.shape[0] if z.ndim else 1
        if d is None or is_sharded(d):
            found.append(torch.full((n,), d is not None, device="cpu"))
        else:
            found.append(d.ne(0).reshape(n, math.prod(d.shape[1:])).any(1).cpu())
    some = torch.stack(found).any(0) if evaluation.aligned else torch.cat(found)
    return some.nonzero()[:, 0]


def _parts(samples: Tensor, size: int) -> Iterator[Tensor]:
    """Yield parts of up to this size and of at least two samples, which closures with squeeze() need."""
    n = len(samples)
    if n:
        yield from torch.tensor_split(samples, max(1, min(-(-n // size), n // 2)))


def _gradients(
    evaluation: Evaluation, dL_dz: Sequence[Tensor | None], samples: Tensor, params: Sequence[Tensor], scale: float
) -> Iterator[Sequence[Tensor | None]]:
    """Yield the gradients gᵢ of these samples, scaled."""
    sizes = [z.shape[0] if z.ndim else 1 for z in evaluation.outputs]
    one = torch.zeros(len(samples), evaluation.samples, dtype=torch.float64, device="cpu")
    one[torch.arange(len(samples), device="cpu"), samples] = scale
    chosen = [one] * len(sizes) if evaluation.aligned else torch.split(one, sizes, 1)
    zs, cotangents = [], []
    for z, d, rows in zip(evaluation.outputs, dL_dz, chosen, strict=True):
        if d is not None:
            zs.append(z)
            cotangents.append([row_scaled(d, beside(s.to(d.device, d.dtype), d)) for s in rows])
    return pull_back_each(zs, params, list(zip(*cotangents, strict=True)))
