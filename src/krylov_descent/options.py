"""The arguments of ``KSD``, checked, and what a step works with made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from krylov_descent.base import whole
from krylov_descent.budget import Storage
from krylov_descent.curvature import CURVATURES
from krylov_descent.krylov import KrylovBuilder
from krylov_descent.ksd import Settings
from krylov_descent.precondition import Fisher, Preconditioner
from krylov_descent.rational import Rational, RationalBuilder
from krylov_descent.search import Search

Builder = KrylovBuilder | RationalBuilder


@dataclass(frozen=True)
class Options:
    """What ``KSD`` was given, as its arguments are named there."""

    krylov_dim: int
    basis: Literal["krylov", "rational"] | Rational
    curvature: Literal["ggn", "hessian", "fisher"]
    preconditioner: Literal["fisher"] | Fisher | Preconditioner | None
    previous: Literal["step", "e1"] | None
    search: Search
    rollback: bool
    memory_budget: int | None
    storage: Storage
    compile: bool
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
        unusable = isinstance(given, type) or (given is not None and not hasattr(given, "start"))
        if unusable and given != "fisher" and not isinstance(given, Fisher):
            raise ValueError(f"preconditioner={given!r}: must be 'fisher', Fisher(...) or None.")
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
            return KrylovBuilder(CURVATURES[self.curvature], self.krylov_dim, self.memory_budget, self.storage)
        return RationalBuilder(Rational() if self.basis == "rational" else self.basis, self.memory_budget)

    def settings(self, builder: Builder) -> Settings:
        """What stays the same from step to step."""
        preconditioner = Fisher() if self.preconditioner == "fisher" else self.preconditioner
        if self.basis != "krylov":
            preconditioner = None  # a damped step needs none: it has the curvature itself
        if isinstance(preconditioner, Fisher):
            preconditioner = preconditioner.prepare()
        return Settings(builder, preconditioner, self.search, self.previous, self.rollback)

    def shared(self) -> str:
        """What ranks must have in common to take the same path, beside what has a name in their error."""
        given = Fisher() if self.preconditioner == "fisher" else self.preconditioner
        name = given if isinstance(given, Fisher) else type(given).__name__
        told = (self.basis, self.curvature, name, self.previous, self.search, self.rollback)
        return repr((*told, self.memory_budget, self.storage, self.compile))
