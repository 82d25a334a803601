"""D = diag F on A (Algorithm 3, line 5), floored, gathered in the pass that gives the gradient.

Letters: Σᵢ gᵢ∘gᵢ over samples i, D its mean [P], ε the floor. Per-sample gradients are never formed: dense and
convolutional layers have exact rules (layer_rules.py), all other parameters take the random-sign probe:
rows of ∂loss/∂outputs times independent signs sᵢ = ±1, pulled back, give Σᵢ sᵢ gᵢ, whose square has mean Σᵢ gᵢ∘gᵢ.

Deviations from the paper:
1. Where no rule is exact, the diagonal is that unbiased estimate instead of its exact value.
2. D = 1 everywhere if the whole diagonal is zero (the paper's floor would be zero too).
3. D is known up to a factor: it is scaled to a maximum of one, as its squares may leave the range of float32. The
   subspace does not depend on the factor.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from krylov_descent.closure import Evaluation, require_outputs, require_rows, row_scaled
from krylov_descent.curvature.gauss_newton import require_influence
from krylov_descent.distributed import Comm
from krylov_descent.layer_rules import Layer, bias_squares, discrepancy, has_rule, layer_of, weight_squares
from krylov_descent.objective import PROBE
from krylov_descent.parameters import ParameterVector


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

    def __init__(self, parameters: ParameterVector, floor: float, probes: int, key: Sequence[int]) -> None:
        self._parameters = parameters
        self._floor = floor
        self._probes = probes
        # Drawn on the CPU and keyed, so that a resumed run sees the same signs and no global state is consumed.
        self._generator = torch.Generator("cpu").manual_seed(_seed(key))
        self._index = {id(p): i for i, p in enumerate(parameters.params)}
        self._squares = parameters.zeros()  # Σ_b (w_b·unit)² Σᵢ (Jᵢᵀδᵢ)²
        self._views = parameters.views(self._squares)
        self._unit: float | None = None
        self._calls: list[_Call] = []
        self._samples = 0
        self._available = True
        # Rounding reached 20 ε on deep autoencoders. Half precision rounds too much to tell a wrong rule.
        dtype = parameters.params[0].dtype
        self._tolerance = 512 * torch.finfo(dtype).eps if dtype == parameters.dtype else 0.0
        self.by_rule: set[int] | None = None
        """The parameters that rules serve; None before the first micro-batch has told."""

    @contextmanager
    def watch(self) -> Iterator[None]:
        """KSD is given parameters, not a model: a global hook finds the modules that own them."""
        self._calls = []

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            owns = any(id(p) in self._index for p in module._parameters.values())
            if owns and has_rule(module) and all(isinstance(x, Tensor) for x in (*args, output)) and len(args) == 1:
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
        self._samples += evaluation.samples
        deltas, dL_dz = wanted[: len(calls)], wanted[len(calls) :]
        if evaluation.weight == 0:
            return 0.0
        require_influence(dL_dz)
        scale = self._scale(evaluation.weight, dL_dz)
        if scale is None:
            return 0.0
        layers = self._layers(calls, deltas, evaluation.samples, scale)
        used = [i for i, g in enumerate(gradient) if g is not None]
        probes = pulls = 0
        if self.by_rule is None:
            # Once a pass, rules must also reproduce a signed sum: it tells whether rows are attributed to the right
            # samples, which the gradient cannot. The pull-back serves as the first probe.
            signs = self._all_signs(evaluation)
            pulled = self._pull_back(evaluation, dL_dz, signs, used, scale)
            probes = pulls = 1
            check_signs, check = signs, pulled
            if all(bool((s == s[0]).all()) for s in signs):  # too few samples to differ by chance
                check_signs = [(torch.arange(len(s), device="cpu") % 2).mul_(-2).add_(1) for s in signs]
                check = self._pull_back(evaluation, dL_dz, check_signs, used, scale)
                pulls += 1
            s = check_signs[0] if evaluation.aligned else torch.cat(check_signs)
            self.by_rule = self._reproduced(layers, check, s)
            exact = self.by_rule
            self._add_probe({i: x for i, x in pulled.items() if i not in exact})
        else:
            kept = {i: layer for i, layer in layers.items() if i in self.by_rule}
            scaled = {i: g * scale for i in kept if (g := gradient[i]) is not None}
            exact = self._reproduced(kept, scaled, torch.ones(evaluation.samples, device="cpu"))
        rest = [i for i in used if i not in exact]
        for i in exact:
            layer, is_weight = layers[i]
            squares = weight_squares(layer) if is_weight else bias_squares(layer)
            self._views[i].add_(squares.view_as(self._views[i]))
        while rest and probes < self._probes:
            self._add_probe(self._pull_back(evaluation, dL_dz, self._all_signs(evaluation), rest, scale))
            probes += 1
            pulls += 1
        return PROBE * pulls

    def diagonal(self, total_weight: float, comm: Comm) -> Tensor:
        """D before flooring: gᵢ = N (w_b/W) Jᵢᵀδᵢ, so that (1/N) Σᵢ gᵢ² = (N/W²) Σ_b w_b² Σᵢ (Jᵢᵀδᵢ)²."""
        samples = float(comm.sum(torch.tensor(float(self._samples), dtype=torch.float64, device="cpu")))
        return comm.reduce_scatter(self._squares) * (samples / (total_weight * (self._unit or 1.0)) ** 2)

    def solver(self, comm: Comm) -> Callable[[Tensor], Tensor] | None:
        """D⁻¹ up to a factor, which no Krylov subspace depends on: D is scaled to a maximum of one."""
        if not self._available:
            return None
        squares = comm.reduce_scatter(self._squares)
        largest = float(comm.max(squares.max()))
        if not 0 < largest < float("inf"):
            return lambda w: w
        inverse = squares.div_(largest).clamp_(min=self._floor).reciprocal_()
        return lambda w: w * inverse

    def _scale(self, weight: float, dL_dz: Sequence[Tensor | None]) -> float | None:
        """w_b in a unit that keeps squares of tiny or huge losses within the dtype; the same for a whole pass.

        None while every ∂loss/∂z was zero (nothing to add, and nothing to check a rule by) or not finite.
        """
        if self._unit is None:
            size = max((float(d.abs().max()) for d in dL_dz if d is not None and d.numel()), default=0.0)
            if not 0 < size < float("inf"):
                return None
            self._unit = 1 / (weight * size)
        return weight * self._unit

    def _layers(
        self, calls: Sequence[_Call], deltas: Sequence[Tensor | None], samples: int, scale: float
    ) -> dict[int, tuple[Layer, bool]]:
        """Index of a parameter → the layer that may serve it, and whether it is the weight."""
        times = Counter(id(call.module) for call in calls)
        layers: dict[int, tuple[Layer, bool]] = {}
        for call, delta in zip(calls, deltas, strict=True):
            if delta is None or times[id(call.module)] > 1:
                continue  # several calls: the square of a sum, which no single call knows
            dtype = self._parameters.dtype
            layer = layer_of(call.module, call.a.detach().to(dtype), delta.to(dtype) * scale, samples)
            for name in ("weight", "bias"):
                i = self._index.get(id(call.module._parameters.get(name)))
                if layer is not None and i is not None:
                    layers[i] = (layer, name == "weight")
        return layers

    def _reproduced(self, layers: dict[int, tuple[Layer, bool]], G: dict[int, Tensor], s: Tensor) -> set[int]:
        """The parameters whose rule gives uᵀGv for random u and v."""
        s = s.to(self._squares)
        checked, errors, scales = [], [], []
        for i, (layer, is_weight) in layers.items():
            u = self._random(layer.delta.shape[2])
            v = self._random(layer.width) if is_weight else None
            if i in G:
                error, scale = discrepancy(layer, G[i].to(self._parameters.dtype), s, u, v)
                checked.append(i)
                errors.append(error)
                scales.append(scale)
        if not checked:
            return set()
        agrees = (torch.stack(errors).abs() <= self._tolerance * torch.stack(scales)).tolist()
        return {i for i, agree in zip(checked, agrees, strict=True) if agree}

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
            (z, row_scaled(d, s.to(d)).mul_(scale))
            for z, d, s in zip(evaluation.outputs, dL_dz, signs, strict=True)
            if d is not None
        ]
        params = [self._parameters.params[i] for i in indices]
        pulled = torch.autograd.grad(
            [z for z, _ in zs], params, [d for _, d in zs], retain_graph=True, allow_unused=True
        )
        return {i: x for i, x in zip(indices, pulled, strict=True) if x is not None}

    def _add_probe(self, pulled: dict[int, Tensor]) -> None:
        for i, x in pulled.items():
            x = x.to(self._parameters.dtype)
            self._views[i].addcmul_(x, x, value=1 / self._probes)

    def _all_signs(self, evaluation: Evaluation) -> list[Tensor]:
        """Signs for the rows of each output: the same for all of a sample's rows."""
        if evaluation.aligned:
            return [self._signs(evaluation.samples)] * len(evaluation.outputs)
        return [self._signs(z.shape[0] if z.ndim else 1) for z in evaluation.outputs]

    def _signs(self, n: int) -> Tensor:
        return torch.randint(0, 2, (n,), generator=self._generator, device="cpu").mul_(2).sub_(1)

    def _random(self, n: int) -> Tensor:
        x = torch.randn(n, generator=self._generator, dtype=self._parameters.dtype, device="cpu")
        return x.to(self._parameters.device)
