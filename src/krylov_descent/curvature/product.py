"""The product v → Hv over a set B: graphs of micro-batches, kept or rebuilt, and their weighted sum."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from krylov_descent.curvature.convolution import LeanConvolutions
from krylov_descent.curvature.errors import explain_missing_second_derivative
from krylov_descent.curvature.gauss_newton import GaussNewtonGraph
from krylov_descent.curvature.interface import MicrobatchGraph
from krylov_descent.distributed import defer_error, run_on_all
from krylov_descent.distributed.sharded import local_part
from krylov_descent.objective.closure import Evaluation, require_weight
from krylov_descent.objective.objective import GRADIENT, Objective
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.vectors.parameters import ParameterVector
from krylov_descent.vectors.storage import BasisStorage
from krylov_descent.vectors.sums import WeightedSum


class _Built(NamedTuple):
    graph: MicrobatchGraph
    weight: float
    samples: int


class CurvatureProduct:
    """v [P_local] → Hv [P_local] on B, weight decay included.

    The graphs of B are built once and kept for all K+1 products, so that a product costs about as much as hand-written
    matrix products. Beyond ``memory_budget`` bytes, the graphs of the remaining micro-batches are rebuilt for every
    product. Products are written to ``out`` [P_local], if given.
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
        self._parts: list[_Built | Microbatch] = []  # in order: kept graphs, and micro-batches to rebuild
        self._masked_samples = 0
        self.kept_bytes = 0
        self.measured = True
        """Whether ``kept_bytes`` is known: torch.func does not allow saved-tensor hooks."""
        # One buffer [P] for all products: the result's own in a single process.
        self._whole = out
        if out is not None and objective.comm.ranks > 1:
            self._whole = objective.parameters.empty()
        self._build_all(batches, memory_budget)

    @property
    def rebuilds(self) -> int:
        """The number of micro-batches that are rebuilt for every product."""
        return sum(isinstance(part, Microbatch) for part in self._parts)

    def _build_all(self, batches: Sequence[Microbatch], memory_budget: int | None) -> None:
        def work() -> None:
            for batch in batches:
                if memory_budget is None or self.kept_bytes < memory_budget:
                    self._keep(batch, memory_budget)
                else:
                    self._parts.append(batch)

        run_on_all(self._objective.comm, work)

    def __call__(self, v: Tensor) -> Tensor:
        """Return Hv."""
        parameters, comm = self._objective.parameters, self._objective.comm
        views = parameters.unflatten(comm.all_gather(v, parameters.numel, row=True))
        total = WeightedSum(parameters, out=self._whole)
        counted = torch.tensor([0.0, self._masked_samples], dtype=torch.float64, device="cpu")  # weight, samples

        def work() -> None:
            for graph, weight, n in self._graphs():
                # Checkpointed attention runs again here.
                with explain_missing_second_derivative(), sdpa_kernel(SDPBackend.MATH):
                    total.add(graph.product(views), self._kind.term_weight(weight))
                self._objective.sample_gradients += self._kind.product_cost * n
                counted[0] += weight
                counted[1] += n
                del graph  # before the next is rebuilt

        outcome = defer_error(comm, work)
        W, samples = comm.total(counted, outcome).tolist()
        require_weight(W)
        views.clear()  # a vector of P numbers
        Hv = total.over_ranks(comm, self._kind.norm(W, samples), self._out)
        self._objective.add_decay(Hv, v)
        return Hv

    def within(self, V: BasisStorage) -> Tensor:
        """Return H̄ = V H Vᵀ [m, m] of a Gauss–Newton matrix, float64 on the CPU, at half the cost of products."""
        objective, m = self._objective, V.m
        parameters, comm = objective.parameters, objective.comm
        rows = V.tensor()
        vectors: list[list[Tensor]] = []  # whole, of all rows, only for graphs that are there one at a time
        images: list[list[Sequence[Tensor]]] = []  # of each row by each graph that is kept
        sums = torch.zeros(m * m + 1, dtype=torch.float64, device="cpu")

        def see(v: list[Tensor]) -> None:
            with explain_missing_second_derivative(), sdpa_kernel(SDPBackend.MATH):
                images.append([graph.image(v) for graph, *_ in self._graphs() if isinstance(graph, GaussNewtonGraph)])

        def work() -> None:
            for k, (graph, weight, n) in enumerate(self._graphs()):
                assert isinstance(graph, GaussNewtonGraph)
                with explain_missing_second_derivative(), sdpa_kernel(SDPBackend.MATH):
                    of_rows = [row[k] for row in images] or [graph.image(v) for v in vectors]
                    sums[:-1] += weight * graph.gram(of_rows).reshape(-1)
                sums[-1] += weight
                objective.sample_gradients += graph.image_cost * m * n
                del graph  # before the next is rebuilt

        outcome: Exception | None = None
        for row in rows:
            v = parameters.unflatten(comm.all_gather(row, parameters.numel, row=True))
            if self.rebuilds:
                vectors.append(v)
            else:
                outcome = outcome or defer_error(comm, functools.partial(see, v))
            del v  # a vector of P numbers, before the next is made
        total = comm.total(sums, outcome or defer_error(comm, work))
        require_weight(W := float(total[-1]))
        H = total[:-1].reshape(m, m) / W
        if not any(parameters.decay):
            return H
        if len(set(parameters.decay)) == 1:  # one c for all: V cI Vᵀ = c V Vᵀ
            return H + parameters.decay[0] * comm.sum(V.gram()).to(H)
        for j, v in enumerate(rows):
            decay = torch.zeros_like(v)
            objective.add_decay(decay, v)
            H[:, j] += comm.sum(V.dots(decay)).to(H)
        return H

    def _keep(self, batch: Microbatch, memory_budget: int | None) -> None:
        """Build a micro-batch's graph and keep it, if it fits."""
        try:
            enabled = memory_budget is not None and self.measured
            with saved_bytes(self._objective.parameters) if enabled else nullcontext([0]) as size:
                built = self._build(batch)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            self.measured = False
            built = self._build(batch)
        if built is None:
            self._masked_samples += batch.samples or 0
            return
        if not self.measured or (memory_budget is not None and self.kept_bytes + size[0] > memory_budget):
            self._parts.append(batch)
            return
        self.kept_bytes += size[0]
        self._parts.append(built)

    def _graphs(self) -> Iterator[_Built]:
        for part in self._parts:
            built = self._build(part) if isinstance(part, Microbatch) else part
            assert built is not None
            yield built
            del built

    def _build(self, batch: Microbatch) -> _Built | None:
        """Return the graph of a micro-batch, or None if all of its terms are masked."""
        # The fused attention kernels have no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            evaluation = self._evaluate(batch)
            if evaluation.weight == 0:
                return None
            with explain_missing_second_derivative():
                graph = self._kind(evaluation, self._objective.parameters.params)
        self._objective.sample_gradients += GRADIENT * evaluation.samples  # a forward and a backward pass
        return _Built(graph, evaluation.weight, evaluation.samples)

    def _evaluate(self, batch: Microbatch) -> Evaluation:
        if not self._kind.first_order:
            return self._objective.evaluate(batch)
        with LeanConvolutions() as lean:
            evaluation = self._objective.evaluate(batch)
        # A closure that differentiates inside needs full derivatives of convolutions.
        return self._objective.evaluate(batch) if lean.differentiated else evaluation


@contextmanager
def saved_bytes(parameters: ParameterVector) -> Iterator[list[int]]:
    """Count the bytes of tensors that autograd saves inside; each storage counts once, parameters never."""
    size = [0]
    seen = {p.untyped_storage()._cdata for p in parameters.local}  # tells meta tensors apart, too

    def pack(x: Tensor) -> Tensor:
        if x.layout != torch.strided:  # no storage of its own
            size[0] += x._nnz() * (x.element_size() + 8 * x.ndim) if x.is_sparse else x.numel() * x.element_size()
            return x.detach()
        storage = local_part(x, x).untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            size[0] += storage.nbytes()
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield size


def forward_bytes(objective: Objective, batch: Microbatch | None) -> int:
    """Return the bytes that autograd saves in one evaluation; 0 without a batch."""
    if batch is None:
        return 0
    with saved_bytes(objective.parameters) as size:
        objective.evaluate(batch)
    return size[0]
