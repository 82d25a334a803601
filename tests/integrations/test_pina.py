"""PINA's solvers with KSD: its own loss, weightings, inverse problems, the Trainer's checkpoints, refusals."""

from __future__ import annotations

import doctest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    # torch_geometric, which PINA imports, compiles functions with torch.jit.script.
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
    formatwarning = warnings.formatwarning
    pytest.importorskip("pina")
    from krylov_descent.integrations import pina as integration

    warnings.formatwarning = formatwarning  # PINA's import replaces it

from lightning.pytorch.callbacks import ModelCheckpoint
from pina import Condition, LabelTensor, Trainer
from pina.callback import SwitchOptimizer
from pina.domain import CartesianDomain
from pina.equation import Equation
from pina.equation.zoo import FixedValue
from pina.model import FeedForward
from pina.operator import laplacian
from pina.optim import TorchOptimizer
from pina.problem import InverseProblem, SpatialProblem
from pina.solver import GradientPhysicsInformedSingleModelSolver, RBAPhysicsInformedSingleModelSolver
from pina.weighting import ScalarWeighting, SelfAdaptiveWeighting

from krylov_descent import KSD, GaussNewtonFlow, StepReport
from krylov_descent.flow import sketch as sketch_memory
from krylov_descent.flow.row_sampling import BatchRows
from krylov_descent.integrations.pina import KSDPINN, KSDSolver, KSDSupervisedSolver
from krylov_descent.objective.workspace import Workspace

pytestmark = [
    # Lightning 2.6 with torch 2.13.
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
    # Lightning, of every solver of PINA that is trained without a validation split.
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    # Lightning, of the data loaders of PINA, which hold one batch.
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

PI = torch.pi
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "shuffle": False,
}


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() == torch.float32


def sine(x: LabelTensor) -> LabelTensor:
    return torch.sin(PI * x.extract(["x"]))


def forward(x: LabelTensor, u: LabelTensor) -> LabelTensor:
    return laplacian(u, x, components=["u"], d=["x"]) + PI**2 * sine(x)


def backward(x: LabelTensor, u: LabelTensor, params: dict[str, Any]) -> LabelTensor:
    return laplacian(u, x, components=["u"], d=["x"]) + params["c"] * sine(x)


class Poisson(SpatialProblem):  # type: ignore[misc]
    """-u'' = π² sin πx on (0, 1), u = 0 at both ends."""

    output_variables = ["u"]  # noqa: RUF012
    spatial_domain = CartesianDomain({"x": [0, 1]})
    domains = {"D": spatial_domain, "left": CartesianDomain({"x": 0.0}), "right": CartesianDomain({"x": 1.0})}  # noqa: RUF012
    conditions = {  # noqa: RUF012
        "D": Condition(domain="D", equation=Equation(forward)),
        "left": Condition(domain="left", equation=FixedValue(0.0)),
        "right": Condition(domain="right", equation=FixedValue(0.0)),
    }

    def solution(self, x: LabelTensor) -> LabelTensor:
        return sine(x)


def poisson() -> Poisson:
    problem = Poisson()
    problem.discretise_domain(30, "grid", domains="D")
    problem.discretise_domain(1, "grid", domains=["left", "right"])
    return problem


def network() -> FeedForward:
    return FeedForward(1, 1, inner_size=12, n_layers=2, func=torch.nn.Tanh)


def train(solver: Any, epochs: int, **arguments: Any) -> Trainer:
    path = arguments.pop("ckpt_path", None)
    trainer = Trainer(solver, max_epochs=epochs, **{"enable_checkpointing": False, **QUIET, **arguments})
    trainer.train(ckpt_path=path, weights_only=None if path is None else False)
    return trainer


def error(solver: Any) -> float:
    x = LabelTensor(torch.linspace(0, 1, 101)[:, None], ["x"])
    with torch.no_grad():
        return float((solver(x).as_subclass(torch.Tensor) - torch.sin(PI * x.as_subclass(torch.Tensor))).abs().max())


