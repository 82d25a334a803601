"""``GaussNewtonFlow``: its arguments and their checks; no maths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from krylov_descent.base import CurvatureOptimizer, whole
from krylov_descent.distributed import Comm, ProcessGroup, Ranks, run_on_all
from krylov_descent.flow.memory import flow_phases
from krylov_descent.flow.sketch import ROWS, refusal
from krylov_descent.flow.step import FlowSettings, FlowState, flow_step
from krylov_descent.objective.objective import Objective
from krylov_descent.report import StepReport
from krylov_descent.safety.peak import Phases
from krylov_descent.samples.interface import Microbatch, SamplePolicy
from krylov_descent.stepping.acceptance import Acceptance, Sampler, acceptance_of
from krylov_descent.vectors.parameters import ParameterVector


class _Room:
    """Whether the memory at hand was compared with the sketch: the same on all ranks, also on those without rows."""

    known = False


class GaussNewtonFlow(CurvatureOptimizer):
    """Minimises squared residuals by sketched Gauss–Newton steps: for physics-informed networks, in float64.

    Each step samples rows of the residuals' Jacobian J, solves for the damped Gauss–Newton (natural gradient)
    direction of these rows and of earlier steps, and takes a short step along it that lowers the loss:

    - Rows: a Gauss–Newton matrix of row-subsampled residuals, solved in the space of rows (Chen & Heyl 2024).
    - Momentum: φ = argmin ‖Jφ + ρ‖² + λ‖φ − μφ_prev‖², as in SPRING (Goldshlager, Abrahamsen & Lin 2024), includes the
      rows of about the last 1/(1 − μ) steps.
    - Corrections: a step is corrected until the residuals shrink straight; the first correction is geodesic
      acceleration (Transtrum & Sethna 2012).
    - Short steps: the fraction η of the direction is chosen to lower the loss, and is mostly about a tenth. All
      residuals then shrink alike, as along the Gauss–Newton flow dθ/dt = φ. λ and η adapt; if no fraction lowers the
      loss, Levenberg–Marquardt steps are tried.

    It needs a loss that is convex and separable in the model outputs (squares of residuals), up to some ten
    thousand parameters, and float64. On several ranks, each samples rows of its own samples: a step on R ranks uses
    other rows than a step in one process, unless all rows fit. With the same number of ranks a run is reproducible.

    Args:
        params: parameters or parameter groups; a group may have its own ``weight_decay``. Frozen parameters
            (``requires_grad=False``) are left alone. The groups' ``lr`` is inert, for trainers that read it.
        rows: m, the initial number of Jacobian rows in the sketch. A step costs O(m²n + m³) time and about 2.5 m·n
            numbers of memory; fewer rows capture less curvature. If the direction fails too often, m grows, up to four
            times and within ``memory_budget`` (1 GiB if there is none).
        momentum: μ, the fraction of the last direction that is kept where the sampled rows carry no information.
        weight_decay: c of ½·c·‖θ‖² in value, gradient and curvature alike, per group.
        rollback: with sets, undo a step that raised the loss on A.
        memory_budget: bytes that the sketch may take. None for the free memory.
        seed: the seed of the row sampling.
        process_group: a torch.distributed group whose ranks take one step together.

    Example:
        >>> import torch
        >>> from krylov_descent import GaussNewtonFlow
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
        >>> x = torch.linspace(-1, 1, 64, dtype=torch.float64)[:, None]
        >>> optimizer = GaussNewtonFlow(model.parameters())
        >>> def closure():
        ...     r = model(x) - torch.sin(3 * x)
        ...     return r.square().mean(), r
        >>> for _ in range(20):
        ...     report = optimizer.step(closure)
        >>> report.loss < 1e-6
        True
    """

    _KEPT = ("_flow", "_seed")
    krylov_dim = 20  # ``Subsets`` puts a twentieth of the samples in B and in C

    def __init__(
        self,
        params: ParamsT,
        *,
        rows: int = ROWS,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        rollback: bool | Acceptance = True,
        memory_budget: int | None = None,
        seed: int = 0,
        process_group: ProcessGroup | Ranks | None = None,
    ) -> None:
        if whole("rows", rows) < 1:
            raise ValueError(f"rows={rows!r}: must be a whole number ≥ 1.")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum!r}: must be a number in [0, 1).")
        if memory_budget is not None and whole("memory_budget", memory_budget) < 0:
            raise ValueError(f"memory_budget={memory_budget}: must be a number of bytes ≥ 0, or None for no limit.")
        self._flow = FlowSettings(whole("rows", rows), momentum, memory_budget, acceptance_of(rollback))
        self._seed = whole("seed", seed) % (1 << 64)
        ranks = process_group if isinstance(process_group, Ranks) else Ranks(process_group)
        super().__init__(params, weight_decay, ranks.comm())

    @property
    def _acceptance(self) -> Acceptance:
        return self._flow.acceptance

    def _fresh(self, policy: SamplePolicy) -> FlowState:
        kind, acceptance = type(policy).__name__, self._flow.acceptance.init()
        return FlowState(seed=self._seed, policy=kind, samples=policy.init(), acceptance=acceptance)

    def _advance(
        self, objective: Objective, samples: Sampler, state: Any, theta: Callable[[], Tensor]
    ) -> tuple[StepReport, FlowState]:
        return flow_step(objective, samples, self._flow, state, theta)

    def _settings(self) -> str:
        return repr(self._flow)

    def _phases(self, objective: Objective, batch: Microbatch | None) -> Phases:
        return flow_phases(objective, self._flow, batch)

    def _mesh_comm(self, parameters: ParameterVector) -> Comm:
        raise ValueError(
            "GaussNewtonFlow cannot be used with parameters on a mesh (DTensor): its Jacobian rows need whole layers. "
            "Use KSD, or plain parameters, copied on each rank, with process_group=...."
        )

    def _prepare(self, objective: Objective, samples: Sampler, state: Any) -> None:
        """Check the sets and the memory for the sketch.

        Raises:
            ValueError: the budget, or before the first sketch the free memory, is too small, or the sets grow.
        """
        comm, parameters, budget = objective.comm, objective.parameters, self._flow.memory_budget
        if samples.choose(state.iteration, state.samples).sets.grows:
            raise ValueError(
                "GaussNewtonFlow was given sets that grow, which need the curvature along the last step; the flow does "
                "not compute it. Use Subsets, or no sets, or KSD with Growing."
            )

        def check() -> None:
            numel, dtype, device = parameters.numel, parameters.dtype, parameters.device
            if said := refusal(self._flow.rows, numel, dtype, device, budget, comm.ranks):
                raise ValueError(said)

        if budget is not None:
            check()  # the same on all ranks
        elif not objective.workspace.of(_Room).known:  # later, free memory lacks the last sketch's
            run_on_all(comm, check)
            objective.workspace.of(_Room).known = True
