"""Advice: which basis to begin with, and the line to paste."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from krylov_descent.checking.finding import Finding, bytes_in_words, split_remedy
from krylov_descent.checking.problem import Curvature, Names, Problem
from krylov_descent.flow.sketch import ROWS, Sketcher, against_rational, sketch_bytes
from krylov_descent.optimizer import KSD

_FEW = 20  # rows that are drawn, to see whether they can be had
_MOSTLY = 0.5  # the share of them that may take a backward pass each


def choice(problem: Problem) -> Iterator[Finding]:
    """Advice, with the reason."""
    if problem.working is None or problem.room is None:
        return
    if problem.draw.grows:
        problem.line["**DEEP"] = ""
        yield Finding(
            "basis",
            "ok",
            "one direction and the last step: sets that grow ask for many cheap steps, with a preconditioner that sees "
            "layers; the time above is that of K Krylov vectors and the Fisher diagonal",
            "KSD(model.parameters(), **DEEP).",
        )
        return
    numel, dtype = problem.parameters.numel, problem.parameters.dtype
    why = _against(problem) or against_rational(numel, dtype, problem.room) or _unusable(problem)
    if why is not None:
        yield Finding("basis", "ok", f"krylov: {why}")
        return
    problem.line["basis"] = "'rational'"
    yield Finding(
        "basis",
        "ok",
        "rational: the closure differentiates the network, every step sees all residuals, and "
        f"{bytes_in_words(sketch_bytes(ROWS, numel, dtype))} hold a sketch of them; on physics-informed "
        "networks, its many cheap steps along the Gauss–Newton flow end lower",
        "KSD(basis='rational'). Where the loss on other points is far above this one, as at sharp fronts, draw new "
        "points every few steps, or take KSD(basis='krylov').",
    )


def _against(problem: Problem) -> str | None:
    """What of the problem as it was given speaks against the rational basis."""
    if problem.sets is not None:
        return "basis='rational' was measured where every step sees all samples, and not with sets"
    if problem.bypass > 0:
        return "basis='rational' does not see the part of the loss that does not pass through the outputs"
    assert problem.working is not None
    try:
        KSD(problem.parameters.params, basis="rational", curvature=problem.working)
    except ValueError as error:
        return _what_happened(error)
    if not _least_squares(problem):
        return "basis='rational' wins on least squares, and this loss is not quadratic in the outputs"
    if not _differentiates(problem):
        return "of fits without derivatives of the network, either basis wins some; try KSD(basis='rational') too"
    return None


class _Differentiations(TorchFunctionMode):
    """While active, counts calls of ``torch.autograd.grad``."""

    count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[Any], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.count += func is torch.autograd.grad
        return func(*args, **(kwargs or {}))


def _differentiates(problem: Problem) -> bool:
    """Whether the closure differentiates inside, as those of physics-informed networks do."""
    calls = _Differentiations()
    with calls:
        problem.objective.evaluate(problem.batch)
    return calls.count > 0


def _least_squares(problem: Problem) -> bool:
    """Whether the loss is quadratic in the outputs: no third derivative, and a second one wherever it has a slope.

    Absolute values, and Huber's loss of outliers, have a slope and no curvature.
    """
    evaluation = problem.objective.evaluate(problem.batch)
    try:
        slopes = _derivatives([evaluation.loss], evaluation.outputs)
        curvatures = _derivatives(slopes, evaluation.outputs)
        thirds = _derivatives(curvatures, evaluation.outputs)
    except RuntimeError:  # an operation that cannot be differentiated so often
        return False
    if any(bool(x.any()) for x in thirds) or not any(bool(h.any()) for h in curvatures):
        return False
    return not any(bool(((g != 0) & (h == 0)).any()) for g, h in zip(slopes, curvatures, strict=True))


def _derivatives(terms: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tensor]:
    """Of a weighted sum of these, by each of the outputs."""
    total = sum((term * _weights(term)).sum() for term in terms if term.requires_grad)
    if not isinstance(total, Tensor):
        return [torch.zeros_like(z) for z in outputs]
    return list(torch.autograd.grad(total, outputs, create_graph=True, allow_unused=True, materialize_grads=True))


def _weights(x: Tensor) -> Tensor:
    """Numbers in no pattern that a sum of derivatives could cancel in."""
    return torch.linspace(1, 2, max(1, x.numel()), dtype=x.dtype, device=x.device)[: x.numel()].view_as(x).sin()


def _unusable(problem: Problem) -> str | None:
    """What a few rows tell of all."""
    sketcher = Sketcher(_FEW)
    try:
        slow = sketcher.draw(problem.objective, [problem.batch], (0,)).slow
    except ValueError as error:
        return _what_happened(error)
    if slow <= _MOSTLY:
        return None
    return "most rows of the sketch of basis='rational' would take a backward pass each here, which is slow"


def _what_happened(error: ValueError) -> str:
    return split_remedy(str(error))[0].rstrip(".")


def line(names: Names, krylov_dim: int, curvature: Curvature, problem: Problem | None) -> str:
    """What to paste, from what was asked for and what was found."""
    arguments = [("params" if names.model is None else "model.parameters()", "")]
    rational = problem is not None and "basis" in problem.line
    deep = problem is not None and "**DEEP" in problem.line
    if krylov_dim != 20 and not rational and not deep:  # which have none, or their own
        arguments.append(("krylov_dim", str(krylov_dim)))
    chosen = curvature if problem is None or problem.working is None else problem.working
    if chosen != "ggn":
        arguments.append(("curvature", repr(chosen)))
    if problem is not None:
        arguments += problem.line.items()
    imports = "from krylov_descent import DEEP, KSD" if deep else "from krylov_descent import KSD"
    if any(name == "storage" for name, _ in arguments):
        imports = "import torch\n\nfrom krylov_descent import KSD, Storage"
    call = ", ".join(f"{name}={value}" if value else name for name, value in arguments)
    return f"{imports}\n\noptimizer = KSD({call})"
