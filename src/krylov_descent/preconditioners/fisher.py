"""The paper's preconditioner D = diag F on A (Algorithm 3, line 5), floored; gathered in the gradient's own pass.

Letters: gᵢ the gradient of sample i, D [P] the mean of gᵢ∘gᵢ, ε the floor. Dense and convolutional layers have exact
rules (layers/rules.py), without per-sample gradients. All other parameters take the random-sign probe: rows of
∂loss/∂outputs times independent signs sᵢ = ±1, pulled back, give Σᵢ sᵢ gᵢ, whose square has mean Σᵢ gᵢ∘gᵢ; or, with
``Fisher(exact=True)``, their per-sample gradients are formed (sample_squares.py).

Deviations from the paper:
1. Where no rule is exact, the diagonal is that unbiased estimate instead of its exact value, unless ``exact``.
2. D = 1 everywhere if the whole diagonal is zero (the paper's floor would be zero too).
3. D is known up to a factor: it is scaled to a maximum of one, as its squares may leave the range of float32. The
   subspace does not depend on the factor.
4. The floor is 1e-2 of the maximum by default; the paper's 1e-4 (section 4) is in ``PAPER``.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from krylov_descent.curvature.gauss_newton import require_influence
from krylov_descent.distributed import Comm, added
from krylov_descent.distributed.sharded import beside, local_part, whole
from krylov_descent.layers.calls import LayerCall, Recorder
from krylov_descent.layers.rules import Scratch
from krylov_descent.layers.verify import COARSE, Found, Trust, Witness, compared, due, tolerance
from krylov_descent.objective.closure import Evaluation, require_attached, require_outputs, require_rows, row_scaled
from krylov_descent.objective.objective import PROBE, Objective, PassAgain
from krylov_descent.preconditioners.interface import Preconditioner, Solved, nothing_gathered
from krylov_descent.preconditioners.sample_squares import Parts, SampleSquares
from krylov_descent.samples.interface import StepKey
from krylov_descent.stepping.gradient_pass import GradientPass
from krylov_descent.vectors.devices import sent
from krylov_descent.vectors.parameters import ParameterVector


def _seed(key: Sequence[int]) -> int:
    digest = hashlib.blake2b(repr(tuple(key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class FisherTrust(Trust):
    """Verdicts on the rules of parameters: whether they give the gradient and the right sample for each row."""


class FisherDiagonal:
    """Σᵢ gᵢ∘gᵢ over a pass: layer rules where they reproduce the gradient; ``exact``, or else the probe, elsewhere.

    A trusted rule is applied during the backward pass, by a hook that does not keep δ. The δ of an unjudged rule is
    kept, and the rule is judged after the backward pass.
    """

    def __init__(
        self,
        parameters: ParameterVector,
        floor: float,
        probes: int,
        key: Sequence[int],
        trust: Trust | None = None,
        exact: SampleSquares | None = None,
    ) -> None:
        self._parameters = parameters
        self._floor = floor
        self._probes = probes
        self._key = tuple(key)
        self._start_generators(0)
        # Σ_b (w_b·unit)² Σᵢ (Jᵢᵀδᵢ)²
        self._squares = parameters.zeros()
        self._views = parameters.views(self._squares)
        self._scratch = Scratch()
        self._unit: float | None = None
        self._samples = 0
        self._available = True
        self._calls: list[LayerCall] = []
        self._unjudged: list[LayerCall] = []
        self._handles: list[RemovableHandle] = []
        self._served: set[int] = set()
        self._witnesses: list[Witness] = []
        self._batches = 0
        self._watching = False
        eps = torch.finfo(parameters.params[0].dtype).eps
        self._tolerance = tolerance(eps) if eps < COARSE else 0.0  # at 0 no rule agrees
        self.trust = Trust() if trust is None else trust
        self._exact = exact

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the calls of layers that may have a rule, while the closure runs."""
        recorder = Recorder(self._parameters.params)
        with recorder:
            yield
        self._calls = _single(recorder.calls)

    def wanted(self, evaluation: Evaluation) -> Sequence[Tensor | GradientEdge]:
        """Return the tensors whose ∂loss/∂ ``collect`` needs; none if trusted rules cover every parameter."""
        calls, self._calls = self._calls, []
        self._start_generators(evaluation.position)
        self._unjudged, self._witnesses, self._served = [], [], set()
        self._batches += 1
        self._watching = due(self._batches)
        if not evaluation.outputs:
            self._available = False
            return ()
        if self._samples == 0:
            require_outputs(evaluation, "The Fisher preconditioner")
        elif evaluation.weight > 0:
            require_attached(evaluation)
        require_rows(evaluation)
        # An output may be a parameter, on which a hook would outlive the graph.
        inner = [z for z in evaluation.outputs if not z.is_leaf]
        # Hooks run in the order in which they are set.
        see = functools.partial(self._set_unit, evaluation.weight)
        self._handles += [z.register_hook(see) for z in inner]  # type: ignore[no-untyped-call]
        served = set()
        for call in calls:
            if not call.batched or len(call.a) != evaluation.samples:
                continue
            if not self.trust.judged(call.indices.values()):
                self._unjudged.append(call)
            elif trusted := self.trust.trusted.intersection(call.indices.values()):
                served |= trusted
                serve = functools.partial(self._serve, call, evaluation.weight)
                self._handles.append(call.on_backward(serve))
        if len(served) == len(self._parameters.params):
            return ()
        return [*(call.edge for call in self._unjudged), *evaluation.outputs]

    def collect(
        self, evaluation: Evaluation, gradient: Sequence[Tensor | None], wanted: Sequence[Tensor | None]
    ) -> float:
        """Add one micro-batch's Σᵢ gᵢ∘gᵢ."""
        unjudged, self._unjudged = self._unjudged, []  # they hold the graph
        for handle in self._handles:  # the graph may be run through again
            handle.remove()
        self._handles = []
        if not self._available:
            return 0.0
        self._samples += evaluation.samples
        if evaluation.weight == 0:
            return 0.0
        G = {i: g for i, g in enumerate(gradient) if g is not None}
        found = self._compared(self._witnesses, G, None)
        served, self._served, self._witnesses = self._served, set(), []
        self.trust.learn(found)
        if found.refuted:
            # The closure took another path than when the rule was judged, and wrong squares are already added.
            raise PassAgain
        if not wanted:
            return 0.0
        deltas, dL_dz = wanted[: len(unjudged)], wanted[len(unjudged) :]
        require_influence(dL_dz)
        for delta in dL_dz:
            if delta is not None:
                self._set_unit(evaluation.weight, delta)
        if self._unit is None:
            return 0.0  # every ∂loss/∂z is zero: nothing to add or to judge a rule by
        # Not counted as a cost: a resumed run judges again, and must report the costs of one that never stopped.
        self._judge(evaluation, dL_dz, unjudged, deltas, G)
        pulls = 0
        self._watching = False  # these rules have just been judged
        for call, delta in zip(unjudged, deltas, strict=True):
            if delta is not None:
                self._serve(call, evaluation.weight, delta)
        served |= self._served
        self._served = set()
        rest = [i for i in G if i not in served]
        scale = evaluation.weight * self._unit
        if self._exact is not None:
            return self._exact.add(evaluation, dL_dz, scale, {i: self._views[i] for i in rest}) if rest else 0.0
        for _ in range(self._probes if rest else 0):
            signs = self._all_signs(evaluation, self._generator)
            for i, x in self._pull_back(evaluation, dL_dz, signs, rest, scale).items():
                x = local_part(x, self._parameters.params[i]).to(self._parameters.dtype)
                self._views[i].addcmul_(x, x, value=1 / self._probes)
            pulls += 1
        return PROBE * pulls

    def _start_generators(self, position: int) -> None:
        """Seed by key and micro-batch, so that resumed runs and other ranks draw the same, without global state."""
        self._generator = torch.Generator("cpu").manual_seed(_seed((*self._key, position)))
        # Checks have their own generator: a resumed run repeats checks that an uninterrupted one has already made.
        self._check_generator = torch.Generator("cpu").manual_seed(_seed((*self._key, position, 1)))

    def _set_unit(self, weight: float, delta: Tensor) -> None:
        """Set the unit of the pass, about 1 / |w_b ∂loss/∂z|: squares of tiny or huge losses stay in the dtype's range.

        It is a power of two, which changes no rounding, since each rank has its own.
        """
        if self._unit is None and delta.numel():
            size = float(whole(delta.abs().max())) * weight
            if 0 < size < math.inf:
                self._unit = math.ldexp(1.0, -math.frexp(size)[1])

    def _serve(self, call: LayerCall, weight: float, delta: Tensor) -> None:
        """Add the squares of a call's trusted parameters, and keep a witness to compare with the gradient."""
        self._set_unit(weight, delta)
        trusted = {k: i for k, i in call.indices.items() if i in self.trust.trusted}
        if self._unit is None or not trusted:
            return
        layer = call.rule(delta, self._parameters.dtype, weight * self._unit)
        into = {is_weight: self._views[i] for is_weight, i in trusted.items()}
        layer.add_squares(into.get(True), into.get(False), self._scratch)
        self._served |= set(trusted.values())
        if self._watching:
            self._witnesses.append(Witness(layer, trusted, self._random))

    def _judge(
        self,
        evaluation: Evaluation,
        dL_dz: Sequence[Tensor | None],
        calls: Sequence[LayerCall],
        deltas: Sequence[Tensor | None],
        G: dict[int, Tensor],
    ) -> None:
        """Test rules: they must give the gradient and a signed sum Σᵢ sᵢ gᵢ.

        Only the signed sum tells whether rows are attributed to the right samples.
        """
        witnesses = [
            Witness(call.rule(delta, self._parameters.dtype, 1.0), call.indices, self._random)
            for call, delta in zip(calls, deltas, strict=True)
            if delta is not None
        ]
        if not witnesses:
            return
        signs = self._all_signs(evaluation, self._check_generator)
        if all(bool((s == s[0]).all()) for s in signs):  # too few samples to differ by chance
            signs = [(torch.arange(len(s), device="cpu") % 2).mul_(-2).add_(1) for s in signs]
        pulled = self._pull_back(evaluation, dL_dz, signs, list(G), 1.0)
        s = signs[0] if evaluation.aligned else torch.cat(signs)
        signed, plain = self._compared(witnesses, pulled, s.to(self._views[0])), self._compared(witnesses, G, None)
        self.trust.learn(Found(signed.confirmed & plain.confirmed, signed.refuted | plain.refuted))

    def _compared(self, witnesses: Sequence[Witness], G: Mapping[int, Tensor], s: Tensor | None) -> Found:
        return compared((entry for witness in witnesses for entry in witness.compare(G, s)), self._tolerance)

    @property
    def available(self) -> bool:
        """Whether the closure gave outputs to gather from."""
        return self._available

    def diagonal(self, total_weight: float, comm: Comm) -> Tensor:
        """Return D without floor: gᵢ = N (w_b/W) Jᵢᵀδᵢ, hence (1/N) Σᵢ gᵢ² = (N/W²) Σ_b w_b² Σᵢ (Jᵢᵀδᵢ)²."""
        squares, unit = self._summed(comm)
        return squares * (added(comm, self._samples) / (total_weight * unit) ** 2)

    def solver(self, comm: Comm) -> Callable[[Tensor], Tensor] | None:
        """Return D⁻¹ up to a factor (D has maximum one), or None if the closure gave no outputs."""
        # A rank without samples does not know what the closure returns.
        if float(comm.max(torch.tensor(float(not self._available), device="cpu"))):
            return None
        squares, _ = self._summed(comm)
        largest = float(comm.max(squares.max() if len(squares) else squares.new_zeros(())))
        if not 0 < largest < float("inf"):
            return lambda w: w
        inverse = squares.div_(largest).clamp_(min=self._floor).reciprocal_()
        return lambda w: w * inverse

    def _summed(self, comm: Comm) -> tuple[Tensor, float]:
        """Return the squares summed over ranks, this rank's part [P_local], and their unit."""
        squares = self._squares
        del self._squares, self._views  # vectors of P numbers
        largest = torch.tensor(0.0 if self._unit is None else 1 / self._unit, dtype=torch.float64, device="cpu")
        unit = 1 / (float(comm.max(largest)) or 1.0)
        if self._unit not in (None, unit):
            squares.mul_((unit / self._unit) ** 2)
        return comm.reduce_scatter(squares), unit

    def _pull_back(
        self,
        evaluation: Evaluation,
        dL_dz: Sequence[Tensor | None],
        signs: Sequence[Tensor],
        indices: Sequence[int],
        scale: float,
    ) -> dict[int, Tensor]:
        """Return Σᵢ sᵢ Jᵢᵀδᵢ, scaled, for the parameters with these indices."""
        zs = [
            (z, row_scaled(d, beside(s.to(d.device, d.dtype) * scale, d)))
            for z, d, s in zip(evaluation.outputs, dL_dz, signs, strict=True)
            if d is not None
        ]
        params = [self._parameters.params[i] for i in indices]
        pulled = torch.autograd.grad(
            [z for z, _ in zs], params, [d for _, d in zs], retain_graph=True, allow_unused=True
        )
        return {i: x for i, x in zip(indices, pulled, strict=True) if x is not None}

    def _all_signs(self, evaluation: Evaluation, generator: torch.Generator) -> list[Tensor]:
        """Return signs for the rows of each output, the same for all rows of a sample."""
        if evaluation.aligned:
            return [self._signs(evaluation.samples, generator)] * len(evaluation.outputs)
        return [self._signs(z.shape[0] if z.ndim else 1, generator) for z in evaluation.outputs]

    def _signs(self, n: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, 2, (n,), generator=generator, device="cpu").mul_(2).sub_(1)

    def _random(self, n: int) -> Tensor:
        x = torch.randn(n, generator=self._check_generator, dtype=self._parameters.dtype, device="cpu")
        return sent(x, self._parameters.device)


