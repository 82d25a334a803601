"""``KSD``: its arguments, their checks, and the strategies that they select; no maths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from krylov_descent.base import CurvatureOptimizer, whole
from krylov_descent.curvature import CURVATURES, MicrobatchGraph
from krylov_descent.distributed import Comm, ProcessGroup, Ranks, SingleProcess
from krylov_descent.distributed.mesh import MeshComm
from krylov_descent.krylov.memory import ksd_phases
from krylov_descent.krylov.search import ModelSearch, Search, SubspaceSearch
from krylov_descent.krylov.step import KSDState, Strategies, ksd_step
from krylov_descent.krylov.subspace import BasisBuffer, Krylov, SubspaceBuilder
from krylov_descent.objective.objective import Objective
from krylov_descent.preconditioners.fisher import Fisher
from krylov_descent.preconditioners.interface import NoPreconditioner, Preconditioner
from krylov_descent.preconditioners.kronecker import Kronecker
from krylov_descent.report import StepReport
from krylov_descent.safety.budget import Storage
from krylov_descent.safety.peak import Phases
from krylov_descent.samples.interface import Microbatch, SamplePolicy
from krylov_descent.stepping.acceptance import Acceptance, Sampler, acceptance_of
from krylov_descent.vectors.parameters import ParameterVector

_PRECONDITIONERS = {"fisher": Fisher(), "kronecker": Kronecker(), None: NoPreconditioner()}

#: The settings of Vinyals & Povey 2011: K = 20, Gauss–Newton, D the exact diagonal of the Fisher matrix for every
#: module (``Fisher`` tells its cost) and ε = 1e-4 (section 4), 30 BFGS iterations (section 5.2), d_prev = e₁ at first
#: (Algorithm 3, line 1), every step kept.
PAPER: dict[str, Any] = {
    "krylov_dim": 20,
    "curvature": "ggn",
    "preconditioner": Fisher(floor=1e-4, exact=True),
    "previous": "e1",
    "search": Search(iterations=30, evaluations=120, floor=1e-4, negative="floor"),
    "rollback": False,
}

#: Experimental settings for deep networks and much data, with ``Growing`` sets: many steps, each in the span of one
#: direction and the last step, and of five earlier steps once A holds all samples.
DEEP: dict[str, Any] = {"krylov_dim": 1, "preconditioner": "kronecker", "search": ModelSearch(evaluations=8)}


class KSD(CurvatureOptimizer):
    """Minimises a loss by Krylov Subspace Descent (Vinyals & Povey 2011), without learning rate or damping.

    Each step takes the gradient on a sample set A, builds a Krylov basis from curvature products on a set B, adds
    the previous step, and minimises the true loss over that subspace with BFGS on a set C.

    Args:
        params: parameters or parameter groups; a group may have its own ``weight_decay``. Frozen parameters
            (``requires_grad=False``) are left alone. The groups' ``lr`` is inert, for trainers that read it.
        krylov_dim: K, the number of Krylov vectors; 20 is the paper's. Memory is K+1 vectors of all parameters;
            with K = 1, ten more once ``Growing`` sets hold all samples and there is no ``memory_budget``.
        curvature: "ggn", the Gauss–Newton matrix (the paper's, and the best there); "hessian", exact and possibly
            indefinite; "fisher", the empirical Fisher matrix; or a ``MicrobatchGraph`` of your own.
        preconditioner: "fisher", the diagonal of the per-sample Fisher matrix (the paper's), estimated outside of dense
            and convolutional layers unless ``Fisher(exact=True)``; "kronecker", a factored Gauss–Newton matrix of each
            layer, averaged over steps, for small sets; ``Fisher(...)`` or ``Kronecker(...)`` with other settings; a
            ``Preconditioner`` of your own; or None.
        previous: "step" adds the previous step to the basis (nothing at the first step); "e1" also adds the first
            unit vector at the first step, as the paper does; None adds neither.
        search: the search over the subspace: ``Search(...)``, the paper's BFGS; ``ModelSearch(...)``, the quadratic
            model's minimum if the loss agrees; or a ``SubspaceSearch`` of your own.
        weight_decay: c of ½·c·‖θ‖² in value, gradient and product alike, per group; 0 as in torch.optim.LBFGS.
        rollback: with sets, undo a step that raised the loss on A, and double C. The paper keeps every step. A step
            to where the loss or its gradient is not finite is always undone.
            Or an ``Acceptance`` of your own.
        memory_budget: bytes that V, Kronecker factors and the graphs of B may take. Graphs that do not fit are rebuilt
            for every product, with a warning at the first step; if V or the factors do not fit, an error says what
            would. None for no limit.
        storage: dtype and device of V: ``Storage(dtype=torch.bfloat16)`` halves it, ``Storage(device="cpu")`` keeps it
            in host memory.
        seed: the seed of the random signs in the Fisher diagonal, unless it is exact.
        subspace: a ``SubspaceBuilder`` of your own in place of the Krylov subspace, whose settings (``krylov_dim``,
            ``curvature``, ``previous``, ``memory_budget``, ``storage``) are then ignored.
        process_group: a torch.distributed group whose ranks take one step together; each has its share of the sets and
            1/R of V. All hold the same parameters and call ``step`` with the same closure and sets.
            ``krylov_descent.distributed.Ranks(group, wire=torch.bfloat16)`` sends fewer bytes.

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

    _KEPT = ("_strategies", "_seed", "krylov_dim")

    def __init__(
        self,
        params: ParamsT,
        *,
        krylov_dim: int = 20,
        curvature: Literal["ggn", "hessian", "fisher"] | type[MicrobatchGraph] = "ggn",
        preconditioner: Literal["fisher", "kronecker"] | Preconditioner | None = "fisher",
        previous: Literal["step", "e1"] | None = "step",
        search: SubspaceSearch = Search(),  # noqa: B008 — frozen
        weight_decay: float = 0.0,
        rollback: bool | Acceptance = True,
        memory_budget: int | None = None,
        storage: Storage = Storage(),  # noqa: B008 — frozen
        seed: int = 0,
        subspace: SubspaceBuilder | None = None,
        process_group: ProcessGroup | Ranks | None = None,
    ) -> None:
        ranks = process_group if isinstance(process_group, Ranks) else Ranks(process_group)
        D = _preconditioner(preconditioner)
        if subspace is None:
            graph, room = _curvature(curvature), _budget(memory_budget)
            K, adjoined = _dimension(krylov_dim), _previous(previous)
            subspace = Krylov(K, graph, adjoined, room, _storage(storage, ranks.wire), D.bytes_in_step)
        if not isinstance(subspace, SubspaceBuilder):
            raise ValueError(f"subspace={subspace!r}: must be a SubspaceBuilder of your own, or None for Krylov's.")
        if not hasattr(search, "minimise"):
            raise ValueError(f"search={search!r}: must be a krylov_descent.Search(...) or ModelSearch(...).")
        self._strategies = Strategies(D, subspace, search, acceptance_of(rollback))
        self._seed = whole("seed", seed) % (1 << 64)
        self.krylov_dim = subspace.krylov_dim
        super().__init__(params, weight_decay, ranks.comm())

    @property
    def _acceptance(self) -> Acceptance:
        return self._strategies.acceptance

    def _fresh(self, policy: SamplePolicy) -> KSDState:
        use = self._strategies
        return KSDState(
            seed=self._seed,
            policy=type(policy).__name__,
            samples=policy.init(),
            preconditioner=use.preconditioner.init(),
            subspace=use.builder.init(),
            search=use.search.init(),
            acceptance=use.acceptance.init(),
        )

    def _prepare(self, objective: Objective, samples: Sampler, state: Any) -> None:
        self._strategies.builder.prepare(objective, lambda: samples.choose(state.iteration, state.samples).sets)

    def _advance(
        self, objective: Objective, samples: Sampler, state: Any, theta: Callable[[], Tensor]
    ) -> tuple[StepReport, KSDState]:
        return ksd_step(objective, samples, self._strategies, state, theta)

    def _settings(self) -> str:
        use = self._strategies
        each = (use.preconditioner, use.builder, use.search, use.acceptance)
        return " ".join(repr(one) if is_dataclass(one) else type(one).__name__ for one in each)

    def _phases(self, objective: Objective, batch: Microbatch | None) -> Phases:
        return ksd_phases(objective, self._strategies, batch)

    def _needs_outputs(self) -> bool:
        return self._strategies.builder.needs_outputs

    def _mesh_comm(self, parameters: ParameterVector) -> Comm:
        if not isinstance(self._comm, (SingleProcess, MeshComm)):
            raise ValueError(
                "The parameters are DTensors, which have a mesh of their own: process_group does not go with them. "
                "For data parallelism give the mesh a dimension along which parameters are Replicate()."
            )
        return MeshComm(parameters.params, parameters.sizes)

    def basis(self) -> Tensor:
        """Return a copy of the last step's V, orthonormal rows [m, P] for ``report.coefficients``; a collective.

        Raises:
            ValueError: no step was taken since this optimizer was made or loaded.
        """
        rows = self._workspace.of(BasisBuffer).V
        if rows is None or rows.m == 0:
            raise ValueError("There is no basis: no step was taken since this optimizer was made. Call step first.")
        return torch.stack([self._comm.all_gather(v, self.numel) for v in rows.tensor()])


def _dimension(K: Any) -> int:
    if (dimension := whole("krylov_dim", K)) < 1:
        raise ValueError(f"krylov_dim={K!r}: must be a whole number ≥ 1; the paper's is 20.")
    return dimension


def _curvature(given: Any) -> type[MicrobatchGraph]:
    if isinstance(given, type) and issubclass(given, MicrobatchGraph):
        return given
    if given not in CURVATURES:
        raise ValueError(f"curvature={given!r}: must be one of {sorted(CURVATURES)}, or a MicrobatchGraph.")
    return CURVATURES[given]


def _preconditioner(given: Any) -> Preconditioner:
    if given is None or isinstance(given, str):
        if given in _PRECONDITIONERS:
            return _PRECONDITIONERS[given]
    elif not isinstance(given, type) and hasattr(given, "solve"):
        own: Preconditioner = given
        return own
    raise ValueError(
        f"preconditioner={given!r}: must be 'fisher', 'kronecker', Fisher(...), Kronecker(...), a Preconditioner of "
        "your own, or None."
    )


def _previous(given: Any) -> Any:
    if given not in ("step", "e1", None):
        raise ValueError(f"previous={given!r}: must be 'step', 'e1' or None.")
    return given


def _budget(given: Any) -> int | None:
    if given is not None and whole("memory_budget", given) < 0:
        raise ValueError(f"memory_budget={given}: must be a number of bytes ≥ 0, or None for no limit.")
    return None if given is None else whole("memory_budget", given)


def _storage(given: Any, wire: torch.dtype | None) -> Storage:
    """Return the storage of V, in the dtype in which ranks send vectors, so that all ranks have the same rows."""
    if not isinstance(given, Storage):
        raise ValueError(f"storage={given!r}: must be a krylov_descent.Storage(...).")
    return given if wire is None or given.dtype is not None else replace(given, dtype=wire)
