"""The arguments of ``KSD``, checked, and what a step works with made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from krylov_descent.base import whole
from krylov_descent.budget import Storage
from krylov_descent.curvature import CURVATURES
from krylov_descent.kronecker import Kronecker
from krylov_descent.kronecker_memory import step_bytes
from krylov_descent.krylov import KrylovBuilder
from krylov_descent.ksd import Settings
from krylov_descent.precondition import Fisher, Preconditioner, RememberingPreconditioner
from krylov_descent.rational import Rational, RationalBuilder
from krylov_descent.search import Search

Builder = KrylovBuilder | RationalBuilder
Preconditioners = Fisher | Kronecker | Preconditioner | RememberingPreconditioner
Preconditioning = Literal["fisher", "kronecker"] | Preconditioners | None
"""What may be given for D."""

_NAMED: dict[str, Fisher | Kronecker] = {"fisher": Fisher(), "kronecker": Kronecker()}


@dataclass(frozen=True)
class Options:
    """What ``KSD`` was given, as its arguments are named there."""

    krylov_dim: int
    basis: Literal["krylov", "rational"] | Rational
    curvature: Literal["ggn", "hessian", "fisher"]
    preconditioner: Preconditioning
    previous: Literal["step", "e1"] | None
    search: Search
    rollback: bool
    memory_budget: int | None
    storage: Storage
    seed: int

    def __post_init__(self) -> None:
        krylov_dim = whole("krylov_dim", self.krylov_dim)
        if krylov_dim < 1:
            raise ValueError(f"krylov_dim={krylov_dim!r}: must be a whole number ≥ 1; the paper's is 20.")
        if self.curvature not in CURVATURES:
            raise ValueError(f"curvature={self.curvature!r}: must be one of {sorted(CURVATURES)}.")
        if self.basis not in ("krylov", "rational") and not isinstance(self.basis, Rational):
            raise ValueError(f"basis={self.basis!r}: must be 'krylov', 'rational' or krylov_descent.Rational(...).")
        if self.basis != "krylov" and self.curvature != "ggn":
            raise ValueError(
                f"basis='rational' is made of rows of the Gauss–Newton matrix, not of curvature={self.curvature!r}. "
                "Use curvature='ggn', or basis='krylov'."
            )
        given = self.preconditioner
        if self.basis != "krylov" and (isinstance(given, Kronecker) or given == "kronecker"):
            raise ValueError(
                "basis='rational' has no use for preconditioner='kronecker' (as in DEEP): its steps have the curvature "
                "itself. Leave one of the two out."
            )
        custom = not isinstance(given, type) and (hasattr(given, "start") or hasattr(given, "refresh"))
        ours = given is None or given in tuple(_NAMED) or isinstance(given, (Fisher, Kronecker))
        if not ours and not custom:
            raise ValueError(
                f"preconditioner={given!r}: must be 'fisher', 'kronecker', Fisher(...), Kronecker(...) or None."
            )
        if self.previous not in ("step", "e1", None):
            raise ValueError(f"previous={self.previous!r}: must be 'step', 'e1' or None.")
        if not isinstance(self.search, Search):
            raise ValueError(f"search={self.search!r}: must be a krylov_descent.Search(...).")
        budget = self.memory_budget
        if budget is not None and whole("memory_budget", budget) < 0:
            raise ValueError(f"memory_budget={budget}: must be a number of bytes ≥ 0, or None for no limit.")
        if not isinstance(self.storage, Storage):
            raise ValueError(f"storage={self.storage!r}: must be a krylov_descent.Storage(...).")
        object.__setattr__(self, "krylov_dim", krylov_dim)
        object.__setattr__(self, "seed", whole("seed", self.seed))

    def wired(self, dtype: Any) -> Options:
        """With rows of V in the dtype in which they travel: all ranks must mean the same row."""
        if dtype is None or self.storage.dtype is not None:
            return self
        return replace(self, storage=replace(self.storage, dtype=dtype))

    def builder(self) -> Builder:
        """What builds the subspace of a step."""
        if self.basis == "krylov":
            factors = step_bytes if isinstance(self._given(), Kronecker) else None
            return KrylovBuilder(CURVATURES[self.curvature], self.krylov_dim, self.memory_budget, self.storage, factors)
        return RationalBuilder(Rational() if self.basis == "rational" else self.basis, self.memory_budget)

    def settings(self, builder: Builder) -> Settings:
        """What stays the same from step to step."""
        given = self._given()
        if self.basis != "krylov":
            given = None  # a damped step needs none: it has the curvature itself
        prepared = given.prepare() if isinstance(given, (Fisher, Kronecker)) else given
        earlier = builder.earlier if isinstance(builder, KrylovBuilder) and self.previous is not None else 0
        return Settings(builder, prepared, self.search, self.previous, self.rollback, earlier)

    def _given(self) -> Preconditioners | None:
        return _NAMED[self.preconditioner] if isinstance(self.preconditioner, str) else self.preconditioner

    def shared(self) -> str:
        """What ranks must have in common to take the same path, beside what has a name in their error."""
        given = self._given()
        name = given if isinstance(given, (Fisher, Kronecker)) else type(given).__name__
        told = (self.basis, self.curvature, name, self.previous, self.search, self.rollback)
        return repr((*told, self.memory_budget, self.storage))
