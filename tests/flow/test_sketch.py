"""Rows of the Jacobian, roots of the loss's Hessian, and sketches made of them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from krylov_descent import KSD, GaussNewtonFlow, Subsets
from krylov_descent.curvature.output_roots import output_roots
from krylov_descent.distributed import SingleProcess
from krylov_descent.flow import jacobian_rows as row_writing
from krylov_descent.flow.row_sampling import BatchRows, TappedGraph
from krylov_descent.flow.sketch import Sketcher
from krylov_descent.objective.objective import Objective
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.vectors.parameters import ParameterVector
from tests.least_squares import F64, Closure, dense, mlp, objective_of, pinn


def classifier() -> tuple[nn.Module, Closure]:
    model, x, y = mlp(4, 5, 3), torch.randn(12, 4, dtype=F64), torch.arange(12) % 3

    def closure() -> tuple[Tensor, Tensor]:
        logits = model(x)
        return nn.functional.cross_entropy(logits, y), logits

    return model, closure


def sequence() -> tuple[nn.Module, Closure]:
    """Linear layers at several positions of a sample."""
    model, x = mlp(3, 4, 2), torch.randn(6, 5, 3, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        z = model(x).sum(1)
        return (z - 1).square().mean(), z

    return model, closure


class Scaled(nn.Module):
    """A parameter outside of any linear layer, of one entry or of more than have columns of their own."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full(shape, 0.7))
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.scale.mean() * self.first(x)))
        return out


