"""The preconditioner D = diag F on A, floored (Algorithm 3, line 5), gathered in the pass that gives the gradient.

Letters: Σᵢ gᵢ∘gᵢ over samples i, D its mean [P], ε the floor. Per-sample gradients are never formed: dense and
convolutional layers have exact rules (layer_rules.py), all other parameters take the random-sign probe:
rows of ∂loss/∂outputs times independent signs sᵢ = ±1, pulled back, give Σᵢ sᵢ gᵢ, whose square has mean Σᵢ gᵢ∘gᵢ.

Deviations from the paper:
1. Where no rule is exact, the diagonal is that unbiased estimate instead of its exact value.
2. D = 1 everywhere if the whole diagonal is zero (the paper's floor would be zero too).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from krylov_descent.closure import Evaluation, require_outputs, require_rows, row_scaled
from krylov_descent.curvature.gauss_newton import require_influence
from krylov_descent.distributed import Comm
from krylov_descent.layer_rules import Unfolded, rule_for
from krylov_descent.objective import PROBE, Statistics
from krylov_descent.parameters import ParameterVector

Precondition = Callable[[Tensor], Tensor]
"""w [P_local] → D⁻¹w [P_local]."""


class PreconditionerStatistics(Statistics, Protocol):
    """Statistics that turn into D⁻¹ after the pass."""

    def solver(self, total_weight: float, comm: Comm) -> Precondition | None:
        """D⁻¹ from what was gathered, or None where the closure gave nothing to gather."""
        ...


class Preconditioner(Protocol):
    """A way to precondition: options that start the gathering of statistics on each pass over A."""

    def start(self, parameters: ParameterVector, *key: int) -> PreconditionerStatistics:
        """Begin a pass; ``key`` seeds whatever is random in it."""
        ...


@dataclass(frozen=True)
class Fisher:
    """The diagonal of the per-sample Fisher matrix: the paper's preconditioner.

    Args:
        floor: ε, D is floored at ε·max(D). 1e-2 was ahead of the paper's 1e-4 (section 4) on eight of nine seeds
            (docs/measurements.md); ``PAPER`` has the paper's.
        probes: sign patterns per micro-batch for parameters without an exact rule. One: more showed no gain in
            training.

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

    def start(self, parameters: ParameterVector, *key: int) -> FisherDiagonal:
        """Begin a pass over A."""
        return FisherDiagonal(parameters, self, key)