def test_solves_poisson_in_the_trainer() -> None:
    reports: list[StepReport] = []
    solver = KSDPINN(poisson(), network(), weighting=ScalarWeighting({"left": 10.0, "right": 10.0, "D": 1.0}))
    solver.on_report = reports.append
    expected = loss_by_hand(solver)
    trainer = train(solver, 12)
    assert reports[0].loss == pytest.approx(expected, rel=1e-5)
    assert error(solver) < 1e-3
    metrics = trainer.callback_metrics
    assert trainer.global_step == len(reports) == 12
    assert metrics["train_loss"] == pytest.approx(reports[-1].search_loss_after, rel=1e-3)
    terms = metrics["D_loss"] + 10 * metrics["left_loss"] + 10 * metrics["right_loss"]
    assert metrics["train_loss"] == pytest.approx(terms.item(), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(reports[-1].grad_norm, rel=1e-6)


def loss_by_hand(solver: Any) -> float:
    """1 · mean of the squared residual, and 10 · the square at each end."""
    x = torch.linspace(0, 1, 30)[:, None].requires_grad_()
    u = solver.model(x)
    (u_x,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    ends = solver.model(torch.tensor([[0.0], [1.0]]))
    loss: torch.Tensor = (u_xx + PI**2 * torch.sin(PI * x)).square().mean() + 10 * ends.square().sum()
    return loss.item()


class Inverse(SpatialProblem, InverseProblem):  # type: ignore[misc]
    """-u'' = c sin πx with u observed: c is π²."""

    output_variables = ["u"]  # noqa: RUF012
    spatial_domain = CartesianDomain({"x": [0, 1]})
    unknown_parameter_domain = CartesianDomain({"c": [0, 12]})
    domains = {"D": spatial_domain}  # noqa: RUF012
    points = LabelTensor(torch.linspace(0, 1, 11)[:, None], ["x"])
    observed = LabelTensor(torch.sin(PI * torch.linspace(0, 1, 11)[:, None]), ["u"])
    conditions = {  # noqa: RUF012
        "D": Condition(domain="D", equation=Equation(backward)),
        "data": Condition(input=points, target=observed),
    }


def inverse(**arguments: Any) -> KSDPINN:
    problem = Inverse()
    problem.discretise_domain(20, "grid", domains="D")
    return KSDPINN(problem, network(), weighting=ScalarWeighting({"D": 1.0, "data": 100.0}), **arguments)


def rows_together(solver: Any) -> bool:
    """Whether the flow had its rows at the cost of a few gradients, and not by a backward pass each."""
    workspace: Workspace = solver.optimizer.instance._workspace
    return not workspace.of(BatchRows).refuted


def method_of(solver: Any) -> type:
    solver.configure_optimizers()
    return type(solver.optimizer.instance)


def test_the_method_that_is_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The flow for squared residuals in float64, if it fits; and KSD elsewhere."""
    solver = KSDPINN(poisson(), network())
    assert method_of(solver) is KSD
    assert "KSD is taken: GaussNewtonFlow was ahead in float64" in caplog.text
    solver.double()  # as Trainer(precision="64-true") does, when the solver is there already
    assert method_of(solver) is GaussNewtonFlow
    assert method_of(KSDPINN(poisson(), network().double(), optimizer=TorchOptimizer(KSD, krylov_dim=9))) is KSD
    assert method_of(KSDPINN(poisson(), network().double(), loss=torch.nn.L1Loss())) is KSD
    monkeypatch.setattr(sketch_memory, "at_hand", lambda device: 1 << 20)
    assert method_of(KSDPINN(poisson(), network().double())) is KSD


def test_the_flow() -> None:
    weighting = ScalarWeighting({"left": 10.0, "right": 10.0, "D": 1.0})
    optimizer = TorchOptimizer(GaussNewtonFlow)
    solver = KSDPINN(poisson(), network(), optimizer=optimizer, weighting=weighting)
    train(solver, 60)
    assert error(solver) < 1e-2
    assert rows_together(solver)


def test_an_inverse_problem_with_the_flow() -> None:
    solver = inverse(optimizer=TorchOptimizer(GaussNewtonFlow))
    train(solver, 60)
    assert solver.problem.unknown_parameters["c"].item() == pytest.approx(torch.pi**2, rel=5e-2)
    assert rows_together(solver)


def test_inverse_problem_and_exact_resume(tmp_path: Path) -> None:
    whole = inverse()
    keep = ModelCheckpoint(dirpath=tmp_path, save_top_k=-1, filename="{epoch}")
    train(whole, 12, callbacks=[keep], enable_checkpointing=True)
    c = whole.problem.unknown_parameters["c"]
    assert c.item() == pytest.approx(torch.pi**2, rel=1e-2)

    torch.manual_seed(1)
    resumed = inverse()
    assert resumed.problem.unknown_parameters["c"] != c
    train(resumed, 12, callbacks=[keep], enable_checkpointing=True, ckpt_path=tmp_path / "epoch=5.ckpt")
    assert torch.equal(resumed.problem.unknown_parameters["c"], c)
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_unknown_parameters_stay_in_their_domain() -> None:
    solver = inverse()
    solver.problem.unknown_parameter_domain = CartesianDomain({"c": [0, 5]})
    train(solver, 6)
    assert solver.problem.unknown_parameters["c"].item() == 5


def test_a_weighting_that_follows_the_losses_is_fixed_within_a_step() -> None:
    reports: list[StepReport] = []
    solver = KSDPINN(poisson(), network(), weighting=SelfAdaptiveWeighting())
    solver.on_report = reports.append
    train(solver, 10)
    assert all(report.search_loss_after < report.search_loss_before for report in reports)
    assert error(solver) < 2e-2
    assert "update_weights" not in vars(solver.weighting)


class KSDGradientPINN(KSDSolver, GradientPhysicsInformedSingleModelSolver):  # type: ignore[misc]
    pass


def test_another_solver_of_pina() -> None:
    solver = KSDGradientPINN(poisson(), network(), regularization_weight=0.01, regularized_conditions="D")
    trainer = train(solver, 6)
    assert trainer.callback_metrics["train_loss"] < 1e-1


def test_supervised_with_validation() -> None:
    class Fit(SpatialProblem):  # type: ignore[misc]
        output_variables = ["u"]  # noqa: RUF012
        spatial_domain = CartesianDomain({"x": [0, 1]})
        conditions = {"data": Condition(input=Inverse.points, target=Inverse.observed)}  # noqa: RUF012

    solver = KSDSupervisedSolver(Fit(), network(), optimizer=TorchOptimizer(KSD, krylov_dim=10))
    trainer = train(solver, 10, train_size=0.8, val_size=0.2, shuffle=True)
    assert trainer.callback_metrics["train_loss"] < 1e-4
    assert trainer.callback_metrics["val_loss"] < 1e-1


def test_switch_from_adam() -> None:
    solver = KSDPINN(poisson(), network(), optimizer=TorchOptimizer(torch.optim.Adam, lr=1e-2))
    reports: list[StepReport] = []
    solver.on_report = reports.append
    trainer = train(solver, 12, callbacks=[SwitchOptimizer(TorchOptimizer(KSD), epoch_switch=5)])
    assert len(reports) == 7
    assert trainer.callback_metrics["train_loss"] < 1e-2 * reports[0].loss


def test_refusals() -> None:
    class KSDRBA(KSDSolver, RBAPhysicsInformedSingleModelSolver):  # type: ignore[misc]
        pass

    with pytest.raises(ValueError, match="updated once a step"):
        KSDRBA(poisson(), network())
    with pytest.raises(ValueError, match="without batch_size"):
        train(KSDPINN(poisson(), network()), 1, batch_size=10)


def test_docstrings() -> None:
    assert doctest.testmod(integration, extraglobs={"torch": torch}).failed == 0
