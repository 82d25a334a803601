"""DeepXDE with KSD: its own loss, all kinds of terms, its loop and files, exact resume, refusals."""

from __future__ import annotations

import doctest
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from krylov_descent import KSD, GaussNewtonFlow, StepReport
from krylov_descent.flow import sketch as sketch_memory
from krylov_descent.flow.row_sampling import BatchRows
from krylov_descent.objective.workspace import Workspace

os.environ.setdefault("DDE_BACKEND", "pytorch")
dde = pytest.importorskip("deepxde")

from krylov_descent.integrations import deepxde as integration  # noqa: E402
from krylov_descent.integrations.deepxde import compile_ksd  # noqa: E402

Array = np.ndarray[Any, np.dtype[Any]]


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    """DeepXDE sets the default dtype and draws from global generators: as before after each test."""
    dtype, states = torch.get_default_dtype(), (random.getstate(), np.random.get_state(), torch.get_rng_state())  # noqa: NPY002
    precision = dde.config.default_float()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    dde.config.set_default_float("float64")
    yield
    dde.config.set_default_float(precision)
    torch.set_default_dtype(dtype)
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


def poisson(x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    residual: torch.Tensor = dde.grad.hessian(u, x) + np.pi**2 * torch.sin(np.pi * x)
    return residual


def solution(x: Array) -> Array:
    y: Array = np.sin(np.pi * x)
    return y


def everywhere(x: Array, on_boundary: bool) -> bool:
    return on_boundary


def network(inputs: int = 1, **arguments: Any) -> Any:
    return dde.nn.FNN([inputs, 16, 16, 1], "tanh", "Glorot uniform", **arguments)


def model(conditions: Callable[[Any], list[Any]] | None = None, **arguments: Any) -> Any:
    """-u'' = π² sin πx on (0, 1); u = 0 at both ends unless other conditions are given."""
    geometry = dde.geometry.Interval(0, 1)
    conditions = conditions or (lambda g: [dde.icbc.DirichletBC(g, solution, everywhere)])
    data = dde.data.PDE(geometry, poisson, conditions(geometry), num_domain=30, num_boundary=2, solution=solution)
    return dde.Model(data, network(**arguments))


def error(trained: Any) -> float:
    x = np.linspace(0, 1, 101)[:, None]
    return float(dde.metrics.l2_relative_error(solution(x), trained.predict(x)))


def test_solves_poisson_with_its_own_loop(tmp_path: Path) -> None:
    m = model()
    compile_ksd(m, metrics=["l2 relative error"], loss_weights=[1, 100], verbose=0)
    seen: list[int] = []

    class Count(dde.callbacks.Callback):  # type: ignore[misc, name-defined]
        def on_epoch_end(self) -> None:
            seen.append(self.model.train_state.iteration)

    history, state = m.train(iterations=60, display_every=20, callbacks=[Count()], verbose=0)
    assert error(m) < 1e-5
    assert seen == list(range(1, 61))
    assert history.steps == [0, 20, 40, 60]
    assert sum(history.loss_train[-1]) < 1e-6 * sum(history.loss_train[0])
    assert state.best_step == 60
    assert state.best_metrics[0] < 1e-5
    dde.saveplot(history, state, issave=True, isplot=False, output_dir=tmp_path)
    assert np.loadtxt(tmp_path / "loss.dat").shape == (4, 6)


def mixed_terms() -> tuple[Any, list[float]]:
    """Burgers' equation with four kinds of terms beside the residual."""
    space = dde.geometry.Interval(-1, 1)
    geometry = dde.geometry.GeometryXTime(space, dde.geometry.TimeDomain(0, 1))

    def burgers(x: torch.Tensor, u: torch.Tensor) -> list[torch.Tensor]:
        u_x, u_t = (dde.grad.jacobian(u, x, j=j) for j in (0, 1))
        return [u_t + u * u_x - 0.1 * dde.grad.hessian(u, x, i=0, j=0)]

    points = np.array([[0.5, 0.5], [-0.5, 0.25]])
    terms = [
        dde.icbc.DirichletBC(geometry, lambda x: 0, lambda x, on: on and x[0] < 0),
        dde.icbc.NeumannBC(geometry, lambda x: 1, lambda x, on: on and x[0] > 0),
        dde.icbc.PeriodicBC(geometry, 0, everywhere, derivative_order=1),
        dde.icbc.PointSetBC(points, np.array([[-0.3], [0.4]])),
        dde.icbc.IC(geometry, lambda x: -np.sin(np.pi * x[:, :1]), lambda x, on: on),
    ]
    data = dde.data.TimePDE(geometry, burgers, terms, num_domain=40, num_boundary=10, num_initial=10)
    return dde.Model(data, network(inputs=2)), [1.0, 3.0, 0.5, 2.0, 10.0, 4.0]


def test_the_loss_is_that_of_deepxde() -> None:
    reports: list[StepReport] = []
    m, weights = mixed_terms()
    compile_ksd(m, loss_weights=weights, method=KSD, on_report=reports.append, verbose=0)
    history, _ = m.train(iterations=6, display_every=1, verbose=0)
    assert [report.loss for report in reports] == pytest.approx([sum(t) for t in history.loss_train[:-1]], rel=1e-13)
    assert reports[-1].search_loss_after < 0.1 * reports[0].loss
    # Each term is what it is with one of DeepXDE's own optimizers.
    m.compile("adam", lr=1e-3, loss_weights=weights, verbose=0)
    assert np.array_equal(m.train(iterations=0, verbose=0)[0].loss_train[-1], history.loss_train[6])


def rows_together(optimizer: Any) -> bool:
    """Whether the flow had its rows at the cost of a few gradients, and not by a backward pass each."""
    workspace: Workspace = optimizer._workspace
    return not workspace.of(BatchRows).refuted


def method_of(m: Any, **arguments: Any) -> type:
    return type(compile_ksd(m, verbose=0, **arguments))


def test_the_method_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow for an equation, and KSD for what the flow cannot do, or if it is asked for."""
    assert method_of(model()) is GaussNewtonFlow
    assert method_of(mixed_terms()[0]) is GaussNewtonFlow
    assert method_of(model(), method=KSD) is KSD
    for loss in ("mse", "mean squared error", ["MSE", "MSE"]):
        assert method_of(model(), loss=loss) is GaussNewtonFlow
    for arguments in ({"krylov_dim": 20}, {"curvature": "hessian"}, {"loss": "mean l2 relative error"}):
        assert method_of(model(), **arguments) is KSD
    assert method_of(model(), loss=["MSE", "MAE"]) is KSD
    assert method_of(model(regularization=["l2", 1e-4])) is GaussNewtonFlow
    assert method_of(model(regularization=["l1", 1e-4])) is KSD  # it passes by the residuals
    x = np.linspace(0, 1, 5)[:, None]
    assert method_of(dde.Model(dde.data.DataSet(x, x, x, x), network())) is KSD
    room = int(3.3 * 400 * 8 * sum(p.numel() for p in model().net.parameters()))
    assert method_of(model(), memory_budget=room) is GaussNewtonFlow
    assert method_of(model(), memory_budget=room - 1) is KSD
    monkeypatch.setattr(sketch_memory, "at_hand", lambda device: room)  # not all of it may be taken
    assert method_of(model()) is KSD
    assert method_of(model(), method=GaussNewtonFlow) is GaussNewtonFlow
    assert method_of(model(), rows=300) is GaussNewtonFlow
    monkeypatch.setattr(sketch_memory, "at_hand", lambda device: 2 * room)
    assert method_of(model()) is GaussNewtonFlow
    dde.config.set_default_float("float32")
    assert method_of(model()) is KSD


def test_what_speaks_against_the_flow_is_said(caplog: pytest.LogCaptureFixture) -> None:
    m = model()
    m.net.linears[1] = torch.nn.utils.parametrizations.weight_norm(m.net.linears[1])
    compile_ksd(m, verbose=0)
    m.train(iterations=1, display_every=1)
    assert "take a backward pass each" in caplog.text
    dde.config.set_default_float("float32")
    compile_ksd(model(), verbose=0)
    assert "float64" not in caplog.text
    compile_ksd(model(), verbose=1)
    assert "KSD is taken: GaussNewtonFlow was ahead in float64" in caplog.text


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_the_flow(precision: str) -> None:
    dde.config.set_default_float(precision)
    m = model()
    optimizer = compile_ksd(m, loss_weights=[1, 100], method=GaussNewtonFlow, verbose=0)
    m.train(iterations=30, display_every=30, verbose=0)
    assert error(m) < (1e-2 if precision == "float32" else 1e-4)
    assert rows_together(optimizer)


def test_the_flow_with_all_kinds_of_terms() -> None:
    """Points of all terms go through the network in one call; a periodic residual is of two of them."""
    reports: list[StepReport] = []
    m, weights = mixed_terms()
    optimizer = compile_ksd(m, loss_weights=weights, method=GaussNewtonFlow, on_report=reports.append, verbose=0)
    m.train(iterations=40, display_every=40, verbose=0)
    assert reports[-1].search_loss_after < 0.1 * reports[0].loss
    assert rows_together(optimizer)


def test_steps_are_those_of_a_closure_written_by_hand() -> None:
    m = model()
    start = {name: p.clone() for name, p in m.net.state_dict().items()}
    compile_ksd(m, loss_weights=[2, 50], method=KSD, verbose=0)
    m.train(iterations=3, display_every=1, verbose=0)
    by_hand = network()
    by_hand.load_state_dict(start)
    x = torch.tensor(m.data.train_x, requires_grad=True)  # the two ends first

    def closure() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        u = by_hand(x)
        (u_x,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        f = (u_xx + np.pi**2 * torch.sin(np.pi * x))[2:]
        b = u[:2] - torch.tensor(solution(m.data.train_x_bc))
        return 2 * f.square().mean() + 50 * b.square().mean(), (f, b)

    optimizer = KSD(by_hand.parameters())
    for _ in range(3):
        optimizer.step(closure)
    for p, q in zip(m.net.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_hard_constraints_need_no_boundary_term() -> None:
    m = model(lambda g: [])
    m.net.apply_output_transform(lambda x, u: x * (1 - x) * u)
    compile_ksd(m, verbose=0)
    m.train(iterations=10, display_every=10, verbose=0)
    assert error(m) < 1e-5


def inverse() -> tuple[Any, torch.Tensor]:
    """-u'' = c sin πx with u observed: c is π²."""
    c = dde.Variable(1.0)

    def pde(x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        residual: torch.Tensor = dde.grad.hessian(u, x) + c * torch.sin(np.pi * x)
        return residual

    geometry = dde.geometry.Interval(0, 1)
    points = np.linspace(0, 1, 11)[:, None]
    data = dde.data.PDE(geometry, pde, [dde.icbc.PointSetBC(points, solution(points))], num_domain=30)
    return dde.Model(data, network()), c


@pytest.mark.parametrize(("method", "iterations"), [(KSD, (6, 9)), (GaussNewtonFlow, (60, 20))])
def test_inverse_problem_and_exact_resume(method: Any, iterations: tuple[int, int], tmp_path: Path) -> None:
    whole, c = inverse()
    optimizer = compile_ksd(whole, external_trainable_variables=c, loss_weights=[1, 100], method=method, verbose=0)
    whole.train(iterations=iterations[0], display_every=100, verbose=0)
    path = whole.save(str(tmp_path / "model"))
    whole.train(iterations=iterations[1], display_every=100, verbose=0)
    assert c.item() == pytest.approx(np.pi**2, rel=1e-3 if method is KSD else 1e-2)
    assert method is KSD or rows_together(optimizer)

    resumed, again = inverse()
    compile_ksd(resumed, external_trainable_variables=[again], loss_weights=[1, 100], method=method, verbose=0)
    resumed.train(iterations=iterations[1], display_every=100, model_restore_path=path, verbose=0)
    assert torch.equal(again, c)
    for p, q in zip(whole.net.parameters(), resumed.net.parameters(), strict=True):
        assert torch.equal(p, q)

    without, _ = inverse()
    compile_ksd(without, method=method, verbose=0)
    with pytest.raises(ValueError, match="external_trainable_variables"):
        without.restore(path)


def test_points_may_be_resampled() -> None:
    m = model()
    m.data.train_distribution = "pseudo"
    compile_ksd(m, loss_weights=[1, 100], verbose=0)
    before = m.data.train_x_all
    m.train(iterations=60, display_every=60, callbacks=[dde.callbacks.PDEPointResampler(period=3)], verbose=0)
    assert not np.array_equal(m.data.train_x_all, before)
    assert error(m) < 1e-3


def test_training_that_is_finished_ends_and_says_why() -> None:
    dde.config.set_default_float("float32")
    x = np.linspace(-1, 1, 20, dtype=np.float32)[:, None]
    m = dde.Model(dde.data.DataSet(x, 2 * x + 1, x, 2 * x + 1), dde.nn.FNN([1, 1], "tanh", "Glorot uniform"))
    compile_ksd(m, verbose=0)
    with pytest.warns(UserWarning, match=r"KSD ended the training after step \d+. .*float64"):
        _, state = m.train(iterations=1000, display_every=1000, verbose=0)
    assert state.iteration < 50
    assert m.net.linears[0].weight.item() == pytest.approx(2, rel=1e-5)


def test_l2_regularisation_is_a_weight_decay_of_the_network_alone() -> None:
    m, c = inverse()
    m.net.regularizer = ("l2", 1e-3)
    optimizer = compile_ksd(m, external_trainable_variables=c, krylov_dim=5, verbose=0)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-3, 0.0]
    assert m.opt is optimizer


def test_an_operator_network() -> None:
    """u(x) = a·x² for functions a, which the branch sees at three points."""
    a, x = np.linspace(-1, 1, 6)[:, None], np.linspace(0, 1, 8)[:, None]
    data = dde.data.TripleCartesianProd((np.repeat(a, 3, 1), x), a * x.T**2, (np.repeat(a, 3, 1), x), a * x.T**2)
    m = dde.Model(data, dde.nn.DeepONetCartesianProd([3, 8, 8], [1, 8, 8], "tanh", "Glorot uniform"))
    compile_ksd(m, verbose=0)
    history, _ = m.train(iterations=8, display_every=8, verbose=0)
    assert history.loss_train[-1][0] < 1e-3 * history.loss_train[0][0]


def test_batches_and_mixed_precision_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()
    compile_ksd(m, verbose=0)
    with pytest.raises(ValueError, match="batch_size=None"):
        m.train(iterations=1, batch_size=8, verbose=0)
    monkeypatch.setattr(dde.config, "mixed", True)
    with pytest.raises(ValueError, match="float64"):
        compile_ksd(model())


def test_docstrings() -> None:
    assert doctest.testmod(integration, extraglobs={"torch": torch}).failed == 0