def _seed(key: Sequence[int]) -> int:
    digest = hashlib.blake2b(repr(tuple(key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, eq=False)
class _Call:
    """One recorded call of a module with a rule."""

    module: nn.Module
    a: Tensor
    output: Tensor


class FisherDiagonal:
    """Σᵢ gᵢ∘gᵢ over a pass: layer rules where they reproduce the gradient, the random-sign probe elsewhere."""

    def __init__(self, parameters: ParameterVector, options: Fisher, key: Sequence[int]) -> None:
        self._parameters = parameters
        self._options = options
        # Drawn on the CPU and keyed, so that a resumed run sees the same signs and no global state is consumed.
        self._generator = torch.Generator().manual_seed(_seed(key))
        self._index = {id(p): i for i, p in enumerate(parameters.params)}
        self._squares = parameters.zeros()
        self._views = parameters.views(self._squares)
        self._calls: list[_Call] = []
        self._samples = 0
        self._available = True
        self.by_rule: set[int] = set()
        self.by_probe: set[int] = set()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """KSD is given parameters, not a model: a global hook finds the modules that own them."""
        self._calls.clear()

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            owns = any(id(p) in self._index for p in module._parameters.values())
            if owns and rule_for(module) is not None and len(args) == 1 and isinstance(output, Tensor):
                self._calls.append(_Call(module, args[0], output))

        handle = register_module_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    def wanted(self, evaluation: Evaluation) -> Sequence[Tensor]:
        """∂loss/∂ of each recorded layer's output, and of the outputs."""
        if not evaluation.outputs:
            self._available = False
            return ()
        if self._samples == 0:
            require_outputs(evaluation, "The Fisher preconditioner")
        require_rows(evaluation)
        self._calls = [call for call in self._calls if call.output.requires_grad]
        return [*(call.output for call in self._calls), *evaluation.outputs]

    def collect(
        self, evaluation: Evaluation, gradient: Sequence[Tensor | None], wanted: Sequence[Tensor | None]
    ) -> float:
        """Add one micro-batch's Σᵢ gᵢ∘gᵢ."""
        calls, self._calls = self._calls, []  # they hold the graph
        if not self._available:
            return 0.0
        deltas, dL_dz = wanted[: len(calls)], wanted[len(calls) :]
        self._samples += evaluation.samples
        if evaluation.weight == 0:
            return 0.0
        require_influence(dL_dz)
        factor = evaluation.weight**2
        exact = self._apply_rules(calls, deltas, gradient, evaluation.samples, factor)
        rest = [i for i, g in enumerate(gradient) if g is not None and i not in exact]
        self.by_rule |= exact
        self.by_probe |= set(rest)
        if not rest:
            return 0.0
        self._apply_probe(evaluation, dL_dz, rest, factor)
        return PROBE * self._options.probes

    def solver(self, total_weight: float, comm: Comm) -> Precondition | None:
        """D⁻¹: gᵢ = N (w_b/W) Jᵢᵀδᵢ, so that D = (1/N) Σᵢ gᵢ² = (N/W²) Σ_b w_b² Σᵢ (Jᵢᵀδᵢ)²."""
        if not self._available:
            return None
        samples = float(comm.sum(torch.tensor(float(self._samples), dtype=torch.float64)))
        D = comm.reduce_scatter(self._squares).mul_(samples / total_weight**2)
        largest = float(comm.max(D.max()))
        inverse = D.clamp_(min=self._options.floor * largest).reciprocal_() if largest > 0 else torch.ones_like(D)
        return lambda w: w * inverse

    def _apply_rules(
        self,
        calls: Sequence[_Call],
        deltas: Sequence[Tensor | None],
        gradient: Sequence[Tensor | None],
        samples: int,
        factor: float,
    ) -> set[int]:
        """Add what rules give exactly; returns the indices of the parameters they served."""
        candidates: list[tuple[int, Callable[[], Tensor]]] = []
        errors, scales = [], []
        times = Counter(id(call.module) for call in calls)
        for call, delta in zip(calls, deltas, strict=True):
            if delta is None or times[id(call.module)] > 1:
                continue  # several calls: the square of a sum, which no single call knows
            layer = self._unfold(call, delta, samples)
            if layer is None:
                continue
            u = self._random(layer.delta.shape[-1])
            v = self._random(layer.a.shape[-1])
            for name, squares in (("weight", layer.weight_squares), ("bias", layer.bias_squares)):
                i = self._index.get(id(call.module._parameters.get(name)))
                g = None if i is None else gradient[i]
                if i is None or g is None:
                    continue
                g = g.to(u.dtype)
                error, scale = layer.discrepancy(g, u, v) if name == "weight" else layer.bias_discrepancy(g, u)
                candidates.append((i, squares))
                errors.append(error)
                scales.append(scale)
        if not candidates:
            return set()
        # Rounding reached 20 ε on deep autoencoders; near a minimum a wrong rule may be off by little more than 1e-3.
        tolerance = min(512 * torch.finfo(self._parameters.params[0].dtype).eps, 0.05)
        agrees = (torch.stack(errors).abs() <= tolerance * torch.stack(scales)).tolist()
        exact = set()
        for (i, squares), agree in zip(candidates, agrees, strict=True):
            if agree:
                self._views[i].add_(squares().view_as(self._views[i]), alpha=factor)
                exact.add(i)
        return exact

    def _unfold(self, call: _Call, delta: Tensor, n: int) -> Unfolded | None:
        rule = rule_for(call.module)
        assert rule is not None
        return rule(call.module, call.a.detach().to(self._parameters.dtype), delta.to(self._parameters.dtype), n)

    def _apply_probe(
        self, evaluation: Evaluation, dL_dz: Sequence[Tensor | None], rest: Sequence[int], factor: float
    ) -> None:
        params = [self._parameters.params[i] for i in rest]
        pairs = [(z, d) for z, d in zip(evaluation.outputs, dL_dz, strict=True) if d is not None]
        for _ in range(self._options.probes):
            shared = self._signs(evaluation.samples) if evaluation.aligned else None
            signed = [
                row_scaled(d, (self._signs(max(1, z.shape[0] if z.ndim else 1)) if shared is None else shared).to(d))
                for z, d in pairs
            ]
            probes = torch.autograd.grad([z for z, _ in pairs], params, signed, retain_graph=True, allow_unused=True)
            for i, probe in zip(rest, probes, strict=True):
                if probe is not None:
                    x = probe.to(self._parameters.dtype)
                    self._views[i].addcmul_(x, x, value=factor / self._options.probes)

    def _signs(self, n: int) -> Tensor:
        return torch.randint(0, 2, (n,), generator=self._generator).mul_(2).sub_(1)

    def _random(self, n: int) -> Tensor:
        return torch.randn(n, generator=self._generator, dtype=self._parameters.dtype).to(self._parameters.device)
