"""Advice on the method to begin with, and the line to paste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from krylov_descent.checking.finding import Finding, bytes_in_words, split_remedy
from krylov_descent.checking.problem import Curvature, Names, Problem
from krylov_descent.flow.sketch import ROWS, Sketch, Sketcher, against_flow, sketch_bytes
from krylov_descent.objective.drop_in import irregular
from krylov_descent.samples.points import Points

_FEW = 20  # rows drawn for a test of the sketch
_MOSTLY = 0.5  # the largest share of them that may take a backward pass each


def choice(problem: Problem) -> Iterator[Finding]:
    """Yield the advised method, with the reason."""
    if problem.working is None:
        return
    if problem.draw.grows:
        problem.line["**DEEP"] = ""
        yield Finding(
            "method",
            "ok",
            "KSD, with one direction and the last step: sets that grow ask for many cheap steps, with a preconditioner "
            "that sees layers; the time above is that of K Krylov vectors and the Fisher diagonal",
            "KSD(model.parameters(), **DEEP).",
        )
        return
    numel, dtype = problem.parameters.numel, problem.parameters.dtype
    found = unfit(problem) or against_flow(numel, dtype, problem.room) or _sketch(problem)
    if isinstance(found, str):
        yield Finding("method", "ok", f"KSD: {found}")
        return
    slow = f"; {found.slow:.0%} of its rows take a backward pass each, which is slow: {found.why}" if found.slow else ""
    problem.flow = True
    yield Finding(
        "method",
        "ok",
        "GaussNewtonFlow: the loss is a mean of squares, every step sees all residuals, and "
        f"{bytes_in_words(sketch_bytes(ROWS, numel, dtype))} hold a sketch of them; on physics-informed "
        f"networks, its many cheap steps along the Gauss–Newton flow end lower; a trial (try_seconds) tells here{slow}",
        "GaussNewtonFlow(model.parameters()). Where the loss on other points may be far above this one, as at sharp "
        "fronts, let the optimizer draw them: step(closure, Points(draw, size)).",
    )


def unfit(problem: Problem) -> str | None:
    """Return a property of the problem that rules the flow out, or None."""
    if problem.sets is not None and not isinstance(problem.sets, Points):
        return "GaussNewtonFlow was measured where every step sees all samples, and not with sets"
    if problem.bypass > 0:
        return "GaussNewtonFlow does not see the part of the loss that does not pass through the outputs"
    if problem.working != "ggn":
        return f"GaussNewtonFlow draws rows of the Gauss–Newton matrix, and not of curvature={problem.working!r}"
    if not _least_squares(problem):
        return "GaussNewtonFlow wins on least squares, and this loss is not quadratic in the outputs"
    return None


def _least_squares(problem: Problem) -> bool:
    """Whether the loss is quadratic in the outputs: no third derivative, and a second one wherever there is a slope.

    Absolute values, and Huber's loss of outliers, have a slope without curvature.
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
    """Return the derivatives of a weighted sum of the terms by each of the outputs."""
    total = sum((term * irregular(term)).sum() for term in terms if term.requires_grad)
    if not isinstance(total, Tensor):
        return [torch.zeros_like(z) for z in outputs]
    return list(torch.autograd.grad(total, outputs, create_graph=True, allow_unused=True, materialize_grads=True))


def _sketch(problem: Problem) -> Sketch | str:
    """Return a sketch of a few rows, or the reason against the flow that it gives."""
    try:
        sketch = Sketcher(_FEW).draw(problem.objective, [problem.batch], (0,))
    except ValueError as error:
        return split_remedy(str(error))[0].rstrip(".")
    if sketch.slow <= _MOSTLY:
        return sketch
    return f"most rows of GaussNewtonFlow's sketch would take a backward pass each here, which is slow: {sketch.why}"


def flow_line(names: Names) -> str:
    """Return the line of GaussNewtonFlow."""
    return f"from krylov_descent import GaussNewtonFlow\n\noptimizer = GaussNewtonFlow({names.argument})"


def line(names: Names, krylov_dim: int, curvature: Curvature, problem: Problem | None) -> str:
    """Return the line to paste, from the arguments of ``check`` and its findings."""
    if problem is not None and problem.winner is not None:
        return problem.winner.line
    if problem is not None and problem.flow:
        return flow_line(names)
    arguments = [(names.argument, "")]
    deep = problem is not None and "**DEEP" in problem.line
    if krylov_dim != 20 and not deep:  # DEEP has its own
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
