"""The problems of the PINN study: residuals of exact solutions, points, losses and errors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from experiments.pinn import networks, points
from experiments.pinn.equations import EQUATIONS
from experiments.pinn.further import FURTHER
from experiments.pinn.problems import CHOOSING, PROBLEMS, SHOWN, Problem, problem
from experiments.pinn.rivals import METHODS
from experiments.pinn.unseen import UNSEEN
from torch import Tensor, nn

from krylov_descent import KSD, GaussNewtonFlow
from krylov_descent.base import CurvatureOptimizer
from krylov_descent.flow.jacobian_rows import write_rows, write_rows_one_by_one
from krylov_descent.flow.owners import Owners
from krylov_descent.flow.taps import Taps

ALL = {**EQUATIONS, **UNSEEN, **FURTHER}
CLOSED_FORM = [name for name in ALL if name not in ("allen-cahn", "kdv")]
COLE_HOPF = ("burgers", "burgers01")
BOUNDARY = {"3x32": 400, "4x50": 800}


def with_exact_model(made: Problem, monkeypatch: pytest.MonkeyPatch) -> Problem:
    exact = ALL[made.name].exact
    monkeypatch.setattr(made.model, "forward", exact)
    if isinstance(made.model, networks.Several):
        monkeypatch.setattr(made.model, "fields", lambda at: list(exact(at).unbind(1)))
    return made


def gradient(made: Problem) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(made.closure()[0], list(made.model.parameters()))])


@pytest.mark.parametrize("name", CLOSED_FORM)
def test_residuals_vanish_on_the_exact_solution_and_only_there(name: str) -> None:
    equation = ALL[name]
    # Cole and Hopf's formula has √t in it, whose derivative at 0 is infinite; the shock's u_xx is 1e5.
    low = (*equation.low[:-1], 0.05) if name in COLE_HOPF else equation.low
    tolerance = 1e-7 if name in COLE_HOPF else 1e-9
    for term in equation.terms:
        start = equation.low if term.place is points.at_start else low
        at = points.draw(term.place, 64, start, equation.high, ("test", name), torch.float64).requires_grad_()
        residual = term.residual(equation.exact, at)
        assert residual.shape in ((64,), (64, equation.exact(at[:1]).shape[-1]))
        assert residual.abs().max() < tolerance

        def wrong(at: Tensor) -> Tensor:
            u, change = equation.exact(at), 0.1 * torch.sin(1.3 * at + 0.3).sum(1)  # of no period
            return u + (change if u.ndim == 1 else change[:, None])

        assert (term.residual(wrong, at).abs().reshape(64, -1).amax(0) > 1e-3).all()


@pytest.mark.parametrize("network", ["3x32", "4x50"])
@pytest.mark.parametrize("name", ALL)
def test_the_loss_is_the_sum_of_mean_squares_of_terms_of_distinct_lengths(name: str, network: str) -> None:
    made = problem(name, seed=0, network=network, points=150)
    loss, z = made.closure()
    assert loss.shape == ()
    torch.testing.assert_close(loss, torch.stack([each.square().mean() for each in z]).sum())
    lengths = [len(each) for each in z]
    assert all(each.ndim == 1 for each in z) or name in FURTHER
    assert len(set(lengths)) == len(lengths) == len(ALL[name].terms)
    assert lengths[0] == 150
    data = [term.data for term in ALL[name].terms]
    assert all(n in (None, length) for n, length in zip(data, lengths, strict=True))
    assert abs(sum(lengths[1:]) - sum(n or 0 for n in data) - BOUNDARY[network]) <= 10


def test_equations_that_nothing_was_chosen_on_are_no_part_of_the_study_unless_named() -> None:
    assert not set(UNSEEN) & set(PROBLEMS)
    assert sorted((*CHOOSING, *SHOWN)) == sorted(ALL)
    with pytest.raises(ValueError, match="klein-gordon"):
        problem("unknown", seed=0)


def test_every_term_calls_the_network_on_points_of_its_own() -> None:
    for name in PROBLEMS:
        made = problem(name, seed=0, points=50)
        seen: list[int] = []
        made.model.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(len(inputs[0])))
        _, z = made.closure()
        calls = 2 if name in ("convection30", "convection40", "reaction", "allen-cahn") else 1  # both ends
        assert set(seen) == {len(each) for each in z}
        assert all(seen.count(length) <= calls for length in set(seen))
        assert seen.count(50) == 1


@pytest.mark.parametrize(
    ("interior", "boundary", "terms"), [(200, 400, 3), (134, 400, 4), (133, 400, 4), (400, 400, 2)]
)
def test_counts_differ_whatever_the_interior(interior: int, boundary: int, terms: int) -> None:
    assert points.counts(100, 200, [None, None, 100, 50]) == [100, 200, 101, 50]
    found = points.counts(interior, boundary, [None] * terms)
    assert found[0] == interior
    assert len(set(found)) == len(found) == terms
    assert abs(sum(found[1:]) - boundary) <= 10


def test_terms_are_weighted_residuals() -> None:
    made = problem("wave", seed=1, points=20)
    seen: list[Tensor] = []
    made.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    _, z = made.closure()
    for term, each, at in zip(EQUATIONS["wave"].terms, z, list(seen), strict=True):
        torch.testing.assert_close(each, term.weight**0.5 * term.residual(made.model, at))
    assert [term.weight for term in EQUATIONS["wave"].terms] == [1, 100, 100, 100]
    start, rest, ends = seen[1:4]
    assert (start[:, 1] == 0).all()
    assert (rest[:, 1] == 0).all()
    assert not torch.equal(start, rest[: len(start)])
    assert set(ends[:, 0].tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_problem_comes_from_its_seed(name: str) -> None:
    made, twin, other = (problem(name, seed=seed, points=40) for seed in (3, 3, 4))
    loss = made.closure()[0]
    assert torch.equal(loss, twin.closure()[0])
    assert made.held_out() == twin.held_out()
    assert not torch.equal(loss, other.closure()[0])
    other.model.load_state_dict(made.model.state_dict())
    assert not torch.equal(loss, other.closure()[0])  # other points too
    assert other.error() == made.error()  # but the same test points


@pytest.mark.parametrize("name", PROBLEMS)
def test_resampling_is_deterministic_and_changes_all_training_points(name: str) -> None:
    made, twin = problem(name, seed=0, points=40), problem(name, seed=0, points=40)
    z, held_out = made.closure()[1], made.held_out()
    made.resample(7)
    again = made.closure()[1]
    assert all(len(a) == len(b) and not torch.equal(a, b) for a, b in zip(z, again, strict=True))
    assert made.held_out() == held_out
    twin.resample(1)
    twin.resample(7)
    assert all(torch.equal(a, b) for a, b in zip(again, twin.closure()[1], strict=True))
    made.resample(0)
    assert all(torch.equal(a, b) for a, b in zip(z, made.closure()[1], strict=True))


@pytest.mark.parametrize("name", ["wave", "image64"])
def test_a_part_is_of_points_of_all_terms_drawn_anew(name: str) -> None:
    made = problem(name, seed=0)
    generator = torch.Generator().manual_seed(0)
    first, second = (made.part(300, generator)()[1] for _ in range(2))
    whole = made.closure()[1]
    sizes = [len(z) for z in first]
    assert len(set(sizes)) == len(sizes) == len(whole)
    assert 270 <= sum(sizes) <= 450
    for z, other, every in zip(first, second, whole, strict=True):
        distances = torch.cdist(z.detach().reshape(len(z), -1), every.detach().reshape(len(every), -1))
        assert float(distances.min(1).values.max()) < 1e-9
        assert not torch.equal(z, other)


def test_held_out_points_are_not_training_points() -> None:
    made = problem("poisson2d", seed=0, points=40)
    seen: list[Tensor] = []
    made.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    made.closure()
    made.held_out()
    trained, held_out = seen[0], seen[2]
    assert trained.shape == held_out.shape == (40, 2)
    assert torch.cdist(trained.detach(), held_out.detach()).min() > 0


@pytest.mark.parametrize("name", [*PROBLEMS, *FURTHER])
def test_the_error_is_0_for_the_exact_solution_and_1_for_the_zero_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = problem(name, seed=0, points=10)
    with torch.no_grad():
        for p in made.model.parameters():
            p.zero_()
    assert made.error() == pytest.approx(1)
    assert made.grid.solution().abs().max() == 0
    with_exact_model(made, monkeypatch)
    assert made.error() == 0
    torch.testing.assert_close(made.grid.solution(), made.grid.exact)
    if name in CLOSED_FORM and name not in COLE_HOPF:
        assert made.held_out() < 1e-18


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_grid_is_the_domain(name: str) -> None:
    grid, equation = problem(name, seed=0, points=10).grid, EQUATIONS[name]
    assert grid.exact.shape == tuple(len(axis) for axis in grid.axes)
    for axis, low, high in zip(grid.axes, equation.low, equation.high, strict=False):
        assert axis[0].item() == low
        assert axis[-1].item() == pytest.approx(high)
    if name == "poisson5d":
        assert grid.names == ("x1", "x2")
        assert grid.exact[0, -1].item() == pytest.approx(0, abs=1e-12)  # cos 0 + cos π + 3 cos π/2
        assert grid.exact[0, 0].item() == pytest.approx(2)


@pytest.mark.parametrize("name", [*PROBLEMS, *FURTHER])
def test_the_closure_works_without_gradients(name: str) -> None:
    made = problem(name, seed=0, points=40)
    loss, z = made.closure()
    with torch.no_grad():
        silent, silent_z = made.closure()
    assert not silent.requires_grad
    assert not any(each.requires_grad for each in silent_z)
    torch.testing.assert_close(silent, loss.detach(), rtol=1e-12, atol=0)
    made.model.requires_grad_(False)
    for closure in (made.closure, torch.no_grad()(made.closure)):
        frozen, frozen_z = closure()
        torch.testing.assert_close(frozen.detach(), loss.detach(), rtol=1e-12, atol=0)
        assert all(torch.allclose(a, b) for a, b in zip(frozen_z, z, strict=True))


@pytest.mark.parametrize("name", [*PROBLEMS, *FURTHER])
def test_gradients_are_those_of_the_loss(name: str) -> None:
    made = problem(name, seed=0, points=30)
    g = gradient(made)
    params = list(made.model.parameters())
    generator = torch.Generator().manual_seed(0)
    d = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in params]
    values = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            for p, each in zip(params, d, strict=True):
                p.add_(each, alpha=step)
            values.append(float(made.closure()[0]))
    slope = (values[0] - values[1]) / 2e-6
    assert slope == pytest.approx(float(g @ torch.cat([each.flatten() for each in d])), rel=1e-5)
    assert all(p.grad is None for p in params)


@pytest.mark.parametrize(
    ("network", "inputs", "parameters"), [("3x32", 2, 2241), ("4x50", 2, 7851), ("3x32", 5, 2337), ("4x50", 5, 8001)]
)
def test_networks(network: str, inputs: int, parameters: int) -> None:
    made = problem("poisson2d" if inputs == 2 else "poisson5d", seed=2, network=network, points=10)
    assert sum(p.numel() for p in made.model.parameters()) == parameters
    layers = [layer for layer in made.model.modules() if isinstance(layer, nn.Linear)]
    assert all((layer.bias == 0).all() for layer in layers)
    for layer in layers[1:-1]:
        width = layer.in_features
        assert layer.weight.std().item() == pytest.approx(width**-0.5, rel=0.1)  # √(2/(in + out))
    assert set(made.model.state_dict()) == {key for key, _ in made.model.named_parameters()}


def test_the_network_scales_its_inputs() -> None:
    model = networks.Network([2, 4, 1], (0, 0), (2 * math.pi, 1), seed=0, dtype=torch.float64)
    plain = networks.Network([2, 4, 1], (-1, -1), (1, 1), seed=0, dtype=torch.float64)
    at = torch.tensor([[0.0, 0.0], [math.pi, 0.5], [2 * math.pi, 1.0]], dtype=torch.float64)
    scaled = torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(model(at), plain(scaled))


def test_float32_starts_where_float64_does() -> None:
    single, double = (problem("burgers", seed=0, points=50, dtype=dtype) for dtype in (torch.float32, torch.float64))
    loss = single.closure()[0].detach()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), double.closure()[0].detach(), rtol=1e-4, atol=0)
    assert single.error() == pytest.approx(double.error(), rel=1e-5)
    assert single.held_out() == pytest.approx(double.held_out(), rel=1e-4)


def test_points_fill_their_places_evenly() -> None:
    low, high = (0.0,) * 5, (1.0,) * 5
    faces = points.draw(points.all_faces, 400, low, high, (0,), torch.float64)
    on = torch.stack([faces == 0, faces == 1], 2).flatten(1)
    assert (on.sum(1) == 1).all()
    assert (on.sum(0) == 40).all()
    ends = points.draw(points.at_ends, 200, (-1.0, 0.0), (1.0, 1.0), (0,), torch.float64)
    for end in (-1, 1):
        counts = torch.histc(ends[ends[:, 0] == end][:, 1], 4, 0, 1)
        assert counts.min() >= 23
        assert counts.max() <= 27


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: problem("heat", seed=0), "no problem is named 'heat'"),
        (lambda: problem("wave", seed=0, network="2x2"), "no network is named '2x2'"),
        (lambda: problem("wave", seed=0, points=0), "points is 0"),
    ],
)
def test_what_is_refused(call: Callable[[], Problem], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", [*PROBLEMS, *FURTHER])
def test_rows_of_the_jacobian_can_be_had_together(name: str) -> None:
    made = problem(name, seed=0, points=31)
    params = list(made.model.parameters())
    taps = Taps(params)
    with taps:
        _, terms = made.closure()
    for z in terms:
        S = torch.arange(0, len(z), 7)
        colours = Owners().learn(taps, z)
        assert colours is not None
        together, one_by_one = ([p.new_empty(len(S), *p.shape) for p in params] for _ in range(2))
        u = torch.rand(z[S].shape, dtype=z.dtype, generator=torch.Generator().manual_seed(0))
        write_rows(taps, z, colours, S, u, together)
        write_rows_one_by_one(z, S[-2:], u[-2:], params, [rows[-2:] for rows in one_by_one])
        for a, b in zip(together, one_by_one, strict=True):
            torch.testing.assert_close(a[-2:], b[-2:])


@pytest.mark.parametrize("name", FURTHER)
def test_further_equations_run_in_both_precisions_with_new_points_and_with_some(name: str) -> None:
    single, double = (problem(name, seed=0, points=60, dtype=dtype) for dtype in (torch.float32, torch.float64))
    assert single.closure()[0].dtype == torch.float32
    assert single.error() == pytest.approx(double.error(), rel=1e-5)
    assert single.held_out() == pytest.approx(double.held_out(), rel=1e-3)
    assert float(single.closure()[0].detach()) == pytest.approx(float(double.closure()[0].detach()), rel=1e-3)
    assert single.grid.solution().shape == single.grid.exact.shape == ALL[name].grid
    assert 0.5 < float(single.grid.exact.abs().max()) < 4
    assert set(double.model.state_dict()) - {"B"} == {key for key, _ in double.model.named_parameters()}
    before = double.closure()[1]
    double.resample(1)
    for term, old, new in zip(ALL[name].terms, before, double.closure()[1], strict=True):
        assert old.shape == new.shape
        assert torch.equal(old, new) == (term.data is not None)  # data are what was measured
    sizes = [len(z) for z in double.part(40, torch.Generator().manual_seed(0))()[1]]
    assert len(set(sizes)) == len(sizes) == len(before)
    before_steps = float(single.closure()[0].detach())
    steps = METHODS["flow"](single, seed=0)
    assert all(math.isfinite(next(steps)) for _ in range(3))
    assert float(single.closure()[0].detach()) < before_steps


def test_coefficients_features_and_networks_of_further_equations() -> None:
    heat, pair, circle = (problem(n, seed=0).model for n in ("heat-inverse", "poisson-inverse", "advection-periodic"))
    at = torch.rand(5, 2, dtype=torch.float64)
    assert (heat(at)[:, 1] == 1).all()
    assert sum(p.numel() for p in heat.parameters()) == 2242
    assert sum(p.numel() for p in pair.parameters()) == 2 * 2241
    assert (pair(at)[:, 0] - pair(at)[:, 1]).abs().min() > 1e-3
    torch.testing.assert_close(circle(at), circle(at + at.new_tensor((2 * math.pi, 0.0))))


@pytest.mark.parametrize("method", [KSD, GaussNewtonFlow])
def test_ours_descend(method: type[CurvatureOptimizer]) -> None:
    made = problem("allen-cahn", seed=0, points=100)
    optimizer = method(made.model.parameters())  # type: ignore[call-arg]
    before = float(made.closure()[0].detach())
    for _ in range(4):
        optimizer.step(made.closure)
    assert float(made.closure()[0].detach()) < 0.95 * before
