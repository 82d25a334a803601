"""The report of a step, and the reason why its search ended."""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class StopReason(enum.Enum):
    """Says why the search of a step ended; ``reason.remedy`` says what to do about it, if anything.

    Example:
        >>> from krylov_descent import StopReason
        >>> StopReason.CONVERGED.remedy
        'Nothing to do: the minimum over the subspace was found.'
    """

    CONVERGED = "converged"
    NOISE = "noise"
    MAX_ITERATIONS = "max-iterations"
    MAX_EVALUATIONS = "max-evaluations"
    NON_FINITE = "non-finite"
    ZERO_GRADIENT = "zero-gradient"
    NEGATIVE_CURVATURE = "negative-curvature"
    MODEL = "model"
    CANDIDATE = "candidate"

    @property
    def remedy(self) -> str:
        """Return the meaning of the reason, and what to do about it."""
        return _REMEDY[self]


_REMEDY: Mapping[StopReason, str] = {
    StopReason.CONVERGED: "Nothing to do: the minimum over the subspace was found.",
    StopReason.NOISE: (
        "Any further decrease is below the rounding error of this dtype; "
        "if every step ends so, training is finished or needs float64."
    ),
    StopReason.MAX_ITERATIONS: (
        "The cap on inner iterations was reached; the best point seen was taken. "
        "Raise Search(iterations=...) if the loss still falls fast."
    ),
    StopReason.MAX_EVALUATIONS: (
        "The cap on evaluations was reached; the best point seen was taken. "
        "Raise Search(evaluations=...) if the loss still falls fast."
    ),
    StopReason.NON_FINITE: (
        "The loss, its gradient or a curvature product was not finite, and no better finite point was found; "
        "the parameters are as before the step. Look for logarithms, divisions or overflow in the closure."
    ),
    StopReason.ZERO_GRADIENT: (
        "The gradient is zero: a stationary point, or no parameter influences the loss. "
        "Perturb the parameters if it is a saddle."
    ),
    StopReason.NEGATIVE_CURVATURE: (
        "Conjugate gradients (Hessian-free optimization) met a direction of negative curvature and ended before it; "
        "if steps are short because of it, use curvature='ggn' or more damping."
    ),
    StopReason.MODEL: (
        "Nothing to do: the minimum of the quadratic model was taken without a search, because the loss fell there by "
        "enough of the predicted decrease (ModelSearch(agreement=...))."
    ),
    StopReason.CANDIDATE: (
        "Nothing to do: the best candidate of GaussNewtonFlow was taken, a step along its direction or a damped step; "
        "the loss is lower there."
    ),
}


def _on_loss(op: Callable[[float, float], T]) -> Callable[[Any, float | _Loss], T]:
    """Return the method of an operator, which takes reports for their losses."""

    def method(self: _Loss, other: float | _Loss) -> T:
        return op(self.loss, float(other)) if isinstance(other, (numbers.Real, _Loss)) else NotImplemented

    return method


class _Loss:
    """A result that is used like the number ``loss``; equality is that of all fields."""

    loss: float

    def item(self) -> float:
        """Return the loss, as ``item`` of a tensor does."""
        return self.loss

    def __float__(self) -> float:
        return self.loss

    def __format__(self, spec: str) -> str:
        return format(self.loss, spec) if spec else str(self)

    def __neg__(self) -> float:
        return -self.loss

    def __abs__(self) -> float:
        return abs(self.loss)

    __lt__, __le__ = _on_loss(lambda a, b: a < b), _on_loss(lambda a, b: a <= b)
    __gt__, __ge__ = _on_loss(lambda a, b: a > b), _on_loss(lambda a, b: a >= b)
    __add__ = __radd__ = _on_loss(lambda a, b: a + b)
    __mul__ = __rmul__ = _on_loss(lambda a, b: a * b)
    __sub__, __rsub__ = _on_loss(lambda a, b: a - b), _on_loss(lambda a, b: b - a)
    __truediv__, __rtruediv__ = _on_loss(lambda a, b: a / b), _on_loss(lambda a, b: b / a)


