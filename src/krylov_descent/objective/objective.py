"""The objective on a set of samples: closure + parameters → f, ∇f and the graph of a micro-batch.

Letters: f(θ) = Σ_b w_b ℓ_b(θ) / W + ½ Σ c‖θ‖² over micro-batches b with mean loss ℓ_b, weight w_b and W = Σ w_b.
All ranks hold θ; each evaluates its own micro-batches, and sums go through ``comm``. An error on one rank is raised on
all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from krylov_descent.distributed import Comm, defer_error
from krylov_descent.objective import closure as closures
from krylov_descent.objective.closure import BatchClosure, Evaluation
from krylov_descent.objective.drop_in import Form
from krylov_descent.objective.workspace import Workspace
from krylov_descent.progress import Tell, nobody
from krylov_descent.safety.footprint import Footprint, same_path_as_with_gradients
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.vectors.parameters import ParameterVector
from krylov_descent.vectors.products import numbers_of
from krylov_descent.vectors.sums import WeightedSum, exact_sum

# Cost per sample in units of one gradient (a forward and a backward pass, the latter twice the former).
GRADIENT, FORWARD, PROBE = 1.0, 1 / 3, 2 / 3


def relative_noise(dtype: torch.dtype) -> float:
    """Return the rounding noise of a mean loss, relative to its size: 8 ε of the dtype.

    Smaller decreases (about 1e-6 in float32) cannot be told from rounding.

    Example:
        >>> relative_noise(torch.float32)
        9.5367431640625e-07
    """
    return 8 * torch.finfo(dtype).eps


class PassAgain(Exception):  # noqa: N818 — no error
    """Raised by ``Statistics.collect``: the gathered statistics are void, and the pass must start over."""


class Statistics(Protocol):
    """Statistics that a preconditioner gathers along the pass over A, beside the gradient."""

    def watch(self) -> AbstractContextManager[None]:
        """Return a context for each call of the closure."""
        ...

    def wanted(self, evaluation: Evaluation) -> Sequence[Tensor | GradientEdge]:
        """Return the places in the graph whose ∂loss it needs, from the same backward pass as the gradient."""
        ...

    def collect(
        self, evaluation: Evaluation, gradient: Sequence[Tensor | None], wanted: Sequence[Tensor | None]
    ) -> float:
        """Add one micro-batch and return the cost beyond the gradient, in gradients per sample."""
        ...


@dataclass(frozen=True)
class BatchLosses:
    """Mean losses of this rank's micro-batches of a set, and the mean over the whole set, weight decay included."""

    losses: tuple[float, ...]
    weights: tuple[float, ...]
    mean: float
    total_weight: float


@dataclass(frozen=True, eq=False)
class Derivative:
    """f on a set, its slope along a direction if one was given, and its gradient on demand."""

    losses: BatchLosses
    slope: float
    gradient: Callable[[], Tensor]
    """Returns this rank's part [P_local]; a collective, to be called at most once."""


