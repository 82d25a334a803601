"""``KSD``: its arguments, their checks, and what a step works with; no maths."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from krylov_descent.base import ClosureOptimizer, whole
from krylov_descent.curvature import CURVATURES
from krylov_descent.distributed import Comm, ProcessGroup, Ranks, SingleProcess, together
from krylov_descent.distributed.mesh import MeshComm
from krylov_descent.distributed.sharded import lean_graphs
from krylov_descent.flow.step import Rational, RationalBuilder
from krylov_descent.krylov.acceptance import settle
from krylov_descent.krylov.builder import KrylovBuilder
from krylov_descent.krylov.memory import Memory
from krylov_descent.krylov.search import Search
from krylov_descent.krylov.step import Settings, drawing, ksd_step
from krylov_descent.objective.closure import no_inference_mode
from krylov_descent.objective.consistency import check_consistency, steady
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.precision import warn_if_reduced
from krylov_descent.preconditioners import Preconditioner, RememberingPreconditioner
from krylov_descent.preconditioners.fisher import Fisher
from krylov_descent.preconditioners.kronecker import Kronecker, step_bytes
from krylov_descent.report import Settlement, StepReport
from krylov_descent.safety.atomic import AsBefore, standing
from krylov_descent.safety.budget import Storage
from krylov_descent.samples.subsets import Draw, StepSets, Subsets
from krylov_descent.state import WholeState, memory_of_whole, memory_parts, read_memory, require_whole, write_memory
from krylov_descent.vectors.parameters import ParameterVector
from krylov_descent.vectors.ranks import gathered, require_same

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


#: The settings of Vinyals & Povey 2011: K = 20, Gauss–Newton, D from the Fisher matrix and ε = 1e-4 (section 4),
#: 30 BFGS iterations (section 5.2), d_prev = e₁ at first (Algorithm 3, line 1), every step kept.
PAPER: dict[str, Any] = {
    "krylov_dim": 20,
    "curvature": "ggn",
    "preconditioner": Fisher(floor=1e-4),
    "previous": "e1",
    "search": Search(iterations=30, evaluations=120, floor=1e-4, negative="floor"),
    "rollback": False,
}

#: For deep networks and much data, with ``Growing`` sets: many steps, each along one direction and the last step, and
#: five before it once A has all samples.
DEEP: dict[str, Any] = {"krylov_dim": 1, "preconditioner": "kronecker", "search": Search(evaluations=8, model=0.1)}


class KSD(ClosureOptimizer):
    """Krylov Subspace Descent (Vinyals & Povey 2011): second order, without learning rate or damping.

    Each step takes the gradient on a sample set A, builds a Krylov basis from curvature products on a set B, adds
    the previous step, and minimises the true loss over that subspace with BFGS on a set C.

    Args:
        params: parameters or parameter groups; a group may have its own ``weight_decay``. Frozen parameters
            (``requires_grad=False``) are left alone. The groups' ``lr`` is inert, for trainers that read it.
        krylov_dim: K, the Krylov vectors of a step; 20 is the paper's. Memory is K+1 vectors of all parameters;
            with K = 1, ten more once ``Growing`` sets have all samples and there is no ``memory_budget``.
        basis: "krylov", the paper's; "rational", a Gauss–Newton direction gathered from sketches of the Jacobian and
            followed in short pieces, for physics-informed networks in float64 with up to some ten thousand
            parameters (``Rational`` has its settings). It has no use for ``krylov_dim``, ``storage`` and a
            preconditioner, and with ``previous=None`` no momentum.
        curvature: "ggn", the Gauss–Newton matrix (the paper's, and the best there); "hessian", exact and possibly
            indefinite; "fisher", the empirical Fisher matrix.
        preconditioner: "fisher", the diagonal of the per-sample Fisher matrix (the paper's); "kronecker", a factored
            Gauss–Newton matrix of each layer, remembered over steps, for small sets; ``Fisher(...)`` or
            ``Kronecker(...)`` with other settings; or None.
        previous: "step" adds the previous step to the basis (nothing at the first one); "e1" does too and takes
            the first unit vector at the first step, as the paper does; None never adds one.
        search: settings of the search over the subspace.
        weight_decay: c of ½·c·‖θ‖² in value, gradient and product alike, per group; 0 as in torch.optim.LBFGS.
        rollback: with sets, undo a step that raised the loss on A, and double C. The paper keeps every step.
        memory_budget: bytes that V, Kronecker factors and the graphs of B may take. Graphs that do not fit are rebuilt
            for every product, which the first step announces; the rest is refused, with what would fit. None: no limit.
        storage: of V: ``Storage(dtype=torch.bfloat16)`` halves it, ``Storage(device="cpu")`` keeps it in host memory.
        seed: of the random signs in the Fisher diagonal.
        process_group: a torch.distributed group whose ranks take one step together: each its share of the sets, and
            1/R of V. All hold the same parameters and call ``step`` with the same closure and sets (docs/scaling.md).
            ``krylov_descent.distributed.Ranks(group, wire=torch.bfloat16)`` sends less.

    Example:
        >>> import torch
        >>> from krylov_descent import KSD
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
        >>> x = torch.linspace(-1, 1, 64, dtype=torch.float64)[:, None]
        >>> optimizer = KSD(model.parameters())
        >>> def closure():
        ...     r = model(x) - torch.sin(3 * x)
        ...     return r.square().mean(), r
        >>> for _ in range(20):
        ...     report = optimizer.step(closure)
        >>> report.loss < 1e-4
        True
    """

    _KEPT = ("_options", "_builder", "_settings")

    def __init__(
        self,
        params: ParamsT,
        *,
        krylov_dim: int = 20,
        basis: Literal["krylov", "rational"] | Rational = "krylov",
        curvature: Literal["ggn", "hessian", "fisher"] = "ggn",
        preconditioner: Preconditioning = "fisher",
        previous: Literal["step", "e1"] | None = "step",
        search: Search = Search(),  # noqa: B008 — frozen
        weight_decay: float = 0.0,
        rollback: bool = True,
        memory_budget: int | None = None,
        storage: Storage = Storage(),  # noqa: B008 — frozen
        seed: int = 0,
        process_group: ProcessGroup | Ranks | None = None,
    ) -> None:
        ranks = process_group if isinstance(process_group, Ranks) else Ranks(process_group)
        options = Options(
            krylov_dim,
            basis,
            curvature,
            preconditioner,
            previous,
            search,
            rollback,
            memory_budget,
            storage,
            seed,
        ).wired(ranks.wire)
        self._options = options
        self._builder = options.builder()
        self._settings = options.settings(self._builder)
        super().__init__(params, weight_decay, ranks.comm())

    def step(  # type: ignore[override]
        self, closure: Callable[..., Any], sets: Subsets | None = None
    ) -> StepReport:
        """One step of Algorithm 3.

        Args:
            closure: with ``sets`` called as ``closure(batch)``, otherwise as ``closure()``. Returns the mean loss
                and what it is convex in (a tensor or a tuple, list or dict of tensors), and optionally the weight
                of that mean. Does not call ``backward``. With ``curvature="hessian"`` the loss alone will do. An
                autocast belongs inside the closure; one around ``step`` is switched off.
            sets: draws A, B and C. Without, A = B = C = whatever the closure evaluates.

        Returns:
            What happened; ``float(report)`` is the loss before the step.

        Raises:
            ValueError: the closure cannot be used, with the remedy; the parameters are then as before.
        """
        no_inference_mode()
        parameters = self._parameters()
        memory = self._remember(parameters)
        decays = [group["weight_decay"] for group in self.param_groups]
        source = repr(sets) if isinstance(sets, Subsets) else type(sets).__name__  # all that others can be compared by
        settings = zlib.crc32(f"{self._options.shared()} {decays} {source}".encode())
        require_same(self._comm, parameters, (memory.iteration, memory.seed, self._options.krylov_dim, settings))
        theta = standing(parameters, memory.accepted, memory.d_prev, self._comm)
        lean = lean_graphs(parameters.params)
        with AsBefore(parameters, theta, self.state), torch.enable_grad(), self._full_precision(), lean:
            objective, draw_sets = self._prepare(closure, sets, memory, parameters)
            self._builder.require_room(objective)
            if memory.iteration:
                objective.first_look = steady
            else:
                warn_if_reduced(parameters.params)
                first = draw_sets(memory)
                check_consistency(objective, first, curvature_of_outputs=self._options.curvature != "hessian")
                if isinstance(first, Draw):
                    together(self._comm, first.warn_if_random)
            if not self._builder.announced:
                first = draw_sets(memory)
                together(self._comm, lambda: len(first.b))  # load it
                self._builder.announce(objective, first.b)
            report, memory = ksd_step(objective, draw_sets, memory, self._settings, theta)
            self._store(parameters, memory)
        return report

    def settle(self, closure: Callable[..., Any], sets: Subsets | None = None) -> Settlement:
        """Check the last step of a run, as the next one would have: undo it if it raised the loss on A.

        Returns:
            The loss on A that training ends with, and whether the last step was kept.

        Example:
            >>> import torch
            >>> from krylov_descent import KSD, Subsets
            >>> w = torch.nn.Parameter(torch.zeros(2))
            >>> sets = Subsets((torch.randn(100, 2),), batch_size=50, seed=0)
            >>> optimizer = KSD([w], krylov_dim=2)
            >>> def closure(batch):
            ...     r = batch[0] - w
            ...     return r.square().sum(1).mean(), r
            >>> report = optimizer.step(closure, sets)
            >>> optimizer.settle(closure, sets).loss <= report.loss
            True
        """
        no_inference_mode()
        parameters = self._parameters()
        memory = self._remember(parameters)
        theta = standing(parameters, memory.accepted, memory.d_prev, self._comm)
        lean = lean_graphs(parameters.params)
        with AsBefore(parameters, theta, self.state), torch.enable_grad(), self._full_precision(), lean:
            objective, draw_sets = self._prepare(closure, sets, memory, parameters)
            settlement, settled = settle(objective, draw_sets(memory), memory)
            if not settlement.accepted:
                self._store(parameters, settled)
        return settlement

    def _prepare(
        self, closure: Callable[..., Any], sets: Subsets | None, memory: Memory, parameters: ParameterVector
    ) -> tuple[Objective, Callable[[Memory], StepSets]]:
        """The objective over the groups as they are now, and what draws the sets of this iteration."""
        objective = self._objective(closure, sets, parameters)
        return objective, drawing(sets, memory.iteration, self._options.krylov_dim, self._comm)

    def _mesh_comm(self, parameters: ParameterVector) -> Comm:
        if not isinstance(self._comm, (SingleProcess, MeshComm)):
            raise ValueError(
                "The parameters are DTensors, which have a mesh of their own: process_group does not go with them. "
                "For data parallelism give the mesh a dimension along which parameters are Replicate()."
            )
        return MeshComm(parameters.params, parameters.sizes)

    def basis(self) -> Tensor:
        """V of the last step: orthonormal rows [m, P] for ``report.coefficients``; a copy, a collective, to look at.

        Raises:
            ValueError: no step was taken since this optimizer was made or loaded.
        """
        rows = self._builder.rows
        if rows is None or rows.m == 0:
            raise ValueError("There is no basis: no step was taken since this optimizer was made. Call step first.")
        return torch.stack([self._comm.all_gather(v, self.numel) for v in rows.tensor()])

    @property
    def numel(self) -> int:
        """P, the number of trainable parameters."""
        return self._parameters().numel

    def whole_state(self) -> WholeState:
        """What a run remembers, put together from all ranks; a collective, for checkpoints.

        Returns:
            Vectors [P], numbers and the preconditioner's factors, by name. Vectors and factors are in host memory of
            rank 0, and may be those that the optimizer uses; other ranks get the numbers alone.

        Raises:
            ValueError: the parameters are DTensors, or the ranks are not at the same step.
        """
        parameters = self._parameters()
        memory = together(self._comm, lambda: self._remember(parameters))
        parts, numbers = memory_parts(memory)
        vectors, factors = gathered(self._comm, parameters, memory.iteration, parts, memory.factors or {})
        return vectors, numbers, factors

    def check_whole_state(self, state: WholeState) -> None:
        """Raise the ValueError of ``load_whole_state``; of tensors on the device "meta", for their shapes alone."""
        require_whole(state, self._parameters())

    def load_whole_state(self, state: WholeState) -> None:
        """Take what ``whole_state`` gave on rank 0, whatever the number of ranks; each is given all of it.

        Raises:
            ValueError: it is of another optimizer or model, or not finite; nothing is changed then.
        """
        parameters = self._parameters()
        self._store(parameters, memory_of_whole(state, parameters, self._comm))

    def _remember(self, parameters: ParameterVector) -> Memory:
        return read_memory(self.state, self._first_parameter(), parameters, self._options.seed, self._comm)

    def _store(self, parameters: ParameterVector, memory: Memory) -> None:
        write_memory(self.state, self._first_parameter(), parameters, memory, self._comm)
