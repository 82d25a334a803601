"""The objective on a set of samples: closure + parameters → f, ∇f and the graph of a micro-batch.

Letters: f(θ) = Σ_b w_b ℓ_b(θ) / W + ½ Σ c‖θ‖² over micro-batches b with mean loss ℓ_b, weight w_b and W = Σ w_b.
All ranks hold θ; each evaluates its own micro-batches, and sums go through ``comm``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from krylov_descent import closure as closures
from krylov_descent.closure import BatchClosure, Evaluation
from krylov_descent.compiled import CompiledPasses, Pass
from krylov_descent.data import Microbatch
from krylov_descent.distributed import Comm
from krylov_descent.parameters import ParameterVector, WeightedSum

# Cost per sample in units of one gradient (a forward and a backward pass, the latter twice the former).
GRADIENT, FORWARD, PROBE = 1.0, 1 / 3, 2 / 3


def relative_noise(dtype: torch.dtype) -> float:
    """Rounding noise of a mean loss, relative to its size: 8 ε of the dtype it is computed in.

    About 1e-6 in float32: below it a decrease cannot be told from rounding.

    Example:
        >>> relative_noise(torch.float32)
        9.5367431640625e-07
    """
    return 8 * torch.finfo(dtype).eps


class PassAgain(Exception):  # noqa: N818 — no error
    """Raised by ``Statistics.collect``: what was gathered is void, and the pass must be taken again from its start."""


class Statistics(Protocol):
    """What a preconditioner gathers along the pass over A, beside the gradient."""

    def watch(self) -> AbstractContextManager[None]:
        """Surround each call of the closure."""
        ...

    def wanted(self, evaluation: Evaluation) -> Sequence[Tensor]:
        """Tensors of the graph whose ∂loss it asks for, from the same backward pass as the gradient."""
        ...

    def collect(
        self, evaluation: Evaluation, gradient: Sequence[Tensor | None], wanted: Sequence[Tensor | None]
    ) -> float:
        """Take in one micro-batch; returns what it cost beyond the gradient, in gradients per sample."""
        ...


@dataclass(frozen=True)
class BatchLosses:
    """Mean losses of the micro-batches of a set, and the mean over the set, weight decay included."""

    losses: tuple[float, ...]
    weights: tuple[float, ...]
    mean: float


class Objective:
    """f, ∇f and evaluations on micro-batches; counts what they cost in ``sample_gradients``."""

    def __init__(
        self,
        closure: BatchClosure,
        parameters: ParameterVector,
        comm: Comm,
        identity: object = None,
        compiled: CompiledPasses | None = None,
    ) -> None:
        self.parameters = parameters
        self.identity = identity
        """Tells one closure from another, for what is remembered about it from step to step."""
        self.comm = comm
        self.sample_gradients = 0.0
        self.compiled = compiled
        """Takes the passes without statistics, if given."""
        self._closure = closure
        self._watched = False

    def evaluate(self, batch: Microbatch) -> Evaluation:
        """One call of the closure with its graph; the first call is searched for the usual mistakes."""
        if self._watched:
            return closures.evaluate(self._closure, batch)
        watch = closures.BackwardWatch(self.parameters.params)
        try:
            evaluation = closures.evaluate(self._closure, batch)
        finally:
            watch.check()
        if evaluation.weight > 0:  # a batch whose every term is masked tells nothing
            closures.require_graph(evaluation)
            self._watched = True
        return evaluation

    def value(self, batches: Iterable[Microbatch]) -> BatchLosses:
        """f by forward passes only."""
        pairs = [self.loss_and_weight(batch) for batch in batches]
        return self._mean([loss for loss, _ in pairs], [weight for _, weight in pairs])

    def loss_and_weight(self, batch: Microbatch) -> tuple[Tensor, float]:
        """The mean loss of one micro-batch and its weight, by a forward pass."""
        with same_path_as_with_gradients():
            try:
                with self.parameters.frozen():
                    evaluation = closures.evaluate(self._closure, batch)
            except RuntimeError as error:
                if "grad" not in str(error):
                    raise
                # The closure differentiates with respect to the parameters (a gradient penalty).
                evaluation = closures.evaluate(self._closure, batch)
        self.sample_gradients += FORWARD * evaluation.samples
        return evaluation.loss.detach(), evaluation.weight

    def value_and_gradient(
        self, batches: Iterable[Microbatch], statistics: Statistics | None = None
    ) -> tuple[BatchLosses, Tensor]:
        """f and this rank's part of ∇f [P_local]; ``statistics`` are gathered in the same pass.

        Without statistics, a loss that is not finite ends the pass at once: no gradient is of use there.
        """
        total = WeightedSum(self.parameters)
        losses, weights = [], []
        for batch in batches:
            loss, weight = self._add_gradient(batch, statistics, total)
            losses.append(loss)
            weights.append(weight)
            if statistics is None and weight > 0 and not bool(loss.isfinite()):
                break
        mean = self._mean(losses, weights)
        # Weight decay as a part of every sample's loss: over all ranks it counts once.
        total.add_decay(math.fsum(weights))
        return mean, self.comm.reduce_scatter(total.times(1 / self.total_weight(weights)))

    def _add_gradient(
        self, batch: Microbatch, statistics: Statistics | None, total: WeightedSum
    ) -> tuple[Tensor, float]:
        """Add one micro-batch's weighted gradient; its graph dies with this call, before the next is built."""
        if statistics is None and self.compiled is not None:
            one = self.compiled.take(self._closure, self.parameters.params, batch.data, lambda: self._pass(batch))
            if one.weight > 0:
                total.add(one.gradient, one.weight)
            self.sample_gradients += GRADIENT * one.samples
            return one.loss, one.weight
        with nullcontext() if statistics is None else statistics.watch():
            evaluation = self.evaluate(batch)
        if statistics is None and evaluation.weight > 0 and not bool(evaluation.loss.isfinite()):
            self.sample_gradients += FORWARD * evaluation.samples
            return evaluation.loss.detach(), evaluation.weight
        wanted = () if statistics is None else statistics.wanted(evaluation)
        both = self._differentiate(evaluation, wanted)
        gradient = both[: len(self.parameters.params)]
        if statistics is not None:
            extra = statistics.collect(evaluation, gradient, both[len(gradient) :])
            self.sample_gradients += extra * evaluation.samples
        if evaluation.weight > 0:
            total.add(gradient, evaluation.weight)
        self.sample_gradients += GRADIENT * evaluation.samples
        return evaluation.loss.detach(), evaluation.weight

    def _pass(self, batch: Microbatch) -> Pass:
        evaluation = self.evaluate(batch)
        gradient = self._differentiate(evaluation)
        return Pass(evaluation.loss.detach(), evaluation.weight, evaluation.samples, gradient)

    def total_weight(self, weights: Sequence[float]) -> float:
        """W over all ranks.

        Raises:
            ValueError: every weight is zero.
        """
        total = float(self.comm.sum(torch.tensor(math.fsum(weights), dtype=torch.float64, device="cpu")))
        if total <= 0:
            raise ValueError(
                "The weights that the closure returned for a whole sample set sum to 0: every term is masked. "
                "Drop samples without a target from the data set, or enlarge fraction."
            )
        return total

    def _differentiate(self, evaluation: Evaluation, wanted: Sequence[Tensor] = ()) -> tuple[Tensor | None, ...]:
        inputs = (*self.parameters.params, *wanted)
        if evaluation.weight == 0:  # a micro-batch whose every term is masked may have no graph at all
            return (None,) * len(inputs)
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            evaluation.loss, inputs, allow_unused=True, retain_graph=bool(wanted)
        )
        of_parameters = gradients[: len(self.parameters.params)]
        if all(g is None for g in of_parameters):
            raise ValueError(
                "The closure's loss depends on none of the parameters given to KSD, though on others: the model was "
                "rebuilt or copied after the optimizer was made, or KSD got another model's parameters."
            )
        closures.require_dense(of_parameters)
        return gradients

    def _mean(self, losses: Sequence[Tensor], weights: Sequence[float]) -> BatchLosses:
        values = torch.stack(list(losses)).double().tolist() if losses else []
        # A micro-batch of weight 0 has no terms; its mean, 0/0, must not spoil the sum.
        products = [w * x for w, x in zip(weights, values, strict=True) if w > 0]
        weighted = self.comm.sum(torch.tensor(math.fsum(products), dtype=torch.float64, device="cpu"))
        mean = float(weighted) / self.total_weight(weights) + self.parameters.decay_value()
        return BatchLosses(tuple(values), tuple(weights), mean)


@contextmanager
def same_path_as_with_gradients() -> Iterator[None]:
    """Keep nn.TransformerEncoder's inference-only kernels out of passes that are compared with others."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
