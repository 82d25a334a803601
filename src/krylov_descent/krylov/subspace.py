"""The interface of a subspace builder, and ``Krylov``: Algorithm 2 with curvature products on B.

Deviations from the paper (2, 6 and 9 of krylov/step.py), beside those of Algorithm 2 (krylov/orthonormal_basis.py):
1. Line 1: the first step has no d_prev, unless ``previous="e1"``.
2. Line 6: once growing sets hold all samples, several earlier steps are adjoined, not only the last one.
3. Line 6: K is at most the number of parameters.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from krylov_descent.curvature import CurvatureProduct, GaussNewtonGraph, MicrobatchGraph
from krylov_descent.distributed import part_length, run_on_all
from krylov_descent.krylov.orthonormal_basis import Subspace, krylov_basis, shortest_basis
from krylov_descent.objective.objective import Objective
from krylov_descent.preconditioners.interface import Solve
from krylov_descent.progress import Progress, Tell
from krylov_descent.safety.budget import Need, Storage
from krylov_descent.samples.interface import Microbatch, Stateless, StepSets
from krylov_descent.state import vector
from krylov_descent.stepping.gradient_pass import GradientPass
from krylov_descent.vectors.storage import BasisStorage

EARLIER = 5  # most steps before the last one in a basis; 15 lowered the loss no further
_ANYTHING = 1 << 62  # a budget that keeps everything and still measures


class SubspaceBuilder(ABC):
    """Builds the subspace that a step searches; subclass it for one of your own, ``KSD(..., subspace=Mine())``.

    Attributes:
        krylov_dim: K; ``Subsets`` puts 1/K of the samples in B and in C.
        needs_outputs: whether the closure must return the model outputs beside the loss.
        storage: dtype and device of V.
        earlier: the largest number of earlier steps that it keeps, and that V has as rows.
    """

    krylov_dim: int
    needs_outputs: bool = True
    storage: Storage = Storage()
    earlier: int = 0

    def init(self) -> Any:
        """Return the state of a new run: a frozen dataclass of numbers and tensors."""
        return Stateless()

    def prepare(self, objective: Objective, sets: Callable[[], StepSets]) -> None:  # noqa: B027 — nothing by default
        """Raise or warn if memory is too small; called before each step. ``sets`` returns the step's sets."""

    def graph_bytes(self, objective: Objective, batch: Microbatch) -> int:
        """Return the bytes of the graphs of a micro-batch of B that are kept for products."""
        return 0

    @abstractmethod
    def build(self, at: GradientPass, solve: Solve, state: Any) -> Subspace:
        """Build the subspace.

        Args:
            at: the objective, B, the gradient (``at.take_gradient()``) and the previous step where the step begins.
            solve: w → D⁻¹w.
            state: the builder's state.
        """

    def after(self, at: GradientPass, state: Any, d: Tensor | None) -> Any:
        """Return the state after the step d; d is None if no step was taken."""
        return state


@dataclass(frozen=True, eq=False)
class KrylovState:
    """The steps before the last one [P_local], newest first; empty until growing sets hold all samples."""

    earlier: tuple[Tensor, ...] = vector(())


class BasisBuffer:
    """The storage of V, reused by all steps, and whether the warning of a small budget was given."""

    def __init__(self) -> None:
        self.V: BasisStorage | None = None
        self.announced = False

    def rows(self, rows: int, like: Tensor, storage: Storage) -> BasisStorage:
        """Return storage for this number of basis rows."""
        if self.V is None or not self.V.holds(rows, like):
            self.V = None  # free the old one first
            self.V = BasisStorage(rows, like, storage.dtype, storage.device)
        return self.V


