"""D = diag F on A (Algorithm 3, line 5), floored, gathered in the pass that gives the gradient.

Letters: Σᵢ gᵢ∘gᵢ over samples i, D its mean [P], ε the floor. Per-sample gradients are never formed: dense and
convolutional layers have exact rules (layers/rules.py), all other parameters take the random-sign probe:
rows of ∂loss/∂outputs times independent signs sᵢ = ±1, pulled back, give Σᵢ sᵢ gᵢ, whose square has mean Σᵢ gᵢ∘gᵢ.

Deviations from the paper:
1. Where no rule is exact, the diagonal is that unbiased estimate instead of its exact value.
2. D = 1 everywhere if the whole diagonal is zero (the paper's floor would be zero too).
3. D is known up to a factor: it is scaled to a maximum of one, as its squares may leave the range of float32. The
   subspace does not depend on the factor.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from krylov_descent.curvature.gauss_newton import require_influence
from krylov_descent.distributed import Comm, added
from krylov_descent.distributed.sharded import beside, local_part, whole
from krylov_descent.layers.rules import Scratch
from krylov_descent.layers.verify import Call, Verdict, Witness, recorded_calls, right_and_wrong
from krylov_descent.objective.closure import Evaluation, require_attached, require_outputs, require_rows, row_scaled
from krylov_descent.objective.objective import PROBE, Objective, PassAgain
from krylov_descent.vectors.parameters import ParameterVector


def _seed(key: Sequence[int]) -> int:
    digest = hashlib.blake2b(repr(tuple(key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class FisherDiagonal:
    """Σᵢ gᵢ∘gᵢ over a pass: layer rules where they reproduce the gradient, the random-sign probe elsewhere.

    A rule that is trusted is served while the backward pass runs, by a hook that sees δ and lets it go. A rule that was
    never judged has its δ kept, and is judged after the backward pass.
    """

    def __init__(
        self,
        parameters: ParameterVector,
        floor: float,
        probes: int,
        key: Sequence[int],
        verdict: Verdict | None = None,
    ) -> None:
        self._parameters = parameters
        self._floor = floor
        self._probes = probes
        self._key = tuple(key)
        self._start_generators(0)
        self._index = {id(p): i for i, p in enumerate(parameters.params)}
        # Σ_b (w_b·unit)² Σᵢ (Jᵢᵀδᵢ)²
        self._squares = parameters.zeros()
        self._views = parameters.views(self._squares)
        self._scratch = Scratch()
        self._unit: float | None = None
        self._samples = 0
        self._available = True
        self._calls: list[Call] = []
        self._unjudged: list[Call] = []
        self._handles: list[RemovableHandle] = []
        self._served: set[int] = set()
        self._witnesses: list[Witness] = []
        self._batches = 0
        self._watching = False
        # Rounding reached 20 ε on deep autoencoders. Half precision rounds too much to tell a wrong rule.
        dtype = parameters.params[0].dtype
        self._tolerance = 512 * torch.finfo(dtype).eps if dtype == parameters.dtype else 0.0
        self.verdict = Verdict() if verdict is None else verdict

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Surround the closure: notes the calls of modules that may have a rule."""
        with recorded_calls(self._index) as calls:
            yield
        self._calls = calls

    def wanted(self, evaluation: Evaluation) -> Sequence[Tensor]:
        """∂loss/∂ of what has to be looked at after the backward pass; nothing if rules serve every parameter."""
        calls, self._calls = self._calls, []
        self._start_generators(evaluation.position)
        self._unjudged, self._witnesses, self._served = [], [], set()
        self._batches += 1
        # A closure changes its path between steps if at all, so few micro-batches of a pass need watching: 1, 4, 16, …
        self._watching = self._batches & (self._batches - 1) == 0 and self._batches.bit_length() % 2 == 1
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
        self._watch_backward(inner, lambda delta: self._set_unit(evaluation.weight, delta))
        served = set()
        for call in calls:
            if not call.fits(evaluation.samples):
                continue
            if not self.verdict.judged.issuperset(call.indices.values()):
                self._unjudged.append(call)
            elif trusted := self.verdict.trusted.intersection(call.indices.values()):
                served |= trusted
                self._watch_backward([call.output], functools.partial(self._serve, call, evaluation.weight))
        if len(served) == len(self._parameters.params):
            return ()
        return [*(call.output for call in self._unjudged), *evaluation.outputs]

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
        _, wrong = right_and_wrong(self._witnesses, G, None, self._tolerance)
        served, self._served, self._witnesses = self._served, set(), []
        if wrong:
            # The closure has taken another path than when the rule was judged, and the squares are added already.
            self.verdict.trusted -= wrong
            raise PassAgain
        if not wanted:
            return 0.0
        deltas, dL_dz = wanted[: len(unjudged)], wanted[len(unjudged) :]
        require_influence(dL_dz)
        for delta in dL_dz:
            if delta is not None:
                self._set_unit(evaluation.weight, delta)
        if self._unit is None:
            return 0.0  # every ∂loss/∂z was zero: nothing to add, and nothing to judge a rule by
        # Not counted: a resumed run judges again, and its costs are to be those of one that never stopped.
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
        for _ in range(self._probes if rest else 0):
            signs = self._all_signs(evaluation, self._generator)
            for i, x in self._pull_back(evaluation, dL_dz, signs, rest, scale).items():
                x = local_part(x, self._parameters.params[i]).to(self._parameters.dtype)
                self._views[i].addcmul_(x, x, value=1 / self._probes)
            pulls += 1
        return PROBE * pulls

    def _watch_backward(self, tensors: Sequence[Tensor], see: Callable[[Tensor], None]) -> None:
        """Show ∂loss/∂ of each tensor when the backward pass has it. Hooks run in the order in which they are set."""
        self._handles += [x.register_hook(see) for x in tensors]  # type: ignore[no-untyped-call]

    def _start_generators(self, position: int) -> None:
        """Of one micro-batch: keyed, so that resumed runs and other ranks draw the same, without global state."""
        self._generator = torch.Generator("cpu").manual_seed(_seed((*self._key, position)))
        # Checks draw from their own, as a resumed run repeats those that an uninterrupted one has behind it.
        self._check_generator = torch.Generator("cpu").manual_seed(_seed((*self._key, position, 1)))

    def _set_unit(self, weight: float, delta: Tensor) -> None:
        """1 / |w_b ∂loss/∂z|, roughly: keeps squares of tiny or huge losses within the dtype; one for a whole pass.

        A power of two, so that it leaves no trace in rounding: ranks have units of their own.
        """
        if self._unit is None and delta.numel():
            size = float(whole(delta.abs().max())) * weight
            if 0 < size < math.inf:
                self._unit = math.ldexp(1.0, -math.frexp(size)[1])

    def _serve(self, call: Call, weight: float, delta: Tensor) -> None:
        """Add the squares of a call's trusted parameters, and note what the gradient must confirm."""
        self._set_unit(weight, delta)
        trusted = {k: i for k, i in call.indices.items() if i in self.verdict.trusted}
        if self._unit is None or not trusted:
            return
        layer = call.layer(delta, self._parameters.dtype, weight * self._unit)
        into = {is_weight: self._views[i] for is_weight, i in trusted.items()}
        layer.add_squares(into.get(True), into.get(False), self._scratch)
        self._served |= set(trusted.values())
        if self._watching:
            self._witnesses.append(Witness(layer, trusted, self._random))

    def _judge(
        self,
        evaluation: Evaluation,
        dL_dz: Sequence[Tensor | None],
        calls: Sequence[Call],
        deltas: Sequence[Tensor | None],
        G: dict[int, Tensor],
    ) -> None:
        """Put rules to the test.

        They must reproduce the gradient, and a signed sum Σᵢ sᵢ gᵢ: it tells whether rows are attributed to the right
        samples, which the gradient cannot.
        """
        witnesses = [
            Witness(call.layer(delta, self._parameters.dtype, 1.0), call.indices, self._random)
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
        right, wrong = right_and_wrong(witnesses, pulled, s.to(self._views[0]), self._tolerance)
        confirmed, refuted = right_and_wrong(witnesses, G, None, self._tolerance)
        self.verdict.trusted |= right & confirmed
        self.verdict.judged |= (right & confirmed) | wrong | refuted

    @property
    def available(self) -> bool:
        """Whether the closure gave outputs to gather from."""
        return self._available

    def diagonal(self, total_weight: float, comm: Comm) -> Tensor:
        """D before flooring: gᵢ = N (w_b/W) Jᵢᵀδᵢ, so that (1/N) Σᵢ gᵢ² = (N/W²) Σ_b w_b² Σᵢ (Jᵢᵀδᵢ)²."""
        squares, unit = self._summed(comm)
        return squares * (added(comm, self._samples) / (total_weight * unit) ** 2)

    def solver(self, comm: Comm) -> Callable[[Tensor], Tensor] | None:
        """D⁻¹ up to a factor, which no Krylov subspace depends on: D is scaled to a maximum of one."""
        # A rank without samples has not seen what the closure returns.
        if float(comm.max(torch.tensor(float(not self._available), device="cpu"))):
            return None
        squares, _ = self._summed(comm)
        largest = float(comm.max(squares.max() if len(squares) else squares.new_zeros(())))
        if not 0 < largest < float("inf"):
            return lambda w: w
        inverse = squares.div_(largest).clamp_(min=self._floor).reciprocal_()
        return lambda w: w * inverse

    def _summed(self, comm: Comm) -> tuple[Tensor, float]:
        """The squares over all ranks, this rank's part [P_local], and the unit that they are in."""
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
        """Σᵢ sᵢ Jᵢᵀδᵢ, scaled, for the parameters of these indices."""
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
        """Signs for the rows of each output: the same for all of a sample's rows."""
        if evaluation.aligned:
            return [self._signs(evaluation.samples, generator)] * len(evaluation.outputs)
        return [self._signs(z.shape[0] if z.ndim else 1, generator) for z in evaluation.outputs]

    def _signs(self, n: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, 2, (n,), generator=generator, device="cpu").mul_(2).sub_(1)

    def _random(self, n: int) -> Tensor:
        x = torch.randn(n, generator=self._check_generator, dtype=self._parameters.dtype, device="cpu")
        return x.to(self._parameters.device)


@dataclass(frozen=True)
class Fisher:
    """The diagonal of the per-sample Fisher matrix: the paper's preconditioner.

    Args:
        floor: ε, D is floored at ε·max(D). 1e-2 was ahead of the paper's 1e-4 (section 4) on eight of nine seeds
            (docs/measurements.md); ``PAPER`` has the paper's.
        probes: sign patterns per micro-batch for parameters without an exact rule; one gives an unbiased estimate, and
            each costs two thirds of a gradient.

    Example:
        >>> from krylov_descent import KSD, Fisher
        >>> optimizer = KSD([torch.nn.Parameter(torch.ones(3))], preconditioner=Fisher(floor=1e-3))
    """

    floor: float = 1e-2
    probes: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1:
            raise ValueError(f"Fisher(floor={self.floor}): must be in (0, 1]; the paper's is 1e-4.")
        if self.probes < 1:
            raise ValueError(f"Fisher(probes={self.probes}): must be at least 1.")

    def prepare(self) -> FisherPreconditioner:
        """For one optimizer: what works by these options, and remembers which rules it found right."""
        return FisherPreconditioner(self)


class FisherPreconditioner:
    """The diagonal of the Fisher matrix, for one optimizer."""

    name = "fisher"

    def __init__(self, options: Fisher) -> None:
        self._options = options
        self._judged: tuple[object, ...] = ()
        self._verdict = Verdict()

    def start(self, objective: Objective, *key: int) -> FisherDiagonal:
        """Begin a pass over A; another closure or other parameters are judged anew."""
        judged = (objective.identity, *map(id, objective.parameters.params))
        if judged != self._judged:
            self._judged, self._verdict = judged, Verdict()
        options = self._options
        return FisherDiagonal(objective.parameters, options.floor, options.probes, key, self._verdict)

    def __getstate__(self) -> dict[str, Any]:
        # A copy is of other parameters.
        return {"_options": self._options, "_judged": (), "_verdict": Verdict()}