class _Gathered:
    """The numbers from a pass over this rank's micro-batches."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.weights: list[float] = []
        self.slope: Tensor | None = None
        self.again = False

    def add(self, loss: Tensor, weight: float) -> None:
        self.losses.append(loss)
        self.weights.append(weight)

    @property
    def broken(self) -> bool:
        """Whether the last loss is not finite."""
        return bool(self.losses) and self.weights[-1] > 0 and not bool(self.losses[-1].isfinite())


def _as_it_is(evaluate: Callable[[], Evaluation], seen: Footprint) -> Evaluation:
    with seen:
        return evaluate()


class Objective:
    """f, ∇f and evaluations on micro-batches, with their cost in ``sample_gradients``."""

    def __init__(
        self,
        closure: BatchClosure,
        parameters: ParameterVector,
        comm: Comm,
        workspace: Workspace | None = None,
        footprint: Footprint | None = None,
    ) -> None:
        self.parameters = parameters
        self.comm = comm
        self.workspace = Workspace() if workspace is None else workspace
        """The workspace of this closure and these parameters, kept from step to step."""
        self.sample_gradients = 0.0
        self.tell: Tell = nobody
        self.footprint = Footprint(parameters.device) if footprint is None else footprint
        """What the closure may touch; its first call in a step is noted."""
        self.first_look: Callable[[Callable[[], Evaluation], Footprint], Evaluation] = _as_it_is
        """Performs the first evaluation of a step, and may refuse it."""
        self.form = self.workspace.of(Form)
        """How the closure is called."""
        self._closure = closure
        self._watched = False

    def evaluate(
        self, batch: Microbatch, inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Evaluation:
        """Return the closure's graph, checked for common mistakes; ``inside()`` is a context for each call alone."""
        with self.parameters.without_grads():
            watch = closures.BackwardWatch(self.parameters.params)
            try:
                evaluation = self._look(lambda: self._called(batch, inside), self.first_look)
            except Exception:
                watch.check()
                raise
            watch.check()
        if evaluation.weight > 0:  # a fully masked batch may have no graph
            closures.require_graph(evaluation)
            self._watched = True
        return evaluation

    def _called(self, batch: Microbatch, inside: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Evaluation:
        params = self.parameters.params
        return closures.evaluate(lambda: self.form.call(self._closure, batch, params, inside), batch)

    def _look(
        self,
        evaluate: Callable[[], Evaluation],
        first: Callable[[Callable[[], Evaluation], Footprint], Evaluation] = _as_it_is,
    ) -> Evaluation:
        """Evaluate, noting what the closure touches until a call with samples of weight has passed."""
        return evaluate() if self._watched else first(evaluate, self.footprint)

    def point(self) -> Tensor:
        """Return a copy of this rank's part of θ [P_local]."""
        return self.comm.shard(self.parameters.read())

    def move_to(self, theta: Tensor) -> None:
        """Set θ from the parts [P_local] of all ranks."""
        self.parameters.write(self.comm.all_gather(theta, self.parameters.numel))

    def add_decay(self, part: Tensor, x: Tensor | None = None) -> None:
        """part += c∘x in this rank's parts [P_local]: the decay's gradient (x = θ, the default) or product."""
        parameters, comm = self.parameters, self.comm
        if (bounds := comm.bounds(parameters.numel)) is not None:
            parameters.add_decay(part, bounds[0], x)
        elif any(parameters.decay):
            whole = parameters.read() if x is None else comm.all_gather(x, parameters.numel)
            decay = parameters.zeros()
            parameters.add_decay(decay, 0, whole)
            part.add_(comm.shard(decay))

    def value(
        self, batches: Iterable[Microbatch], see: Callable[[Microbatch, Evaluation], None] = lambda *_: None
    ) -> BatchLosses:
        """Return f by forward passes only; ``see`` is given each of them."""
        gathered = _Gathered()

        def work() -> None:
            for batch in batches:
                evaluation = self.forward(batch)
                gathered.add(evaluation.loss.detach(), evaluation.weight)
                see(batch, evaluation)

        return self._share(gathered, defer_error(self.comm, work))[0]

    def forward(self, batch: Microbatch) -> Evaluation:
        """Call the closure without a graph."""
        with same_path_as_with_gradients():
            try:
                if not self.form.known:
                    evaluation = self.evaluate(batch)
                else:
                    with self.parameters.frozen():
                        evaluation = self._look(lambda: self._called(batch))
            except RuntimeError as error:
                if not closures.misses_graph(error):
                    raise
                # The closure differentiates with respect to the parameters (a gradient penalty).
                evaluation = self.evaluate(batch)
        self.sample_gradients += FORWARD * evaluation.samples
        return evaluation

    def value_and_gradient(
        self, batches: Iterable[Microbatch], statistics: Statistics | None = None
    ) -> tuple[BatchLosses, Tensor]:
        """Return f and this rank's part of ∇f [P_local]; ``statistics`` are gathered in the same pass."""
        derivative = self.differentiate(batches, statistics)
        return derivative.losses, derivative.gradient()

    def differentiate(
        self, batches: Iterable[Microbatch], statistics: Statistics | None = None, along: Tensor | None = None
    ) -> Derivative:
        """Return f, its slope along a direction [P], and ∇f.

        Without statistics, the pass ends after a micro-batch whose loss is not finite.
        """
        comm, parameters = self.comm, self.parameters
        total, gathered = WeightedSum(parameters), _Gathered()

        def work() -> None:
            try:
                for batch in batches:
                    if statistics is None and gathered.broken:
                        break
                    loss, weight = self._add_gradient(batch, statistics, total)
                    gathered.add(loss, weight)
                gathered.slope = None if along is None else total.dot(along, comm)
            except PassAgain:
                gathered.again = True

        losses, slope, W = self._share(gathered, defer_error(comm, work))
        if along is not None:
            slope += parameters.decay_slope(along)

        def gradient() -> Tensor:
            g = total.over_ranks(comm, 1 / W)
            self.add_decay(g)
            return g

        return Derivative(losses, slope, gradient)

    def _add_gradient(
        self, batch: Microbatch, statistics: Statistics | None, total: WeightedSum
    ) -> tuple[Tensor, float]:
        """Add one micro-batch's weighted gradient; its graph is freed on return."""
        evaluation = self.evaluate(batch, nullcontext if statistics is None else statistics.watch)
        if statistics is None and torch.is_anomaly_enabled() and not bool(evaluation.loss.isfinite()):
            self.sample_gradients += FORWARD * evaluation.samples  # its backward pass would raise
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

    def _differentiate(
        self, evaluation: Evaluation, wanted: Sequence[Tensor | GradientEdge] = ()
    ) -> tuple[Tensor | None, ...]:
        inputs: tuple[Any, ...] = (*self.parameters.params, *wanted)
        if evaluation.weight == 0:  # a fully masked micro-batch may have no graph
            return (None,) * len(inputs)
        gradients = closures.gradients_of(evaluation.loss, inputs, retain_graph=bool(wanted))
        of_parameters = gradients[: len(self.parameters.params)]
        if all(g is None for g in of_parameters):
            raise ValueError(
                "The closure's loss depends on none of the parameters given to KSD, but on others: the model was "
                "rebuilt or copied after the optimizer was created, KSD got another model's parameters, or they are in "
                "fully_shard (not twice differentiable: use krylov_descent.distributed.gathered.shard_at_rest)."
            )
        closures.require_dense(of_parameters)
        return gradients

    def _share(self, gathered: _Gathered, failure: Exception | None) -> tuple[BatchLosses, float, float]:
        """Return mean loss, slope and W over all ranks, by one small sum.

        Raises:
            PassAgain: some rank needs to start the pass over.
            Exception: ``failure``, or that of another rank.
        """
        slopes = [] if gathered.slope is None else [gathered.slope]
        values = numbers_of([*gathered.losses, *slopes])
        slope = values.pop() if slopes else 0.0
        # The mean of a micro-batch of weight 0 is 0/0 and must not enter the sum.
        weighted = exact_sum(w * loss for w, loss in zip(gathered.weights, values, strict=True) if w > 0)
        own = (weighted, math.fsum(gathered.weights), slope, float(gathered.again))
        numbers = torch.tensor(own, dtype=torch.float64, device="cpu")
        weighted, W, slope, again = self.comm.total(numbers, failure).tolist()
        if again:
            raise PassAgain
        closures.require_weight(W)
        mean = weighted / W + self.parameters.decay_value()
        losses = BatchLosses(tuple(values), tuple(gathered.weights), mean, W)
        return losses, slope / W, W