@dataclass(frozen=True)
class Krylov(SubspaceBuilder):
    """Builds the paper's subspace: span{(D⁻¹H)^k D⁻¹g, 0 ≤ k < K} and the previous step.

    Args:
        krylov_dim: K.
        curvature: the curvature matrix H.
        previous: "step" adjoins the previous step; "e1" also the first unit vector at the first step; None neither.
        memory_budget: bytes for V, the preconditioner and the graphs of B.
        storage: dtype and device of V.
        factor_bytes: returns the bytes that the preconditioner needs.
    """

    krylov_dim: int = 20
    curvature: type[MicrobatchGraph] = GaussNewtonGraph
    previous: Literal["step", "e1"] | None = "step"
    memory_budget: int | None = None
    storage: Storage = Storage()  # noqa: RUF009 — frozen
    factor_bytes: Callable[[Objective], int] | None = field(default=None, repr=False)

    def init(self) -> Any:
        """Return the state without earlier steps."""
        return KrylovState()

    def build(self, at: GradientPass, solve: Solve, state: Any) -> Subspace:
        """Run Algorithm 2 with H on B and K at most the number of parameters; products overwrite g, once it is used."""
        objective, comm = at.objective, at.objective.comm
        batches = at.b
        d_prev = self._adjoined(at)
        g = at.take_gradient()
        K = min(self.krylov_dim, objective.parameters.count)
        at_once = self._at_once and comm.bounds(len(g)) is not None
        earlier = state.earlier if at_once and d_prev is not None and _grown_to_all(at.sets) else ()
        V = objective.workspace.of(BasisBuffer).rows(K + 1 + EARLIER * bool(earlier), g, self.storage)
        need = self._need(objective)
        product = CurvatureProduct(self.curvature, objective, batches, None if need is None else need.for_graphs, g)
        if at_once:
            previous = () if d_prev is None else (d_prev, *earlier)
            subspace = shortest_basis(product.within, solve, g, previous, V, comm)
            if subspace is not None:
                objective.tell(Progress("basis", 1 + len(previous), 1 + len(previous)))
                return subspace
        counted = _counted(product, K + (d_prev is not None), objective.tell)
        return krylov_basis(counted, solve, g, d_prev, K, V, comm)

    def after(self, at: GradientPass, state: Any, d: Tensor | None) -> Any:
        """Add the last step to the earlier ones, once A holds all samples; before that, earlier steps gain nothing."""
        objective, last = at.objective, at.last_step
        whole = objective.comm.bounds(objective.parameters.numel) is not None
        if not whole or d is None or last is None or not _grown_to_all(at.sets) or not self.earlier:
            return KrylovState()
        return KrylovState((last, *state.earlier)[: self.earlier])

    @property
    def needs_outputs(self) -> bool:  # type: ignore[override]
        """Whether H needs the model outputs: yes, unless H is the Hessian of the loss."""
        return self.curvature.first_order

    def graph_bytes(self, objective: Objective, batch: Microbatch) -> int:
        """Return the bytes that autograd saves for products by H."""
        return CurvatureProduct(self.curvature, objective, [batch], memory_budget=_ANYTHING).kept_bytes

    @property
    def earlier(self) -> int:  # type: ignore[override]
        """The number of earlier steps to keep: none with a memory budget, since each is a row of V."""
        useful = self._at_once and self.memory_budget is None and self.previous is not None
        return EARLIER if useful else 0

    @property
    def _at_once(self) -> bool:
        """Whether all of H̄ can be computed from Jv, if the parameters are not on a mesh."""
        return self.krylov_dim == 1 and issubclass(self.curvature, GaussNewtonGraph)

    def _adjoined(self, at: GradientPass) -> Tensor | None:
        """Return d_prev; at the first step that of Algorithm 3, line 1."""
        if self.previous == "e1" and at.last_step is None and at.key.iteration == 0:
            return at.objective.comm.shard(at.objective.parameters.first_unit())
        return None if self.previous is None else at.last_step

    def prepare(self, objective: Objective, sets: Callable[[], StepSets]) -> None:
        """Check the budget for V and the factors; before the first step, warn if it is too small for the graphs.

        Raises:
            ValueError: the budget is too small, or ``previous`` is None with growing sets.
        """
        if self.previous is None:
            _require_previous(sets())
        need, buffer = self._need(objective), objective.workspace.of(BasisBuffer)
        refusal = None if need is None else need.refusal()
        if refusal:
            raise ValueError(refusal)
        if need is not None and not buffer.announced:
            buffer.announced = True
            drawn = sets()
            run_on_all(objective.comm, lambda: len(drawn.b))  # load it
            self._announce(objective, drawn.b, need)

    def _announce(self, objective: Objective, batches: Sequence[Microbatch], need: Need) -> None:
        # One micro-batch is measured: the size of a graph is proportional to its samples.
        first = CurvatureProduct(self.curvature, objective, batches[:1], memory_budget=_ANYTHING)
        if not first.measured:
            warnings.warn(
                "The closure uses torch.func, which hides the memory of graphs: with memory_budget, graphs are rebuilt "
                "for every product, which then takes 1.7 times as long. Leave memory_budget out to keep them.",
                stacklevel=6,
            )
        one = first.kept_bytes
        samples = [batch.samples or 1 for batch in batches] or [1]
        need = replace(need, parts=len(batches), graphs=one * sum(samples) // samples[0])
        if warning := need.warning():
            warnings.warn(warning, stacklevel=6)

    def _need(self, objective: Objective) -> Need | None:
        parameters = objective.parameters
        if self.memory_budget is None:
            return None
        length = part_length(objective.comm, parameters.numel)
        vectors = min(self.krylov_dim, parameters.count) + 1
        factors = 0 if self.factor_bytes is None else self.factor_bytes(objective)
        need = Need(self.memory_budget, vectors, length, parameters.dtype, parameters.device, self.storage)
        return replace(need, factors=factors)


def _require_previous(sets: StepSets) -> None:
    if sets.grows and not sets.covers_all:
        raise ValueError(
            "Growing sets judge a step by the curvature along it at the next step, which previous=None does not "
            "compute: they would never grow. Use previous='step', or Subsets in place of Growing."
        )


def _grown_to_all(sets: StepSets) -> bool:
    return sets.grows and sets.covers_all


def _counted(product: Callable[[Tensor], Tensor], total: int, tell: Tell) -> Callable[[Tensor], Tensor]:
    done = 0

    def counted(v: Tensor) -> Tensor:
        nonlocal done
        w = product(v)
        done += 1
        tell(Progress("basis", done, total))
        return w

    return counted