def _single(calls: Sequence[LayerCall]) -> list[LayerCall]:
    """Keep only parameters with a single call: over several calls, the square of the sum is not a sum of squares."""
    times = Counter(i for call in calls for i in (call.weight, call.bias))
    found = []
    for call in calls:
        weight, bias = (i if times[i] == 1 else None for i in (call.weight, call.bias))
        if (weight, bias) != (call.weight, call.bias):
            call = replace(call, weight=weight, bias=bias)
        if call.indices:
            found.append(call)
    return found


@dataclass(frozen=True)
class Fisher(Preconditioner):
    """Preconditions by the diagonal of the per-sample Fisher matrix, as the paper does.

    Args:
        floor: ε, D is floored at ε·max(D). In short runs 1e-2 beats the paper's 1e-4 (section 4) on eight of nine
            seeds (docs/appendix/variants.md). ``PAPER`` has the paper's, which may be ahead later on large networks.
        probes: sign patterns per micro-batch for parameters without an exact rule; one gives an unbiased estimate, and
            each costs two thirds of a gradient.
        exact: per-sample gradients in place of sign patterns, so that D is exact for every module, as in ``PAPER``.
            With sets this costs up to 5⅔ gradients of A. Without them, or if the closure cannot be called on parts of a
            micro-batch, it costs ⅔ of a gradient for each row of the outputs. Nothing if all parameters have a rule.

    Example:
        >>> from krylov_descent import KSD, Fisher
        >>> optimizer = KSD([torch.nn.Parameter(torch.ones(3))], preconditioner=Fisher(floor=1e-3))
    """

    name: ClassVar[str] = "fisher"

    floor: float = 1e-2
    probes: int = 1
    exact: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1:
            raise ValueError(f"Fisher(floor={self.floor}): must be in (0, 1]; the paper's is 1e-4.")
        if self.probes < 1:
            raise ValueError(f"Fisher(probes={self.probes}): must be at least 1.")

    def gather(self, objective: Objective, key: StepKey) -> FisherDiagonal:
        """Return the collector of squared per-sample gradients along the pass over A."""
        trust, parameters = objective.workspace.of(FisherTrust), objective.parameters
        parts = objective.workspace.of(Parts)
        exact = SampleSquares(parameters.params, objective.evaluate, parts) if self.exact else None
        return FisherDiagonal(parameters, self.floor, self.probes, tuple(key), trust, exact)

    def solve(self, at: GradientPass, state: Any, noise: float) -> Solved:
        """Return D⁻¹ from the gathered squares."""
        gathered, at.gathered = at.gathered, None
        solve = gathered.solver(at.objective.comm)
        return nothing_gathered(state) if solve is None else Solved(solve, state, self.name)
