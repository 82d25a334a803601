"""The paper's way to build the subspace: curvature products on B, fed to Algorithm 2."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from krylov_descent.curvature import CurvatureProduct, GaussNewtonGraph, MicrobatchGraph
from krylov_descent.distributed import part_length
from krylov_descent.krylov.basis import EARLIER, Subspace, Turn, krylov_basis, shortest_basis
from krylov_descent.objective.objective import Objective
from krylov_descent.progress import Progress, Tell
from krylov_descent.safety.budget import Need, Storage
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.vectors.storage import Rows

_ANYTHING = 1 << 62  # a budget that keeps everything and still measures


@dataclass(eq=False)
class KrylovBuilder:
    """Builds span{(D⁻¹H)^k D⁻¹g} ∪ {d_prev}, with K = 1 and earlier steps; owns V's buffer, which all steps reuse."""

    kind: type[MicrobatchGraph]
    krylov_dim: int
    memory_budget: int | None
    storage: Storage = Storage()  # noqa: RUF009 — frozen
    factor_bytes: Callable[[Objective], int] | None = None  # of a preconditioner that remembers, in a step
    announced: bool = field(default=False, init=False)
    _V: Rows | None = field(default=None, init=False, repr=False)

    def __call__(
        self,
        objective: Objective,
        batches: Sequence[Microbatch],
        precondition: Callable[[Tensor], Tensor],
        g: Tensor,
        d_prev: Tensor | None,
        turn: Turn = Turn(),  # noqa: B008 — frozen
    ) -> Subspace:
        """Algorithm 2 with H on ``batches``; at most as many Krylov vectors as there are parameters.

        Products are written over g: by the first of them, the basis has begun and g is needed no more.
        """
        K = min(self.krylov_dim, objective.parameters.count)
        at_once = self._at_once and objective.comm.bounds(len(g)) is not None
        earlier = turn.earlier[: self.earlier] if at_once and d_prev is not None else ()
        rows = K + 1 + EARLIER * bool(earlier)
        if self._V is None or not self._V.holds(rows, g):
            self._V = None  # free the old one first
            self._V = Rows(rows, g, self.storage.dtype, self.storage.device)
        need = self._need(objective)
        product = CurvatureProduct(self.kind, objective, batches, None if need is None else need.for_graphs, g)
        if at_once:
            previous = () if d_prev is None else (d_prev, *earlier)
            subspace = shortest_basis(product.within, precondition, g, previous, self._V, objective.comm)
            if subspace is not None:
                objective.tell(Progress("basis", 1 + len(previous), 1 + len(previous)))
                return subspace
        counted = _counted(product, K + (d_prev is not None), objective.tell)
        return krylov_basis(counted, precondition, g, d_prev, K, self._V, objective.comm)

    @property
    def earlier(self) -> int:
        """Steps before the last one that are of use: they are rows of V, for which a budget may have no room."""
        return EARLIER if self._at_once and self.memory_budget is None else 0

    @property
    def _at_once(self) -> bool:
        """Whether all of H̄ comes from Jv, unless parameters are on a mesh."""
        return self.krylov_dim == 1 and issubclass(self.kind, GaussNewtonGraph)

    @property
    def rows(self) -> Rows | None:
        """V of the last step."""
        return self._V

    def require_room(self, objective: Objective) -> None:
        """Before anything runs.

        Raises:
            ValueError: the budget is too small for V and the preconditioner's factors.
        """
        need = self._need(objective)
        refusal = None if need is None else need.refusal()
        if refusal:
            raise ValueError(refusal)

    def announce(self, objective: Objective, batches: Sequence[Microbatch]) -> None:
        """Before the first step: warn where the budget is too small for the graphs of B."""
        self.announced = True
        need = self._need(objective)
        if need is None:
            return
        # One micro-batch tells of all: what a graph holds grows with the samples.
        first = CurvatureProduct(self.kind, objective, batches[:1], memory_budget=_ANYTHING)
        if not first.measured:
            warnings.warn(
                "The closure uses torch.func, which does not tell what a graph holds: with memory_budget, graphs are "
                "rebuilt for every product, which makes one 1.7 times as long. Leave memory_budget out to keep them.",
                stacklevel=4,
            )
        one = first.kept_bytes
        samples = [batch.samples or 1 for batch in batches] or [1]
        need = replace(need, parts=len(batches), graphs=one * sum(samples) // samples[0])
        if warning := need.warning():
            warnings.warn(warning, stacklevel=4)

    def _need(self, objective: Objective) -> Need | None:
        parameters = objective.parameters
        if self.memory_budget is None:
            return None
        length = part_length(objective.comm, parameters.numel)
        vectors = min(self.krylov_dim, parameters.count) + 1
        factors = 0 if self.factor_bytes is None else self.factor_bytes(objective)
        need = Need(self.memory_budget, vectors, length, parameters.dtype, parameters.device, self.storage)
        return replace(need, factors=factors)

    def __getstate__(self) -> dict[str, Any]:
        # A copy of an optimizer needs no copy of its workspace.
        return {**self.__dict__, "_V": None}


def _counted(product: Callable[[Tensor], Tensor], total: int, tell: Tell) -> Callable[[Tensor], Tensor]:
    done = 0

    def counted(v: Tensor) -> Tensor:
        nonlocal done
        w = product(v)
        done += 1
        tell(Progress("basis", done, total))
        return w

    return counted
