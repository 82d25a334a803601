"""v → Hv over a whole set B: the graphs of its micro-batches, kept or rebuilt, and their weighted sum."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from krylov_descent.closure import Evaluation
from krylov_descent.curvature.convolution import LeanConvolutions
from krylov_descent.curvature.graph import MicrobatchGraph
from krylov_descent.data import Microbatch
from krylov_descent.objective import GRADIENT, Objective
from krylov_descent.parameters import WeightedSum

_NOT_TWICE = re.compile(
    r"derivative for .* is not implemented|once_differentiable|double backward|differentiated twice",
    re.IGNORECASE,
)


class CurvatureProduct:
    """v [P_local] → Hv [P_local] on B, weight decay included.

    The graphs of B are built once and kept for all K+1 products, which makes a product cost what hand-written
    matrix products cost. Once they hold more than ``memory_budget`` bytes, the graphs of the remaining micro-batches
    are rebuilt for every product, which adds the cost of building to each. Products are written to ``out``, if given.
    """

    def __init__(
        self,
        kind: type[MicrobatchGraph],
        objective: Objective,
        batches: Sequence[Microbatch],
        memory_budget: int | None = None,
        out: Tensor | None = None,
    ) -> None:
        self._kind = kind
        self._out = out
        self._objective = objective
        self._kept: list[tuple[MicrobatchGraph, float, int]] = []
        self._rebuilt: list[Microbatch] = []
        self._masked_samples = 0
        self.kept_bytes = 0
        for batch in batches:
            if memory_budget is None or self.kept_bytes < memory_budget:
                self._keep(batch, memory_budget)
            else:
                self._rebuilt.append(batch)

    @property
    def rebuilds(self) -> int:
        """How many micro-batches are rebuilt for every product."""
        return len(self._rebuilt)

    def __call__(self, v: Tensor) -> Tensor:
        """v → Hv."""
        parameters, comm = self._objective.parameters, self._objective.comm
        whole = comm.all_gather(v)
        views = parameters.unflatten(whole)
        total = WeightedSum(parameters, self._out)
        weights, samples = [], self._masked_samples
        for graph, weight, n in self._graphs():
            # Checkpointed attention runs again here.
            with explained(), sdpa_kernel(SDPBackend.MATH):
                total.add(graph.product(views), self._kind.share(weight))
            self._objective.sample_gradients += self._kind.product_cost * n
            weights.append(weight)
            samples += n
            del graph  # before the next is rebuilt
        all_samples = float(comm.sum(torch.tensor(float(samples), dtype=torch.float64, device="cpu")))
        W = self._objective.total_weight(weights)
        norm = self._kind.norm(W, all_samples)
        total.add_decay(math.fsum(weights) / W / norm, views)
        return comm.reduce_scatter(total.times(norm))

    def _keep(self, batch: Microbatch, memory_budget: int | None) -> None:
        """Build a micro-batch's graph and keep it, if it fits."""
        with self._measured(enabled=memory_budget is not None) as size:
            built = self._build(batch)
        if built is None:
            self._masked_samples += batch.samples or 0
            return
        if memory_budget is not None and self.kept_bytes + size[0] > memory_budget:
            self._rebuilt.append(batch)
            return
        self.kept_bytes += size[0]
        self._kept.append(built)

    def _graphs(self) -> Iterator[tuple[MicrobatchGraph, float, int]]:
        yield from self._kept
        for batch in self._rebuilt:
            built = self._build(batch)
            assert built is not None
            yield built
            del built

    def _build(self, batch: Microbatch) -> tuple[MicrobatchGraph, float, int] | None:
        """The graph of a micro-batch, or None if all of its terms are masked."""
        # The fused attention kernels have no second derivative; the plain one has.
        with sdpa_kernel(SDPBackend.MATH):
            evaluation = self._evaluate(batch)
            if evaluation.weight == 0:
                return None
            with explained():
                graph = self._kind(evaluation, self._objective.parameters.params)
        self._objective.sample_gradients += GRADIENT * evaluation.samples  # a forward and a backward pass
        return graph, evaluation.weight, evaluation.samples

    def _evaluate(self, batch: Microbatch) -> Evaluation:
        if not self._kind.first_order:
            return self._objective.evaluate(batch)
        with LeanConvolutions() as lean:
            evaluation = self._objective.evaluate(batch)
        # A closure that differentiates inside needs derivatives of convolutions that the lean ones do not have.
        return self._objective.evaluate(batch) if lean.differentiated else evaluation

    @contextmanager
    def _measured(self, *, enabled: bool) -> Iterator[list[int]]:
        """Bytes of the tensors that autograd saves inside; each storage counts once, parameters never."""
        size = [0]
        if not enabled:
            yield size
            return
        seen = {p.untyped_storage().data_ptr() for p in self._objective.parameters.params}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                size[0] += storage.nbytes()
            return x.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            yield size


@contextmanager
def explained() -> Iterator[None]:
    """Turn PyTorch's refusals to differentiate twice into an error with a remedy.

    Raises:
        ValueError: an operation of the model has no second derivative.
    """
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, torch.OutOfMemoryError) or not _NOT_TWICE.search(str(error)):
            raise
        raise ValueError(
            f"An operation of the model cannot be differentiated twice, which curvature products need: {error} "
            "Known cases: nn.EmbeddingBag (use nn.Embedding and a sum), CTC loss, compiled modules (pass the "
            "uncompiled one), nn.LSTM, GRU and RNN on CUDA (step inside torch.backends.cudnn.flags(enabled=False))."
        ) from error