@dataclasses.dataclass(frozen=True)
class StepReport(_Loss):
    """Reports one step of an optimizer. Arithmetic and comparisons use its loss: ``total += report``.

    Attributes:
        iteration: the number of the step, from 0.
        loss: f on A before the step, weight decay included.
        search_loss_before: f on C before the step.
        search_loss_after: f on C after it.
        grad_norm: ‖g‖ on A.
        krylov_dim: the number of Krylov vectors, without the previous step; 0 for GaussNewtonFlow, which has none.
        ritz_values: the eigenvalues of H̄, ascending, which approximate those of the curvature. Empty without Krylov
            vectors.
        inner_iterations: the number of BFGS iterations.
        inner_evaluations: the number of evaluations of f on C, with or without its gradient.
        stop_reason: why the search ended; ``stop_reason.remedy`` says what to do.
        accepted: whether the previous step was kept; False means that it was undone first, as it raised f on A or ended
            where f or its gradient is not finite.
        seconds: the time by phase: "gradient", "basis", "search".
        sample_gradients: the cost of this step in gradients of one sample (forward ⅓, Gauss–Newton or Fisher product
            4/3, Hessian product 2, sign probe ⅔).
        orthogonality_error: max |V Vᵀ − I|.
        set_sizes: the number of samples in "A", "B" and "C".
        preconditioner: the name of D: "fisher", "none", or the name of a custom one.
        notes: further remarks, one sentence each.
        bytes_sent: the number of bytes that this rank sent to others; 0 in a single process.
        coefficients: the step's coefficients in the basis vectors: the Krylov vectors first, then the previous step,
            and with ``DEEP`` earlier steps once A holds all samples. Empty without a basis.
        details: further numbers of the method. Those of GaussNewtonFlow are "fraction", the part η of its direction
            that the step followed, 0 if no part lowered the loss; "damping", λ of the direction; "rows", those of the
            sketch; "removed", the share of the sampled residuals that the whole direction removes, to first order;
            "reach", its length relative to that of the parameters; "confirmed", the part of the fall that
            the sketch promises which all rows confirm. Those of ``Points`` are "draw", the number of the
            draw, and at every fifth step "held_out", the loss on other points.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> report = KSD([w]).step(lambda: (w.square().mean(), w))
        >>> report.item(), f"{report:.2e}", report < 7, (report + report) / 2
        (6.5, '6.50e+00', True, 6.5)
        >>> report.as_dict()["iteration"]
        0
    """

    iteration: int
    loss: float
    search_loss_before: float
    search_loss_after: float
    grad_norm: float
    krylov_dim: int
    ritz_values: tuple[float, ...]
    inner_iterations: int
    inner_evaluations: int
    stop_reason: StopReason
    accepted: bool
    seconds: Mapping[str, float]
    sample_gradients: float
    orthogonality_error: float
    set_sizes: Mapping[str, int]
    preconditioner: str
    notes: tuple[str, ...] = ()
    bytes_sent: int = 0
    coefficients: tuple[float, ...] = ()
    details: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        vectors = f" | K {self.krylov_dim}" if self.krylov_dim else ""
        kept = "" if self.accepted else " | previous step undone"
        notes = f" | {' '.join(self.notes)}" if self.notes else ""
        return (
            f"step {self.iteration} | loss {self.loss:.6g} | search {self.search_loss_before:.6g} → "
            f"{self.search_loss_after:.6g} | |g| {self.grad_norm:.3g}{vectors} | "
            f"{self.inner_evaluations} evaluations, {self.stop_reason.value} | "
            f"{sum(self.seconds.values()):.2f} s{kept}{notes}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain numbers, strings, lists and dicts, ready for JSON."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain["stop_reason"] = self.stop_reason.value
        plain["ritz_values"] = list(self.ritz_values)
        plain["coefficients"] = list(self.coefficients)
        plain["seconds"] = dict(self.seconds)
        plain["set_sizes"] = dict(self.set_sizes)
        plain["details"] = dict(self.details)
        plain["notes"] = list(self.notes)
        return plain


@dataclasses.dataclass(frozen=True)
class Settlement(_Loss):
    """Holds the result of ``settle``: the final loss on A, and whether the last step was kept.

    Example:
        >>> Settlement(loss=0.25, accepted=True)
        Settlement(loss=0.25, accepted=True)
    """

    loss: float
    accepted: bool