def scaled(*shape: int) -> tuple[nn.Module, Closure]:
    torch.manual_seed(0)
    model, x = Scaled(*shape).double(), torch.randn(9, 4, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - x[:, :1]
        return r.square().mean(), r

    return model, closure


class Once(torch.autograd.Function):
    """A square that refuses to be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return 2 * x * y


def once() -> tuple[nn.Module, Closure]:
    """A parameter outside of any linear layer whose column cannot be had by differentiating twice."""
    model, _ = scaled()
    x = torch.randn(9, 4, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        r: Tensor = Once.apply(model(x)) - x[:, :1]  # type: ignore[no-untyped-call]
        return r.square().mean(), r

    return model, closure


def inverse() -> tuple[nn.Module, Closure]:
    """Coefficients of an equation are parameters too, those of a term of their own among them."""
    model = mlp(1, 5, 1)
    model.register_parameter("c", nn.Parameter(torch.tensor([0.3, -1.2], dtype=F64)))
    x = torch.linspace(0, 1, 9, dtype=F64)[:, None].requires_grad_()

    def closure() -> tuple[Tensor, tuple[Tensor, ...]]:
        c = model.get_parameter("c")
        u = model(x)
        (u_x,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        r, b, known = (c[0].exp() * u_xx + c[1] * u * u_x)[2:], u[:2] - 1, c[:1] - 0.5
        return r.square().mean() + b.square().mean() + known.square().mean(), (r, b, known)

    return model, closure


def mixed(step: int) -> tuple[nn.Module, Closure]:
    """Outputs of two rows of the inputs each, which others share if they are but one row apart."""
    model, x = mlp(2, 5, 1), torch.rand(12, 2, dtype=F64)

    def closure() -> tuple[Tensor, tuple[Tensor, Tensor]]:
        u = model(x)[:, 0]
        r, b = u[:4] - 2 * u[step : step + 4], u[8:] - 1
        return r.square().mean() + b.square().mean(), (r, b)

    return model, closure


def joined() -> tuple[nn.Module, Closure]:
    """One call for two sets of points: rows of the outputs are not those of the layers' inputs."""
    model, x = mlp(2, 5, 1), torch.rand(11, 2, dtype=F64)

    def closure() -> tuple[Tensor, tuple[Tensor, Tensor]]:
        u = model(x)[:, 0]
        r, b = u[:8] - 1, 2 * u[8:]
        return r.square().mean() + b.square().mean(), (r, b)

    return model, closure


def averaged() -> tuple[nn.Module, Closure]:
    """The third of three outputs has rows that depend on three points each, in no order."""
    model, x = mlp(2, 5, 1), torch.rand(12, 2, dtype=F64)

    def closure() -> tuple[Tensor, tuple[Tensor, ...]]:
        u = model(x)[:, 0]
        a, b, c = u[:4] - 1, u[4:8] + 1, u[torch.randperm(12, generator=torch.Generator().manual_seed(0))]
        c = c.reshape(4, 3).mean(1)
        return a.square().mean() + b.square().mean() + c.square().mean(), (a, b, c)

    return model, closure


def integral() -> tuple[nn.Module, Closure]:
    """A number of its own: the mean over all points, 0-dimensional, beside residuals."""
    model, x = mlp(2, 5, 1), torch.rand(12, 2, dtype=F64)

    def closure() -> tuple[Tensor, tuple[Tensor, Tensor]]:
        u = model(x)[:, 0]
        r, mass = u - 1, u.mean() - 0.3
        return r.square().mean() + mass.square(), (r, mass)

    return model, closure


class Named(nn.Module):
    """Linear layers whose arguments are passed by name, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(4, 5), nn.Linear(5, 1), nn.Linear(20, 20)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(input=x, weight=self.first.weight, bias=self.first.bias)
        return self.scale * nn.functional.linear(torch.tanh(h), self.second.weight, bias=self.second.bias)


def named() -> tuple[nn.Module, Closure]:
    torch.manual_seed(0)
    model, x = Named().double(), torch.randn(9, 4, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - x[:, :1]
        return r.square().mean(), r

    return model, closure


def columns() -> tuple[nn.Module, Closure]:
    """The last of three columns has rows that depend on two points each."""
    model, x = mlp(2, 5, 3), torch.rand(12, 2, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        u, v, p = model(x).T
        z = torch.stack([u - 1, v + 1, p - p.roll(1)], 1)
        return z.square().mean(), z

    return model, closure


def reversed_rows() -> tuple[nn.Module, Closure]:
    """Of an odd number of points, the last first."""
    model, x = mlp(2, 5, 1), torch.rand(11, 2, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x).flip(0) - x[:, :1]
        return r.square().mean(), r

    return model, closure


def remembered() -> tuple[nn.Module, Closure]:
    """Layers that are computed again in every backward pass."""
    model, x = mlp(2, 5, 5, 1), torch.rand(11, 2, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        u: Tensor = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        r = u - x[:, :1]
        return r.square().mean(), r

    return model, closure


def concatenated() -> tuple[nn.Module, Closure]:
    """One vector of residuals: two equations of the same points, then two calls for boundary values."""
    model = mlp(2, 6, 6, 2)
    inside = torch.rand(15, 2, dtype=F64, requires_grad=True)
    edges = torch.rand(7, 2, dtype=F64), torch.rand(4, 2, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        u, v = model(inside).T
        (du,) = torch.autograd.grad(u.sum(), inside, create_graph=True)
        (dv,) = torch.autograd.grad(v.sum(), inside, create_graph=True)
        r = torch.cat([du[:, 0] + dv[:, 1], du[:, 1] * v - u, *(3 * model(x)[:, 0] for x in edges)])
        return r.square().mean(), r

    return model, closure


def stacked_networks() -> tuple[nn.Module, Closure]:
    """Two networks, whose results are stacked along a new dimension of points."""
    model, x = nn.ModuleList([mlp(2, 5, 1), mlp(2, 4, 1)]), torch.rand(9, 2, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        r = torch.stack([net(x)[:, 0] - k for k, net in enumerate(model)]).reshape(-1)
        return r.square().mean(), r

    return model, closure


def weight_norm() -> tuple[nn.Module, Closure]:
    """A layer whose weight is computed from two parameters."""
    model, x = mlp(2, 5, 5, 1), torch.rand(11, 2, dtype=F64)
    nn.utils.parametrizations.weight_norm(model[2])

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - x[:, :1]
        return r.square().mean(), r

    return model, closure


class Plain(nn.Module):
    """Products written x @ W, with trained Fourier features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.B, self.W = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        z = x @ self.B
        return torch.cat([z.sin(), z.cos()], 1) @ self.W


def plain() -> tuple[nn.Module, Closure]:
    model, x = Plain().double(), torch.rand(11, 2, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - x[:, :1]
        return r.square().mean(), r

    return model, closure


def transformed(how: str) -> tuple[nn.Module, Closure]:
    """Derivatives by torch.func, point by point."""
    model, x = mlp(2, 6, 6, 1), torch.rand(9, 2, dtype=F64)

    def u(p: Tensor) -> Tensor:
        value: Tensor = model(p)[0]
        return value

    def closure() -> tuple[Tensor, Tensor]:
        if how == "jvp":
            found = torch.func.jvp(model, (x,), (torch.ones_like(x),))
            r = found[1][:, 0] - found[0][:, 0]
        elif how == "functional":
            params: dict[str, Tensor] = dict(model.named_parameters())
            r = torch.func.vmap(lambda p: torch.func.functional_call(model, params, p)[0])(x) - 1
        elif how == "jvp by weights":
            params = dict(model.named_parameters())
            r = torch.func.jvp(lambda p: torch.func.functional_call(model, p, x), (params,), (params,))[1] - 1
        elif how == "dual weights":
            dual: Callable[..., Tensor] = forward_ad.make_dual
            with forward_ad.dual_level():
                params = {name: dual(p, p.cos()) for name, p in model.named_parameters()}
                r = forward_ad.unpack_dual(torch.func.functional_call(model, params, x)).tangent - 1  # type: ignore[no-untyped-call]
        else:
            twice = torch.func.hessian(u) if how == "hessian" else torch.func.jacrev(torch.func.grad(u))
            r = torch.func.vmap(twice)(x).diagonal(dim1=1, dim2=2).sum(1) - torch.func.vmap(u)(x)
        return r.square().mean(), r

    return model, closure


def penalised() -> tuple[nn.Module, Closure]:
    """The closure differentiates by a parameter: each output row depends on all points."""
    model, x = mlp(2, 5, 1), torch.rand(11, 2, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        (slope,) = torch.autograd.grad(model(x).square().mean(), next(model.parameters()), create_graph=True)
        return (slope - 1).square().mean(), slope

    return model, closure


def no_sensors() -> tuple[nn.Module, Closure]:
    """A term that has no points just now."""
    model, x = mlp(2, 5, 1), torch.rand(12, 2, dtype=F64)

    def closure() -> tuple[Tensor, tuple[Tensor, Tensor]]:
        r, s = model(x) - 1, model(x[:0])
        return r.square().mean() + s.square().sum(), (r, s)

    return model, closure


def all_at_once(objective: Objective) -> bool:
    """Whether no rows were found to take a backward pass each."""
    return not objective.workspace.of(BatchRows).refuted


@pytest.mark.parametrize(
    ("problem", "together"),
    [
        (pinn, True),
        (columns, True),
        (reversed_rows, True),
        (remembered, False),
        (no_sensors, True),
        (concatenated, True),
        (stacked_networks, True),
        (weight_norm, True),
        (plain, True),
        (penalised, True),
        *((lambda how=how: transformed(how), True) for how in ("jvp", "functional", "hessian", "jacrev")),
        *((lambda how=how: transformed(how), False) for how in ("jvp by weights", "dual weights")),
        (classifier, True),
        (sequence, True),
        (scaled, True),
        (lambda: scaled(100), False),
        (once, False),
        (inverse, True),
        (joined, True),
        (lambda: mixed(4), True),
        (lambda: mixed(1), True),
        (averaged, True),
        (integral, True),
        (named, True),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")  # of torch's own forward derivatives
def test_all_rows_are_the_gauss_newton_matrix(problem: Callable[[], tuple[nn.Module, Closure]], together: bool) -> None:
    model, closure = problem()
    G, g = dense(model, closure)
    objective, sketcher = objective_of(model, closure), Sketcher(10_000)
    sketch = sketcher.draw(objective, [Microbatch(None, None)], (0,))
    torch.testing.assert_close(sketch.J.T @ sketch.J, G)
    torch.testing.assert_close(sketch.J.T @ sketch.rho, g)
    assert sketch.whole
    assert all_at_once(objective) == together
    assert ("backward pass each" in sketch.note) == (not together)
    again = sketcher.draw(objective, [Microbatch(None, None)], (1,))
    assert not again.note
    torch.testing.assert_close(again.J.T @ again.J, G)


@pytest.mark.parametrize("coefficient", [False, True])  # whose column is right wherever rows come from
def test_rows_that_move_are_found_again(coefficient: bool) -> None:
    """At once where nothing is left of them; a run that is resumed there sees the same."""
    model, x, y = mlp(2, 5, 1), torch.rand(60, 2, dtype=F64), torch.rand(60, 1, dtype=F64)
    first, factor = [0], torch.ones((), dtype=F64)
    if coefficient:
        factor = nn.Parameter(factor)
        model.register_parameter("factor", factor)

    def closure() -> tuple[Tensor, Tensor]:
        k = first[0]
        r = factor * model(x)[k : k + 20] - y[k : k + 20]
        return r.square().mean(), r

    objective, sketcher = objective_of(model, closure), Sketcher(10_000)
    for n in range(40):
        first[0] = 20 if n == 35 else first[0]
        sketch = sketcher.draw(objective, [Microbatch(None, None)], (n,))
        if n in (0, 34, 35, 39):
            G, g = dense(model, closure)
            torch.testing.assert_close(sketch.J.T @ sketch.J, G)
            torch.testing.assert_close(sketch.J.T @ sketch.rho, g)
    assert all_at_once(objective)
    assert not sketch.note


def test_what_was_refuted_stays_so() -> None:
    """Also where later calls would pass, or cannot tell."""
    model, x = mlp(2, 5, 1), torch.rand(12, 2, dtype=F64)
    calls = [0]

    def closure() -> tuple[Tensor, Tensor]:
        u = model(x)
        r = u - u.roll(1, 0) if calls[0] % 2 == 0 else u - 1
        if calls[0] == 3:
            r = r + 0 * torch.sqrt(0 * u)  # of infinite slope
        return r.square().mean(), r

    objective, sketcher = objective_of(model, closure), Sketcher(10_000)
    for n in range(9):
        calls[0] = n
        sketch = sketcher.draw(objective, [Microbatch(None, None)], (n,))
        if n != 3:
            G, _ = dense(model, closure)
            torch.testing.assert_close(sketch.J.T @ sketch.J, G)


def test_honest_rows_of_zeros_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a hard constraint, for example."""
    model, x = mlp(1, 5, 1), torch.linspace(0, 1, 11, dtype=F64)[:, None]
    judged = [0]
    kept = row_writing._agree

    def counted(*given: Any) -> bool:
        judged[0] += 1
        return kept(*given)

    monkeypatch.setattr(row_writing, "_agree", counted)

    def closure() -> tuple[Tensor, Tensor]:
        r = x * (1 - x) * model(x) - x
        return r.square().mean(), r

    objective, sketcher = objective_of(model, closure), Sketcher(10_000)
    for n in range(20):
        sketcher.draw(objective, [Microbatch(None, None)], (n,))
    assert judged[0] == 3  # at calls 1, 4 and 16
    assert all_at_once(objective)


def test_the_graph_of_the_gradient_serves_until_the_parameters_move() -> None:
    model, closure = pinn()
    objective = objective_of(model, closure)
    graph = TappedGraph(objective)
    for moved in (False, True):
        objective.value_and_gradient([Microbatch(None, None)], graph)
        if moved:
            objective.move_to(objective.point())
        assert (graph.take() is None) == moved
        assert graph.take() is None


class Recurrent(nn.Module):
    """A recurrent layer, a linear layer written x @ W.T, and one that is also used otherwise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.W = nn.LSTM(1, 6, batch_first=True), nn.Linear(6, 6), nn.Parameter(torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.first(x)[0][:, -1]
        z = self.second(torch.tanh(z @ self.W.T))
        return z * self.second.weight.sum()

    @classmethod
    def operations(cls) -> str:
        line = inspect.getsourcelines(cls.forward)[1]
        return ", ".join(f"{name} (test_sketch.py:{line + n})" for name, n in (("T", 2), ("lstm", 1), ("sum", 3)))


def test_a_note_names_the_operations_that_are_slow_and_their_lines() -> None:
    model, x = Recurrent().double(), torch.randn(30, 4, 1, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - 1
        return r.square().mean(), r

    optimizer = GaussNewtonFlow(model.parameters(), rows=20)
    assert any(f"are used by {Recurrent.operations()}, and" in note for note in optimizer.step(closure).notes)


def test_some_rows_where_a_term_has_no_points() -> None:
    model, closure = no_sensors()
    sketch = Sketcher(4).draw(objective_of(model, closure), [Microbatch(None, None)], (0,))
    assert len(sketch.J) == 4
    assert not sketch.whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wrong_rows_are_found_out_in_half_precision(dtype: torch.dtype) -> None:
    """The weights of a transposed convolution have no columns; the comparison must not allow for that as rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose1d(1, 20, 3), nn.Tanh(), nn.Flatten(), nn.Linear(200, 1)).to(dtype)
    x = torch.randn(30, 1, 8).to(dtype)

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x).float() - 1
        return r.square().mean(), r

    objective, sketcher = objective_of(model, closure), Sketcher(10_000)
    sketch = sketcher.draw(objective, [Microbatch(None, None)], (0,))
    assert not all_at_once(objective)
    assert bool(sketch.J[:, :60].any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_right_rows_are_not_refuted_by_an_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = mlp(2, 30, 30, 1).float(), torch.rand(200, 2)

    def closure() -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=dtype):
            u = model(x)
        r = u.float() - x[:, :1]
        return r.square().mean(), r

    objective, sketcher = objective_of(model, closure), Sketcher(10_000)
    sketcher.draw(objective, [Microbatch(None, None)], (0,))
    assert all_at_once(objective)


@pytest.mark.parametrize("seed", range(6))
def test_two_coupled_rows_among_many_are_seen(seed: int) -> None:
    """Whatever the signs of the probe are."""
    model, x = mlp(2, 5, 1), torch.rand(30, 2, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        u = model(x)[:, 0]
        return u.square().mean() + (u[0] - u[-1]).square(), u

    with pytest.raises(ValueError, match="couples rows"):
        Sketcher(100).draw(objective_of(model, closure), [Microbatch(None, None)], (seed,))


def test_a_note_says_that_sketches_are_large() -> None:
    model, x = mlp(2, 5, 4), torch.rand(60, 2, dtype=F64)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch)
        return z.square().mean(), z

    optimizer = GaussNewtonFlow(model.parameters(), rows=10)
    sets = Subsets(x, batch_size=1, fraction=0.5, seed=0)
    first, second = (optimizer.step(closure, sets) for _ in range(2))
    assert any("120 rows in place of 10" in note for note in first.notes)
    assert not any("in place of" in note for note in second.notes)


def test_rows_that_cancel_are_not_refuted() -> None:
    """Of neighbouring points, in float32: their sum with changing signs is small beside what rounds."""
    torch.manual_seed(0)
    model, x = mlp(1, 20, 1).float(), torch.linspace(0, 1, 400)[:, None]

    def closure() -> tuple[Tensor, Tensor]:
        r = x * (1 - x) * model(x) - x.square()
        return r.square().mean(), r

    objective, sketcher = objective_of(model, closure), Sketcher(10_000)
    sketcher.draw(objective, [Microbatch(None, None)], (0,))
    assert all_at_once(objective)


def test_an_integral_beside_residuals() -> None:
    model, x = mlp(2, 5, 1), torch.rand(3000, 2, dtype=F64)

    def closure() -> tuple[Tensor, tuple[Tensor, Tensor]]:
        u = model(x)
        r, mass = u - 2, u.mean()[None] - 1
        return r.square().mean() + mass.square().sum(), (r, mass)

    sketch = Sketcher(40).draw(objective_of(model, closure), [Microbatch(None, None)], (0,))
    assert len(sketch.J) <= 42
    report = GaussNewtonFlow(model.parameters()).step(closure)
    assert report.search_loss_after < report.search_loss_before


def test_rows_without_a_second_derivative_are_left_out() -> None:
    """|r|^1.5 has none at r = 0, as at a point of a hard constraint."""
    model, x = mlp(1, 6, 1), torch.linspace(0, 1, 30, dtype=F64)[:, None]

    def closure() -> tuple[Tensor, Tensor]:
        r = x * (model(x) - torch.sin(3 * x))
        return r.abs().pow(1.5).mean(), r

    optimizer = GaussNewtonFlow(model.parameters())
    first, *_, last = (optimizer.step(closure) for _ in range(30))
    assert last.loss < 0.2 * first.loss

    def nowhere() -> tuple[Tensor, Tensor]:
        r = 0 * model(x)
        return r.abs().pow(1.5).mean(), r

    with pytest.raises(ValueError, match="nowhere finite"):
        Sketcher(10).draw(objective_of(model, nowhere), [Microbatch(None, None)], (0,))


def test_outputs_of_other_shapes_at_every_call_are_refused() -> None:
    model, x, calls = mlp(2, 5, 1), torch.rand(40, 2, dtype=F64), iter(range(5, 40))

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x[: next(calls)])
        return r.square().mean(), r

    sketch = Sketcher(3).draw(objective_of(model, closure), [Microbatch(None, None)], (0,))
    with pytest.raises(ValueError, match="must return the same outputs"):
        sketch.look()[1]


@pytest.mark.parametrize("problem", [pinn, classifier, joined, inverse])
def test_some_rows_are_unbiased(problem: Callable[[], tuple[nn.Module, Closure]]) -> None:
    model, closure = problem()
    G, g = dense(model, closure)
    objective, sketcher = objective_of(model, closure), Sketcher(9)
    draws = [sketcher.draw(objective, [Microbatch(None, None)], (0, i)) for i in range(600)]
    assert all(len(draw.rho) <= 15 and not draw.whole for draw in draws)
    mean = torch.stack([draw.J.T @ draw.J for draw in draws]).mean(0)
    assert float((mean - G).norm() / G.norm()) < 0.1
    assert float((torch.stack([draw.J.T @ draw.rho for draw in draws]).mean(0) - g).norm() / g.norm()) < 0.3


def test_wide_outputs_take_one_random_combination_each() -> None:
    model, x, y = mlp(3, 4, 40), torch.randn(10, 3, dtype=F64), torch.rand(10, 40, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        z = model(x)
        return nn.functional.binary_cross_entropy_with_logits(z, y), z

    G, _ = dense(model, closure)
    objective, sketcher = objective_of(model, closure), Sketcher(10)
    draws = [sketcher.draw(objective, [Microbatch(None, None)], (0, i)) for i in range(400)]
    assert {len(draw.J) for draw in draws} == {10}
    assert not any(draw.whole for draw in draws)
    mean = torch.stack([draw.J.T @ draw.J for draw in draws]).mean(0)
    assert float((mean - G).norm() / G.norm()) < 0.15


def test_micro_batches_are_weighted_as_their_means_are() -> None:
    model = mlp(3, 4, 1)
    x = torch.randn(30, 3, dtype=F64)

    def closure(batch: Tensor) -> tuple[Tensor, Tensor]:
        r = model(batch) - batch[:, :1]
        return r.square().mean(), r

    G, g = dense(model, lambda: closure(x))
    parameters = ParameterVector([{"params": list(model.parameters()), "weight_decay": 0.0}])
    batches = [Microbatch(x[:20], 20), Microbatch(x[20:], 10, position=20)]
    objective = Objective(closure, parameters, SingleProcess())
    sketch = Sketcher(1000).draw(objective, batches, (0,))
    torch.testing.assert_close(sketch.J.T @ sketch.J, G)
    torch.testing.assert_close(sketch.J.T @ sketch.rho, g)
    # For squared errors ρ is the outputs themselves, up to what they are compared with.
    objective.move_to(objective.point() + 0.1)
    torch.testing.assert_close(sketch.look()[1], Sketcher(1000).draw(objective, batches, (0,)).rho - sketch.rho)


@pytest.mark.parametrize("problem", [pinn, classifier, sequence, joined, inverse])
def test_the_change_of_the_outputs_is_what_their_rows_say(problem: Callable[[], tuple[nn.Module, Closure]]) -> None:
    model, closure = problem()
    objective = objective_of(model, closure)
    sketch = Sketcher(12).draw(objective, [Microbatch(None, None)], (0,))
    assert not bool(sketch.look()[1].any())
    here, d = objective.point(), torch.randn(sketch.J.shape[1], dtype=F64)
    errors = []
    for h in (1e-3, 1e-4):
        objective.move_to(here + h * d)
        errors.append(float((sketch.look()[1] / h - sketch.J @ d).norm() / (sketch.J @ d).norm()))
    assert errors[1] < 0.2 * errors[0] < 0.1


def test_losses_that_couple_rows_are_refused() -> None:
    model, x = mlp(2, 4, 1), torch.rand(8, 2, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        z = model(x)
        return z.square().mean().sqrt(), z

    with pytest.raises(ValueError, match=r"couples rows of the outputs.*Use KSD"):
        GaussNewtonFlow(model.parameters()).step(closure)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("doubt", [1e-1, 1e-4, 1e-7, 1e-10, 1e-16, 1e-30, 0.0])
def test_a_cross_entropy_has_rows_however_well_it_is_fitted(dtype: torch.dtype, doubt: float) -> None:
    """Of H_L, diag(p) − ppᵀ with p all but 0 and 1, cancellation leaves little; that does not couple rows."""
    torch.manual_seed(0)
    rows, c = 40, 5
    y = torch.arange(rows) % c
    logits = torch.randn(rows, c, dtype=F64) - math.log(doubt or 1e-300) * nn.functional.one_hot(y, c)
    z = logits.to(dtype).requires_grad_()
    (delta,) = torch.autograd.grad(nn.functional.cross_entropy(z, y), z, create_graph=True)
    roots = output_roots(z, delta, torch.arange(rows), torch.Generator().manual_seed(0))
    assert not isinstance(roots, str), roots
    assert bool(roots.u.isfinite().all() & roots.rho.isfinite().all())
    p = z.detach().double().softmax(1)
    H = (torch.diag_embed(p) - p[:, :, None] * p[:, None]) / rows
    L = roots.u.double().permute(1, 2, 0)
    assert float((L @ L.mT - H).abs().max()) < 10 * torch.finfo(dtype).eps / rows  # of entries up to 1/rows


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_fitted_classifier_still_steps(dtype: torch.dtype) -> None:
    model, x = mlp(4, 8, 3).to(dtype), torch.randn(60, 4, dtype=dtype)
    y = x[:, :3].argmax(1)

    def closure() -> tuple[Tensor, Tensor]:
        logits = model(x)
        return nn.functional.cross_entropy(logits, y), logits

    for method in (KSD, GaussNewtonFlow):
        optimizer = method(model.parameters())
        losses = [optimizer.step(closure).loss for _ in range(25)]
    assert losses[-1] <= losses[0] < 1e-4


def test_a_linear_term_has_no_rows() -> None:
    z = torch.randn(5, 2, dtype=F64, requires_grad=True)
    (delta,) = torch.autograd.grad(z.sum(), z, create_graph=True)
    roots = output_roots(z, delta, torch.arange(5), torch.Generator())
    assert not isinstance(roots, str)
    assert len(roots.u) == 0


def test_closures_that_return_only_what_depends_on_parameters() -> None:
    """As those of DeepXDE and PINA do: a pass without a graph has fewer outputs."""
    model, x = mlp(1, 5, 1), torch.rand(30, 1, dtype=F64, requires_grad=True)
    fixed = torch.rand(7, 1, dtype=F64)

    def closure() -> tuple[Tensor, list[Tensor]]:
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        residuals = [slope - 1, model(fixed) - fixed]
        return torch.stack([r.square().mean() for r in residuals]).sum(), [r for r in residuals if r.requires_grad]

    objective = objective_of(model, closure)
    sketch = Sketcher(1000).draw(objective, [Microbatch(None, None)], (0,))
    objective.move_to(objective.point() + 0.1)
    torch.testing.assert_close(
        sketch.look()[1], Sketcher(1000).draw(objective, [Microbatch(None, None)], (0,)).rho - sketch.rho
    )


def test_outputs_that_the_loss_couples_are_refused() -> None:
    """Rows of each alone are not those of their difference."""
    model, x = mlp(2, 5, 1), torch.rand(9, 2, dtype=F64)

    def closure() -> tuple[Tensor, tuple[Tensor, ...]]:
        first, left, right = model(x), model(x + 1), model(x - 1)
        return first.square().mean() + (left - right).square().mean(), (first, left, right)

    def joint() -> tuple[Tensor, tuple[Tensor, ...]]:
        left, right = model(x + 1), model(x - 1)
        return torch.cat([left, right]).square().mean(), (left, right)

    heavy = torch.ones(9, 1, dtype=F64)
    heavy[0] = 1e10

    def hidden() -> tuple[Tensor, tuple[Tensor, ...]]:
        """By one heavy row, and one without finite curvature."""
        left, right = x[:, :1] * model(x), model(x - 1)
        loss = (left - right).square().mean() + (heavy * left.square()).mean() + left.abs().pow(1.5).mean()
        return loss, (left, right)

    with pytest.raises(ValueError, match="couples outputs 1 and 2"):
        GaussNewtonFlow(model.parameters()).step(closure)
    x[1] = 0
    with pytest.raises(ValueError, match="couples outputs 0 and 1"):
        GaussNewtonFlow(model.parameters()).step(hidden)
    G, _ = dense(model, joint)
    J = Sketcher(100).draw(objective_of(model, joint), [Microbatch(None, None)], (0,)).J
    torch.testing.assert_close(J.T @ J, G)


def wide(*shape: int) -> tuple[nn.Module, Closure]:
    model, x = mlp(2, 12, 1), torch.rand(*shape, 2, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x)[..., 0] - x[..., 0]
        return r.square().mean(), r

    return model, closure


def test_few_rows_with_many_entries_have_as_many_combinations_as_there_is_room_for() -> None:
    model, closure = wide(2, 40)
    G, g = dense(model, closure)
    objective = objective_of(model, closure)
    mean_G, mean_g, draws = torch.zeros_like(G), torch.zeros_like(g), 300
    for n in range(draws):
        sketch = Sketcher(11).draw(objective, [Microbatch(None, None)], (n,))
        assert len(sketch.J) == 10
        assert not sketch.whole
        mean_G += sketch.J.T @ sketch.J / draws
        mean_g += sketch.J.T @ sketch.rho / draws
    assert (mean_G - G).norm() < 0.1 * G.norm()
    assert (mean_g - g).norm() < 0.1 * g.norm()
    everything = Sketcher(80).draw(objective, [Microbatch(None, None)], (0,))
    assert everything.whole
    torch.testing.assert_close(everything.J.T @ everything.J, G)
    torch.testing.assert_close(everything.J.T @ everything.rho, g)


@pytest.mark.parametrize(("rows", "points", "found"), [(1, 60, 49), (4, 500, 4), (4, 20, 28)])
def test_points_in_the_second_dimension_are_said_to_be_slow(rows: int, points: int, found: int) -> None:
    """Combinations of 60 or 500 points are not to take more room than rows of J, of 49 numbers, do."""
    model, closure = wide(rows, points)
    sketch = Sketcher(60 if rows == 1 else 30).draw(objective_of(model, closure), [Microbatch(None, None)], (0,))
    assert len(sketch.J) == found
    assert sketch.slow == (found > rows)
    if found == rows:
        assert "4 rows in place of 30" in sketch.note
        return
    assert "its first dimension is that of samples" in sketch.note


def test_another_closure_of_the_same_code_is_noticed() -> None:
    """It has rows from elsewhere, none of which is zero."""
    model, x = mlp(2, 5, 1), torch.rand(20, 2, dtype=F64)

    def make(residual: Callable[[Tensor], Tensor]) -> Closure:
        def closure() -> tuple[Tensor, Tensor]:
            r = residual(model(x))
            return r.square().mean(), r

        return closure

    plain, periodic = make(lambda u: u - x[:, :1]), make(lambda u: u - u.roll(1, 0))
    current = [plain]
    objective, sketcher = objective_of(model, lambda: current[0]()), Sketcher(10_000)
    for n in range(128):
        current[0] = plain if n < 70 else periodic
        sketch = sketcher.draw(objective, [Microbatch(None, None)], (n,))
    G, _ = dense(model, periodic)
    torch.testing.assert_close(sketch.J.T @ sketch.J, G)


def test_rows_that_hard_constraints_make_constant_do_not_hide_the_others() -> None:
    """At both ends, of an output that is not the first to go through the network."""
    model, t = mlp(1, 5, 1), torch.linspace(-1, 1, 12, dtype=F64)[:, None]

    def closure() -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x = torch.cat([torch.linspace(-0.9, 0.9, 30, dtype=F64)[:, None], t])
        u = (1 - x.square()) * model(x)
        inside, start = u[:30] - 1, u[30:]
        return inside.square().mean() + start.square().mean(), (inside, start)

    objective, sketcher = objective_of(model, closure), Sketcher(10_000)
    sketch = sketcher.draw(objective, [Microbatch(None, None)], (0,))
    assert all_at_once(objective)
    G, _ = dense(model, closure)
    torch.testing.assert_close(sketch.J.T @ sketch.J, G)


def test_a_loss_that_cannot_be_differentiated_twice_is_explained() -> None:
    model, x = mlp(2, 5, 4), torch.rand(9, 1, 2, dtype=F64)
    labels, lengths = torch.tensor([[1, 2, 3]]), (torch.tensor([9]), torch.tensor([3]))

    def closure() -> tuple[Tensor, Tensor]:
        z = model(x)
        return nn.functional.ctc_loss(z.log_softmax(-1), labels, *lengths), z

    with pytest.raises(ValueError, match="cannot be differentiated twice"):
        GaussNewtonFlow(model.parameters()).step(closure)
