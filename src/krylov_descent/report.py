"""What a step tells its caller: why the search ended, and one frozen record of the whole step."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any


class StopReason(enum.Enum):
    """Why the search over the subspace ended; ``reason.remedy`` says what, if anything, to do about it.

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
    GATHERING = "gathering"
    MODEL = "model"
    CANDIDATE = "candidate"

    @property
    def remedy(self) -> str:
        """One sentence: what this outcome means for the next step."""
        return _REMEDY[self]


_REMEDY: Mapping[StopReason, str] = {
    StopReason.CONVERGED: "Nothing to do: the minimum over the subspace was found.",
    StopReason.NOISE: (
        "No further decrease can be told from rounding in this dtype; "
        "if every step ends so, training is finished or needs float64."
    ),
    StopReason.MAX_ITERATIONS: (
        "The cap on inner iterations was met; the best point seen was taken. "
        "Raise Search(iterations=...) if the loss still falls fast."
    ),
    StopReason.MAX_EVALUATIONS: (
        "The cap on evaluations was met; the best point seen was taken. "
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
    StopReason.GATHERING: (
        "No piece of the direction of basis='rational' lowers the loss yet: the parameters stay, and the next step "
        "adds other rows to it. Steps that end so are usual late in training."
    ),
    StopReason.MODEL: (
        "Nothing to do: the minimum of the quadratic model was taken without a search, as the loss fell there by "
        "enough of what the model promised (Search(model=...))."
    ),
    StopReason.CANDIDATE: (
        "Nothing to do: the best of the candidates of basis='rational' was taken, a piece of its direction or a damped "
        "step; the loss is lower there."
    ),
}


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One step of KSD.

    Attributes:
        iteration: the number of the step, from 0.
        loss: f on A before the step, weight decay included.
        search_loss_before: f on C before the step.
        search_loss_after: f on C after it.
        grad_norm: ‖g‖ on A.
        krylov_dim: Krylov vectors kept; the previous direction is not counted. With basis="rational", all vectors.
        ritz_values: eigenvalues of H̄, ascending: a picture of the curvature seen from the gradient.
        inner_iterations: BFGS iterations.
        inner_evaluations: evaluations of f and its gradient on C.
        stop_reason: why the search ended; ``stop_reason.remedy`` says what to do.
        accepted: whether the previous step was kept; False means that it raised f on A and was undone first.
        seconds: time by phase: "gradient", "basis", "search".
        sample_gradients: cost of this step in gradients of one sample (forward ⅓, Gauss–Newton or Fisher product
            4/3, Hessian product 2, sign probe ⅔).
        orthogonality_error: max |V Vᵀ − I|.
        set_sizes: samples in "A", "B" and "C".
        preconditioner: what served as D: "fisher", "none", or the name of a custom one.
        notes: what else there is to know, one sentence each.
        bytes_sent: what this rank sent to others; 0 in a single process.
        coefficients: of the step in the basis vectors: the Krylov vectors first, then the previous step, and
            with ``DEEP`` those before it, once A has all samples.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD
        >>> w = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
        >>> report = KSD([w]).step(lambda: (w.square().mean(), w))
        >>> float(report)
        6.5
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

    def __float__(self) -> float:
        return self.loss

    def __str__(self) -> str:
        kept = "" if self.accepted else " | previous step undone"
        notes = f" | {' '.join(self.notes)}" if self.notes else ""
        return (
            f"step {self.iteration} | loss {self.loss:.6g} | search {self.search_loss_before:.6g} → "
            f"{self.search_loss_after:.6g} | |g| {self.grad_norm:.3g} | K {self.krylov_dim} | "
            f"{self.inner_evaluations} evaluations, {self.stop_reason.value} | "
            f"{sum(self.seconds.values()):.2f} s{kept}{notes}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, ready for JSON."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain["stop_reason"] = self.stop_reason.value
        plain["ritz_values"] = list(self.ritz_values)
        plain["coefficients"] = list(self.coefficients)
        plain["seconds"] = dict(self.seconds)
        plain["set_sizes"] = dict(self.set_sizes)
        plain["notes"] = list(self.notes)
        return plain


@dataclasses.dataclass(frozen=True)
class Settlement:
    """What ``KSD.settle`` found: the loss on A that training ends with, and whether the last step was kept.

    Example:
        >>> Settlement(loss=0.25, accepted=True)
        Settlement(loss=0.25, accepted=True)
    """

    loss: float
    accepted: bool

    def __float__(self) -> float:
        return self.loss
