"""Whether the curvature product is right: compared with differences of first derivatives.

Letters: z outputs, J = ∂z/∂θ, δ = ∂loss/∂z, g = ∂loss/∂θ, v a direction, h a small step along it.

With the loss a function of z alone, δ(θ + hv) − δ(θ − hv) ≈ 2h H_L Jv, so that Jᵀ of it is 2h Gv: the Gauss–Newton
product without a second derivative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from krylov_descent.checking.doubled import doubled
from krylov_descent.checking.problem import Curvature, Problem
from krylov_descent.closure import Evaluation, row_dots, row_scaled

_TOLERANCE = 1e-2  # what is looked for is far larger, and products of float32 are good to 1e-4 at worst
_STEPS = (1e-4, 1e-5, 1e-7, 1e-8, 1e-9)
_TOLERANCE_IN_SINGLE = 0.1  # of differences that were taken in float32
_STEPS_IN_SINGLE = (3e-2, 1e-2, 3e-3, 1e-3)


@dataclass(frozen=True)
class Comparison:
    """A product and its reference.

    Attributes:
        error: ‖Hv − reference‖ relative to the larger of the two.
        spread: of the reference: how far those of two step lengths are apart. Where kinks (ReLU, max) are crossed,
            each length gives something else, and none tells of the product.
        tolerance: what rounding explains.
        double: whether the reference was taken in float64.
    """

    error: float
    spread: float
    tolerance: float
    double: bool

    @property
    def agrees(self) -> bool:
        """Whether they are the same, to rounding."""
        return self.error <= self.tolerance

    @property
    def conclusive(self) -> bool:
        """Whether the reference is known well enough to blame the product."""
        return self.spread <= 0.3 * self.error


def compare(problem: Problem, curvature: Curvature) -> Comparison:
    """The product of a curvature on the small batch, as a step takes it, against its reference."""
    v = problem.direction()
    _evaluate(problem)  # settles which samples
    product = problem.product(curvature, v).double()
    double = problem.parameters.params[0].dtype == torch.float64
    if not double:
        natural = _evaluate(problem)
        try:
            with doubled(problem.names.parameters, problem.names.model):
                here = _evaluate(problem)
                forward_error = _distance(natural, here)
                if forward_error < 0.1:
                    error, spread = _errors(problem, curvature, v, product, here, _STEPS)
                    return Comparison(error, spread, max(_TOLERANCE, 30 * forward_error), True)
        except Exception:  # the closure insists on its dtype
            pass
    here = _evaluate(problem)
    steps = _STEPS if double else _STEPS_IN_SINGLE
    error, spread = _errors(problem, curvature, v, product, here, steps)
    return Comparison(error, spread, _TOLERANCE if double else _TOLERANCE_IN_SINGLE, double)


def _errors(
    problem: Problem, curvature: Curvature, v: Tensor, product: Tensor, here: Evaluation, steps: Sequence[float]
) -> tuple[float, float]:
    """Error and spread for the best of some step lengths: too long a step bends, too short a one rounds."""
    params = problem.parameters.params
    g = float(_flat(_or_zeros(_grad(here.loss, params), params)).norm())
    best, spread = math.inf, math.inf
    last: Tensor | None = None
    for h in steps:
        reference = _quotient(problem, curvature, v.double(), here, h)
        scale = max(float(product.norm()), float(reference.norm()))
        if scale <= 1e3 * torch.finfo(here.loss.dtype).eps / h * g:
            # Nothing but rounding. No curvature at all, if that is so for the longest step.
            return (0.0, 0.0) if last is None else (best, spread)
        best = min(best, float((product - reference).norm()) / scale)
        if last is not None:
            spread = min(spread, float((last - reference).norm()) / scale)
        if best <= _TOLERANCE:
            break
        last = reference
    return best, spread


def _quotient(problem: Problem, curvature: Curvature, v: Tensor, here: Evaluation, h: float) -> Tensor:
    params = problem.parameters.params
    with _moved(problem, v, h) as forwards:
        there = _derivatives(problem, curvature)
    with _moved(problem, v, -h) as backwards:
        behind = _derivatives(problem, curvature)
    step = forwards - backwards  # as it was rounded
    difference = [(x.double() - y.double()) / step for x, y in zip(there, behind, strict=True)]
    if curvature == "hessian":
        return _flat(difference)
    if curvature == "fisher":
        delta = _or_zeros(_grad(here.loss, here.outputs), here.outputs)
        s = [row_dots(d.double(), Jv) for d, Jv in zip(delta, difference, strict=True)]
        if here.aligned:
            s = [torch.stack(s).sum(0)] * len(s)
        difference = [row_scaled(d.double(), x) * here.samples for d, x in zip(delta, s, strict=True)]
    pulled = torch.autograd.grad(
        here.outputs,
        params,
        [x.to(z.dtype) for x, z in zip(difference, here.outputs, strict=True)],
        retain_graph=True,
        allow_unused=True,
    )
    return _flat(_or_zeros(pulled, params))


def _derivatives(problem: Problem, curvature: Curvature) -> Sequence[Tensor]:
    """What a difference is taken of: g for the Hessian, δ for Gauss–Newton, z for Fisher."""
    evaluation = _evaluate(problem)
    if curvature == "fisher":
        return [z.detach() for z in evaluation.outputs]
    inputs = problem.parameters.params if curvature == "hessian" else evaluation.outputs
    return _or_zeros(_grad(evaluation.loss, inputs), inputs)


def _grad(loss: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)


def _evaluate(problem: Problem) -> Evaluation:
    # The fused kernels of attention round otherwise.
    with sdpa_kernel(SDPBackend.MATH):
        return problem.evaluate_few()


@contextmanager
def _moved(problem: Problem, v: Tensor, h: float) -> Iterator[float]:
    """θ + hv inside; gives the step as the parameters could hold it, along v."""
    params = problem.parameters.params
    before = [p.detach().clone() for p in params]
    try:
        with torch.no_grad():
            for p, along in zip(params, problem.parameters.views(v), strict=True):
                p.data.copy_(p.double() + h * along)  # .data: graphs that hold p stay valid, as it comes back
            moved = _flat([p.double() - x.double() for p, x in zip(params, before, strict=True)])
        yield float(moved @ v) / float(v @ v)
    finally:
        with torch.no_grad():
            for p, x in zip(params, before, strict=True):
                p.data.copy_(x)


def _distance(x: Evaluation, y: Evaluation) -> float:
    """How far two evaluations are apart, relative to their size."""
    pairs = [(x.loss, y.loss), *zip(x.outputs, y.outputs, strict=True)]
    errors = [
        float((a.detach().double() - b.detach().double()).norm()) / (float(b.detach().double().norm()) or 1.0)
        for a, b in pairs
    ]
    worst = max(errors)
    return worst if math.isfinite(worst) else math.inf


def _or_zeros(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(y) if x is None else x.detach() for x, y in zip(tensors, like, strict=True)]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.detach().double().reshape(-1) for x in tensors])
