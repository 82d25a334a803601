"""Algorithm 3: one step of Krylov Subspace Descent.

Letters: θ [P], g gradient on A, D preconditioner, V and H̄ from B, d = V̄a* the step found on C. Vectors are this rank's
parts [P_local]; every decision depends only on numbers that are the same on all ranks.

Five exchangeable strategies do the work: the sample policy (line 3), acceptance (lines 3-4), the preconditioner
(line 5), the subspace builder (line 6) and the subspace search (lines 7-12).

Deviations from the paper:
1. Acceptance (lines 3-4): the next step's pass over A yields f(θ) at no extra cost. If the last step raised f and a
   forward pass at the earlier point confirms it, the step is rolled back, d_prev is dropped and C is doubled. The
   paper keeps every step, as does ``rollback=False``. By every rule a step is rolled back if f or its gradient is
   not finite where it ended; from then on steps are halved until the gradient is finite there.
2. Line 1: the first step has no d_prev, unless the caller asks for one (``previous="e1"``).
3. If the search finds no better point than a = 0, or rounding makes its step worse, θ stays and d_prev is empty.
4. Line 5: a preconditioner with memory averages statistics from B, or a part of it, over steps.
5. Line 3: growing sets grow when fresh samples confirm too little of the last steps, or when the loss on C disagrees
   with the model (samples/growing.py); their steps are rolled back only if f or its gradient is not finite.
6. Line 6: once growing sets hold all samples, several earlier steps are adjoined, not only the last one.
7. Lines 9-12: ``ModelSearch`` takes the minimum of the quadratic model if C agrees. Its gradient is that on A, or on C
   where C is outside of A.
8. Line 3: with fewer than 2K samples, and no ``fraction`` given, A, B and C are all samples (samples/subsets.py).
9. Line 6: K is at most the number of parameters (krylov/subspace.py).
10. Lines 10-11: the search is capped in evaluations too, not only in iterations (krylov/search.py); where C is A, it
    begins with the loss and gradient on A.
The other files number their own: preconditioners/fisher.py (line 5), krylov/search.py (lines 7-8), krylov/bfgs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from krylov_descent.krylov.orthonormal_basis import Subspace
from krylov_descent.krylov.search import LineEvaluator, SearchStart, SubspaceSearch
from krylov_descent.krylov.subspace import SubspaceBuilder
from krylov_descent.objective.objective import Objective
from krylov_descent.preconditioners.interface import Preconditioner
from krylov_descent.report import StepReport
from krylov_descent.stepping.acceptance import Acceptance, MethodState, Sampler, arrive
from krylov_descent.stepping.search_result import at_rest, take
from krylov_descent.stepping.step_log import StepLog


@dataclass(frozen=True)
class Strategies:
    """The strategies of a run, constant from step to step."""

    preconditioner: Preconditioner
    builder: SubspaceBuilder
    search: SubspaceSearch
    acceptance: Acceptance


@dataclass(frozen=True, eq=False, kw_only=True)
class KSDState(MethodState):
    """The state between two steps, by strategy: all that a resumed run needs."""

    preconditioner: Any
    subspace: Any
    search: Any


def ksd_step(
    objective: Objective,
    samples: Sampler,
    strategies: Strategies,
    state: KSDState,
    theta: Callable[[], Tensor] | None = None,
) -> tuple[StepReport, KSDState]:
    """Run one iteration of Algorithm 3; if it raises, θ is undefined and the caller must restore it.

    Args:
        objective: f and its derivatives on micro-batches.
        samples: draws A, B and C.
        strategies: the strategies of the run.
        state: the state after the last step.
        theta: returns θ [P] where the step begins, if the caller has it.

    Raises:
        ValueError: f or its gradient on A is not finite and there is no earlier point to return to.
    """
    preconditioner, builder, search = strategies.preconditioner, strategies.builder, strategies.search
    with StepLog(objective.comm) as log:
        at = arrive(objective, samples, state, strategies.acceptance, preconditioner.gather, theta)  # lines 3-4
        log.lap("gradient")

        watch = samples.watch(at)
        watch.see_gradient(at.slope)
        D = preconditioner.solve(at, state.preconditioner, watch.gradient_noise)  # line 5
        at.keeps_gradient = at.sets.searches_all or watch.needs_gradient or search.needs_gradient
        subspace, found = Subspace.none(), at_rest(at, state.search)
        if at.grad_norm > 0:
            subspace = builder.build(at, D.solve, state.subspace)  # line 6
            watch.see_curvature(lambda d: subspace.curvature_along(d, objective.comm))
            D = D.without_vectors()
            log.lap("basis")

            lines, start = LineEvaluator(objective, at.c), SearchStart.of(at)
            found = search.minimise(lines, subspace, start, state.search)  # lines 7-12
            del lines, start  # they hold vectors [P]
        d, found = take(at, found)  # line 13
        log.lap("search")

        at.notes += (*D.notes, *subspace.notes)
        report = log.report(at, found, **subspace.numbers(), preconditioner=D.name)
        watch.see_step(None if d is None else lambda: at.slope(d), found.agreement)
    return report, KSDState(
        iteration=state.iteration + 1,
        seed=state.seed,
        policy=state.policy,
        samples=watch.after(),
        preconditioner=D.state,
        subspace=builder.after(at, state.subspace, d),
        search=found.state,
        acceptance=strategies.acceptance.after(at),
        last_step=d,
        earlier=None if d is None else at.theta(),
        wary=at.wary,
    )
