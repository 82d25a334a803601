"""One step of the sketched Gauss–Newton flow.

Letters: J [m, P] sketch, ρ [m] with Jᵀρ its part of the gradient, g [P] gradient on A, λ damping, φ [P] the flow's
direction, μ momentum, η the fraction of φ that a step follows, c weight decay. Vectors are this rank's parts [P_local];
``comm.sum`` completes inner products.

A step samples Jacobian rows on B and tries these candidates in turn, judged by the loss on C:

- Flow steps: a fraction ηφ of φ = argmin ‖Jφ + ρ‖² + λ‖φ − μφ_prev‖², the Gauss–Newton direction of the rows of about
  the last 1/(1 − μ) steps, corrected so that residuals shrink straight (flow/straight_steps.py). All residuals then
  shrink alike, whatever their curvature; steps of greatest decrease would fit the stiff residuals first and end in a
  valley.
- Damped (Levenberg–Marquardt) steps −(JᵀJ + λ)⁻¹g for a grid of λ, if the flow fails: they use the whole gradient, so
  that enough damping always descends. If none of them does, the next step begins with the largest λ.

If the flow fails often, its rows say too little of the others: m grows.

λ of the flow follows η and the share of ρ that φ removes: it grows while only short steps lower the loss, and shrinks
if long ones do or if residuals are left behind. It also grows while φ is far longer than θ. η is at most a half; with a
sketch of all rows it may be larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from krylov_descent.flow.factored import (
    LEAST_CONFIRMED,
    Factored,
    damped_step,
    flow_direction,
    new_damping,
    removed,
    within_reach,
)
from krylov_descent.flow.row_sampling import TappedGraph
from krylov_descent.flow.sketch import Sketcher, finite_rows, sketch_bytes
from krylov_descent.flow.straight_steps import StraightSteps
from krylov_descent.krylov.search import LineEvaluator
from krylov_descent.objective.objective import Objective
from krylov_descent.report import StepReport, StopReason
from krylov_descent.stepping.acceptance import Acceptance, MethodState, Sampler, arrive
from krylov_descent.stepping.gradient_pass import GradientPass
from krylov_descent.stepping.search_result import SearchResult, at_rest, take
from krylov_descent.stepping.step_log import StepLog
from krylov_descent.vectors.products import length, lengths

_FIRST, _LEAST, _MOST = 1e-6, 1e-18, 1e-2  # λ of the flow, relative to the trace of K: at first, and its bounds
_SHORTEST = 2.0**-14
_LONGEST = 0.5  # bound of η
_LONGEST_WHOLE, _LEAST_WHOLE = 2.0, 1e-14  # with all rows in the sketch: bounds of η and λ
_ROUNDING = 100.0  # relative rounding of J, in units of eps: λ is at least its square
_LENGTHS = 5  # most halvings and doublings of the last fraction that are tried
_LATELY, _OFTEN = 0.1, 0.25  # weight of a step in the rate of failures of the flow, and the rate above which m grows
_GROWTH, _MOST_ROWS = 1.5, 4  # factors of m: at a time, and in all
_ROOM = 2**30  # bytes that a sketch may grow to without a budget; a constant, so that runs do not depend on free memory
_DAMPED, _RATIO = 9, 3.0  # damped steps: the number of λ, and the factor between them
_FIRST_DAMPED, _LEAST_DAMPED, _MOST_DAMPED = 1e-3, 1e-12, 1e2


@dataclass(frozen=True)
class FlowSettings:
    """The settings of a run, constant from step to step."""

    rows: int
    momentum: float
    memory_budget: int | None
    acceptance: Acceptance


@dataclass(frozen=True)
class Adaptation:
    """The numbers that the flow adapts from step to step.

    Attributes:
        flow_damping: λ of the flow.
        step_fraction: η, the last fraction of φ.
        momentum_scale: 1/η − 1, which times the last step is the rest of its direction; 0 if that was no flow step.
        lm_damping: λ of the last damped step.
        failure_rate: the running mean of steps that failed, or of which all rows confirmed little, since m last grew.
        rows: m, if it has grown; otherwise 0.
    """

    flow_damping: float
    step_fraction: float
    momentum_scale: float
    lm_damping: float
    failure_rate: float = 0.0
    rows: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class FlowState(MethodState):
    """The state between two steps: all that a resumed run needs.

    Attributes:
        adaptation: the adapted numbers; None before the first step.
    """

    adaptation: Adaptation | None = None


def flow_step(
    objective: Objective,
    samples: Sampler,
    settings: FlowSettings,
    state: FlowState,
    theta: Callable[[], Tensor] | None = None,
) -> tuple[StepReport, FlowState]:
    """Take one step; if it raises, θ is undefined and the caller must restore it.

    Args:
        objective: f and its derivatives on micro-batches.
        samples: draws A (gradient), B (Jacobian rows) and C (the loss that judges candidates).
        settings: the settings of the run.
        state: the state after the last step.
        theta: returns θ [P] where the step begins, if the caller has it.

    Raises:
        ValueError: the loss has no Jacobian rows, or is not finite and there is no earlier point to return to.
    """
    with StepLog(objective.comm) as log:
        at = arrive(objective, samples, state, settings.acceptance, lambda objective, _: TappedGraph(objective), theta)
        log.lap("gradient")

        watch = samples.watch(at)
        watch.see_gradient(at.slope)
        found, adaptation = at_rest(at, None), state.adaptation
        details: dict[str, float] = {}
        at.keeps_gradient = True
        if at.grad_norm > 0:
            flow = Flow(at, settings, state)
            log.lap("basis")

            found, adaptation = flow.descend(LineEvaluator(objective, at.c))
            details = flow.details
            del flow  # it holds the sketch
        d, found = take(at, found)
        if d is None:
            details["fraction"] = 0.0
        watch.see_step(None if d is None else lambda: at.slope(d), found.agreement)
        log.lap("search")
        report = log.report(
            at, found, krylov_dim=0, ritz_values=(), orthogonality_error=0.0, preconditioner="none", details=details
        )
    return report, FlowState(
        iteration=state.iteration + 1,
        seed=state.seed,
        policy=state.policy,
        samples=watch.after(),
        acceptance=settings.acceptance.after(at),
        last_step=d,
        earlier=None if d is None else at.theta(),
        wary=at.wary,
        adaptation=adaptation,
    )


class Flow:
    """The sketch and direction of one step, and its candidates.

    Attributes:
        adaptation: the adapted numbers, bounded relative to the trace of this sketch.
        phi: φ.
        details: numbers for the step's report.
    """

    def __init__(self, at: GradientPass, settings: FlowSettings, state: FlowState) -> None:
        objective, comm, known = at.objective, at.objective.comm, state.adaptation
        self._at, self._objective = at, objective
        most = most_rows(settings.rows, settings.memory_budget, objective)
        rows = min(max(settings.rows, known.rows if known else 0), most)
        drawn = Sketcher(rows).draw(objective, at.b, (at.key.seed, at.key.iteration), at.gathered)
        at.gathered = None
        self._sketch = finite_rows(drawn, comm)
        self._factored = Factored(self._sketch.J, comm)
        whole = self._sketch.whole
        longest, least = (_LONGEST_WHOLE, _LEAST_WHOLE) if whole else (_LONGEST, _LEAST)
        least = max(least, (_ROUNDING * torch.finfo(self._sketch.J.dtype).eps) ** 2)
        adaptation = _bounded(self._factored.trace, longest, least, known)
        self.adaptation, note = (adaptation, "") if whole else _grown(adaptation, rows, most)
        self.details = {"fraction": 0.0, "damping": adaptation.flow_damping, "rows": float(len(self._sketch.J))}
        self._longest = longest
        last, scale, theta = at.last_step, adaptation.momentum_scale * settings.momentum, objective.point()
        carried = None if last is None or not scale else last * scale
        of_theta, *others = lengths([theta] if carried is None else [theta, carried], comm)
        carried = None if carried is None else within_reach(carried, others[0], of_theta)
        self.phi, self._correct = self._direction(carried, theta)
        self.details["removed"] = removed(self._factored, self._sketch.rho, self.phi)
        self._length = length(self.phi, comm)
        self.details["reach"] = self._length / max(of_theta, 1e-300)
        at.notes += filter(None, [drawn.note or note, "" if len(self._sketch.J) == len(drawn.J) else _NOT_FINITE])

    def _direction(self, carried: Tensor | None, theta: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return φ and e → −(JᵀJ + λ + c)⁻¹Jᵀe, with the decay as curvature c and residual cθ.

        (JᵀJ + λ + c)φ = −Jᵀρ − cθ + λμφ_prev. If groups decay differently, the coordinates are √(λ + c)φ, in which the
        damping is 1 everywhere.
        """
        objective, sketch, factored = self._objective, self._sketch, self._factored
        lam, decay = self.adaptation.flow_damping, objective.parameters.decay
        c, pull = torch.zeros_like(theta), torch.zeros_like(theta)
        if any(decay):
            objective.add_decay(c, torch.ones_like(theta))
            objective.add_decay(pull)
            carried = -pull / (lam + c) if carried is None else (lam * carried - pull) / (lam + c)
        unlike, damping = len(set(decay)) > 1, lam + max(decay, default=0.0)
        if unlike:
            root, damping = (lam + c).sqrt(), 1.0
            factored = Factored(sketch.J / root, objective.comm)
            carried = None if carried is None else carried * root
        phi = flow_direction(factored, sketch.rho, carried, damping)

        def correct(e: Tensor) -> Tensor:
            d = -factored.solved(e, damping)
            return d / root if unlike else d

        return phi / root if unlike else phi, correct

    def descend(self, lines: LineEvaluator) -> tuple[SearchResult, Adaptation]:
        """Return the first step that lowers the loss, and the adaptation."""
        at, known, details = self._at, self.adaptation, self.details
        evaluations = 0

        def value(d: Tensor | None = None) -> float:
            nonlocal evaluations
            evaluations += 1
            v = lines.value(d)
            return v if math.isfinite(v) else math.inf

        def look(d: Tensor) -> tuple[float, Tensor]:
            nonlocal evaluations
            evaluations += 1
            lines.move(d)
            v, change = self._sketch.look()
            if not at.sets.searches_b:
                v = value(d)
            return (v if math.isfinite(v) else math.inf), change

        def taken(d: Tensor, lowest: float) -> SearchResult:
            return SearchResult(d, before, lowest, 0, evaluations, StopReason.CANDIDATE, exact=True)

        before = at.losses.mean if at.sets.searches_all else value()
        fractions = _fractions(known.step_fraction, self._longest)
        step = self._steps(look).lowest(fractions, fractions.index(known.step_fraction), before)
        if step.loss < before:
            eta = details["fraction"] = step.fraction
            promised = step.promised * before
            confirmed = details["confirmed"] = (before - step.loss) / promised if promised > 0 else 1.0
            damping = new_damping(known.flow_damping, eta, details["removed"], details["reach"], confirmed)
            scale = max(0.0, 1 / eta - 1)  # (1 − η)φ is left
            rate = _rate(known, failed=confirmed < LEAST_CONFIRMED)
            then = replace(known, flow_damping=damping, step_fraction=eta, momentum_scale=scale, failure_rate=rate)
            return taken(step.d, step.loss), then
        rate = _rate(known, failed=True)
        shorter = max(known.step_fraction / 2, _SHORTEST)
        lost = replace(known, step_fraction=shorter, momentum_scale=0.0, failure_rate=rate)
        i, lowest, d = descend_line(self._damped_step, _DAMPED, value)
        if lowest < before:
            return taken(d, lowest), replace(lost, lm_damping=self._dampings[i])
        reason = StopReason.NOISE if math.isfinite(lowest) else StopReason.NON_FINITE
        found = SearchResult(None, before, before, 0, evaluations, reason)
        return found, replace(lost, lm_damping=self._dampings[-1])

    def _steps(self, look: Callable[[Tensor], tuple[float, Tensor]]) -> StraightSteps:
        straight, comm = self._factored.along(self.phi), self._objective.comm

        def norm(v: Tensor) -> float:
            return length(v, comm)

        return StraightSteps(self.phi, self._length, self._sketch.rho, straight, self._correct, look, norm)

    @property
    def _dampings(self) -> list[float]:
        return [self.adaptation.lm_damping * _RATIO ** (i - _DAMPED // 2) for i in range(_DAMPED)]

    def _damped_step(self, i: int) -> Tensor:
        assert self._at.g is not None
        return damped_step(self._factored, self._at.g, self._dampings[i])


_NOT_FINITE = "Rows of the Jacobian were not finite; they were left out."


def descend_line(
    step: Callable[[int], Tensor], count: int, value: Callable[[Tensor], float]
) -> tuple[int, float, Tensor]:
    """Return the index, loss and vector of the best step, longest first: from the middle, towards shorter or longer."""
    seen: dict[int, tuple[float, Tensor]] = {}

    def at(i: int) -> float:
        if not 0 <= i < count:
            return math.inf
        if i not in seen:
            d = step(i)
            seen[i] = value(d), d
        return seen[i][0]

    i = first = count // 2
    while i + 1 < count and (at(i + 1) < at(i) or math.isinf(at(i))):  # a long step may overflow
        i += 1
    while i <= first and at(i - 1) < at(i):
        i -= 1
    return i, at(i), seen[i][1]


def _bounded(trace: float, longest: float, least: float, known: Adaptation | None) -> Adaptation:
    """Return the adaptation with its dampings bounded relative to the trace, and its fraction by ``longest``."""
    if not 0 < trace < math.inf:
        return Adaptation(1.0, _LONGEST, 0.0, 1.0) if known is None else known
    if known is None:
        return Adaptation(_FIRST * trace, min(0.5, longest), 0.0, _FIRST_DAMPED * trace)
    damping = min(max(known.flow_damping, least * trace), _MOST * trace)
    damped = min(max(known.lm_damping, _LEAST_DAMPED * trace), _MOST_DAMPED * trace)
    halvings = max(0, math.ceil(math.log2(known.step_fraction / longest)))  # fractions stay halvings of each other
    fraction = known.step_fraction / 2.0**halvings
    return replace(known, flow_damping=damping, lm_damping=damped, step_fraction=fraction)


def most_rows(first: int, budget: int | None, objective: Objective) -> int:
    """Return the largest number of rows that m may grow to: within the budget and the number of parameters."""
    parameters = objective.parameters
    taken = torch.tensor(float(sketch_bytes(1, parameters.numel, parameters.dtype)), device="cpu")
    room = _ROOM if budget is None else budget
    fitting = room // int(objective.comm.max(taken))  # ranks have parts of different lengths, and must agree
    return max(first, min(_MOST_ROWS * first, fitting, parameters.count))


def _rate(known: Adaptation, *, failed: bool) -> float:
    """Return the rate of failures with one more step."""
    return known.failure_rate + _LATELY * (failed - known.failure_rate)


def _grown(known: Adaptation, rows: int, most: int) -> tuple[Adaptation, str]:
    """Return the adaptation, with more rows if the flow has failed often, and a note of it."""
    if known.failure_rate <= _OFTEN or rows >= most:
        return known, ""
    more = min(round(_GROWTH * rows), most)
    note = f"Many recent steps helped the drawn rows far more than all of them: sketches have {more} rows from now on."
    return replace(known, failure_rate=0.0, rows=more), note


def _fractions(fraction: float, longest: float) -> list[float]:
    """Return halvings and doublings of a fraction within bounds, longest first."""
    tried = (fraction * 2.0**-k for k in range(-_LENGTHS, _LENGTHS + 1))
    return [eta for eta in tried if _SHORTEST <= eta <= longest]
