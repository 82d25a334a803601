"""Steps of the flow: candidates, what is adapted, what is refused, and that runs resume."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, GaussNewtonFlow, Growing, Subsets, checkpoint
from krylov_descent.distributed import SingleProcess
from krylov_descent.flow.factored import new_damping
from krylov_descent.flow.sketch import Sketcher, finite_rows, sketch_bytes
from krylov_descent.flow.step import Adaptation, _bounded, descend_line
from krylov_descent.krylov.search import LineEvaluator
from krylov_descent.report import StopReason
from krylov_descent.samples.interface import FullBatch, Microbatch
from krylov_descent.state import put_together, taken_apart
from tests.least_squares import F64, Closure, mlp, objective_of, pinn


def noisy_fit() -> tuple[nn.Module, Closure, float]:
    """At its minimum but for one direction, and the minimum: sketches of a few rows want to fit their noise."""
    torch.manual_seed(0)
    model = nn.Linear(20, 1, bias=False).double()
    x = torch.randn(400, 20, dtype=F64)
    y = x @ torch.ones(20, 1, dtype=F64) + torch.randn(400, 1, dtype=F64)
    solution = torch.linalg.lstsq(x, y).solution
    with torch.no_grad():
        model.weight.copy_(solution.T).add_(0.02)

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - y
        return r.square().mean(), r

    return model, closure, (x @ solution - y).square().mean().item()


def test_where_no_fraction_lowers_the_loss_a_damped_step_does() -> None:
    model, closure, best = noisy_fit()
    optimizer = GaussNewtonFlow(model.parameters(), rows=15)
    reports = [optimizer.step(closure) for _ in range(15)]
    assert {(report.stop_reason, report.details["fraction"]) for report in reports} == {(StopReason.CANDIDATE, 0)}
    assert all(report.search_loss_after < report.search_loss_before for report in reports)
    assert reports[-1].loss - best < 1e-6 * (reports[0].loss - best)


def test_the_report_has_fraction_damping_and_rows() -> None:
    torch.manual_seed(0)
    model, x = mlp(2, 8, 1), torch.randn(400, 2, dtype=F64)
    y = x.prod(1, keepdim=True) + torch.randn(400, 1, dtype=F64) / 3
    optimizer, fractions = GaussNewtonFlow(model.parameters(), rows=15), set()
    grew: list[int] = []
    for _ in range(60):
        r = optimizer.step(lambda: ((r := model(x) - y).square().mean(), r))
        after, (fraction, damping, rows, removed, reach, *confirmed) = numbers_of(optimizer), r.details.values()
        assert list(r.details) == ["fraction", "damping", "rows", "removed", "reach", *["confirmed"] * bool(fraction)]
        grown = max(15, after["rows"])
        assert rows in ((15, grew[-1] if grew else 15) if r.notes else (grown,))
        grew += [grown] if r.notes else []
        if fraction:
            assert fraction == after["step_fraction"]
            assert new_damping(damping, fraction, removed, reach, *confirmed) == after["flow_damping"]
        else:
            assert (damping, 0.0) == (after["flow_damping"], after["momentum_scale"])
        fractions.add(fraction)
    assert 0 in fractions
    assert len(fractions) > 2
    assert grew == [22, 33]
    assert r.as_dict()["details"] == r.details


def test_a_sketch_beyond_the_memory_at_hand_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, closure = pinn()
    before = [p.detach().clone() for p in model.parameters()]
    monkeypatch.setattr("krylov_descent.flow.sketch.at_hand", lambda device: 1000)
    with pytest.raises(ValueError, match=r"more than may be taken of the 1,000 bytes of free memory\. Use KSD"):
        GaussNewtonFlow(model.parameters()).step(closure)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer = GaussNewtonFlow(model.parameters(), memory_budget=10**7)  # says what may be taken
    optimizer.step(closure)


def line(n: int = 9) -> tuple[Callable[[int], Tensor], int]:
    """The step to index i is [i]."""
    return lambda i: torch.tensor([float(i)]), n


@pytest.mark.parametrize("low", [0, 3, 4, 5, 8])
def test_a_line_is_followed_to_its_minimum(low: int) -> None:
    tried = []

    def value(d: Tensor) -> float:
        tried.append(float(d))
        return (float(d) - low) ** 2 - 1

    i, lowest, d = descend_line(*line(), value)
    assert (i, lowest, d.tolist()) == (low, -1, [low])
    assert len(tried) == len(set(tried)) <= abs(low - 4) + 3


def test_a_line_is_followed_out_of_overflow() -> None:
    i, lowest, d = descend_line(*line(), lambda d: math.inf if float(d) < 7 else -float(d))
    assert (i, lowest, d.tolist()) == (8, -8, [8])
    assert descend_line(*line(), lambda d: math.inf)[1] == math.inf
    one = descend_line(*line(1), lambda d: 3.0)
    assert (one[0], one[1], one[2].tolist()) == (0, 3.0, [0])


def stubborn(radius: float) -> tuple[nn.Linear, Closure, Tensor]:
    """A quadratic that jumps up beyond a small ball around the start, which no derivative tells; and the start."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 1, bias=False).double(), torch.randn(40, 6, dtype=F64)
    start = model.weight.detach().clone()

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - 1
        return r.square().mean() + 1e3 * float((model.weight.detach() - start).norm() > radius), r

    return model, closure, start


def numbers_of(optimizer: GaussNewtonFlow) -> dict[str, Any]:
    numbers = optimizer.state[optimizer.trained()[0]]["numbers"]
    return {name.removeprefix("adaptation."): x for name, x in numbers.items() if name.startswith("adaptation.")}


def test_where_no_candidate_helps_the_next_step_is_damped_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model, closure, start = stubborn(1e-3)
    optimizer = GaussNewtonFlow(model.parameters())
    moves, move = [], LineEvaluator.move

    def counted(lines: LineEvaluator, d: Tensor) -> None:
        moves.append(d)
        move(lines, d)

    monkeypatch.setattr(LineEvaluator, "move", counted)
    report = optimizer.step(closure)
    assert report.stop_reason is StopReason.NOISE
    assert report.search_loss_after == report.search_loss_before == report.loss
    assert torch.equal(model.weight, start)
    assert report.inner_evaluations == len(moves)
    after = numbers_of(optimizer)
    assert (after["momentum_scale"], after["step_fraction"]) == (0.0, 0.25)
    for _ in range(3):
        report = optimizer.step(closure)
        if report.search_loss_after < report.search_loss_before:
            break
        assert numbers_of(optimizer)["lm_damping"] == pytest.approx(after["lm_damping"] * 3.0**4)  # shorter from now on
        after = numbers_of(optimizer)
    assert 0 < float((model.weight.detach() - start).norm()) <= 1e-3
    assert (report.stop_reason, report.details["fraction"]) == (StopReason.CANDIDATE, 0)


def linear() -> tuple[nn.Module, Closure, Tensor, Tensor]:
    """Least squares: model, closure, design matrix and targets."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1).double()
    x, y = torch.randn(40, 6, dtype=F64), torch.randn(40, 1, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - y
        return r.square().mean(), r

    return model, closure, torch.cat([x, torch.ones(40, 1, dtype=F64)], 1), y


@pytest.mark.parametrize("method", [KSD, GaussNewtonFlow])
def test_both_solve_a_quadratic(method: type[Any]) -> None:
    model, closure, design, y = linear()
    run = method(model.parameters()).run(closure, max_steps=10)
    list(run)
    best = (design @ torch.linalg.lstsq(design, y).solution - y).square().mean().item()
    assert run.loss == pytest.approx(best, rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_it_trains_and_resumes_bit_for_bit(dtype: torch.dtype) -> None:
    def problem() -> tuple[nn.Module, Closure]:
        model = mlp(1, 12, 1).to(dtype)
        x = torch.linspace(-1, 1, 200, dtype=dtype)[:, None]

        def closure() -> tuple[Tensor, Tensor]:
            r = model(x) - torch.sin(5 * x)
            return r.square().mean(), r

        return model, closure

    model, closure = problem()
    optimizer = GaussNewtonFlow(model.parameters(), rows=60)
    for _ in range(60):
        optimizer.step(closure)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    reports = [optimizer.step(closure) for _ in range(4)]
    other, again = problem()
    resumed = GaussNewtonFlow(other.parameters(), rows=60)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert [resumed.step(again).loss for _ in range(4)] == [report.loss for report in reports]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert reports[-1].loss < 5e-3
    # Of a step without Krylov vectors, there is nothing to tell of them.
    assert {(r.krylov_dim, r.ritz_values, r.coefficients, r.orthogonality_error) for r in reports} == {(0, (), (), 0.0)}
    assert "| K" not in str(reports[-1])


def test_with_sets() -> None:
    torch.manual_seed(0)
    model = mlp(4, 8, 2).float()
    x = torch.randn(600, 4)
    sets = Subsets((x, (x[:, 0] * x[:, 1] > 0).long()), batch_size=128, fraction=0.3, seed=0)

    def closure(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]), logits

    run = GaussNewtonFlow(model.parameters()).run(closure, sets, max_steps=60)
    losses = [report.loss for report in run]
    assert losses[0] > 0.6
    assert run.loss < 0.4


def test_where_nothing_improves_the_step_says_so_and_stays() -> None:
    """A loss that is not finite anywhere but here."""
    model = nn.Linear(2, 1).double()
    x = torch.rand(8, 2, dtype=F64)
    here = [p.detach().clone() for p in model.parameters()]

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - 1
        moved = any(not torch.equal(p.detach(), q) for p, q in zip(model.parameters(), here, strict=True))
        return r.square().mean() + (math.nan if moved else 0.0), r

    optimizer = GaussNewtonFlow(model.parameters())
    for _ in range(18):
        report = optimizer.step(closure)
        assert report.stop_reason is StopReason.NON_FINITE
        assert report.search_loss_after == report.search_loss_before
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), here, strict=True))
    carried = numbers_of(optimizer)
    assert len(carried) == 6
    assert all(map(math.isfinite, carried.values()))
    assert carried["step_fraction"] >= 2.0**-14


def test_what_is_carried_is_bounded_however_long_a_run_fails() -> None:
    high, low = (_bounded(2.0, 0.125, 1e-18, Adaptation(x, 0.5, 0.0, x)) for x in (1e300, 1e-300))
    assert high.step_fraction == low.step_fraction == 0.125
    assert high.flow_damping == pytest.approx(2e-2)
    assert high.lm_damping == 200.0
    assert low.flow_damping == pytest.approx(2e-18)
    assert low.lm_damping == pytest.approx(2e-12)
    for trace in (0.0, math.inf, math.nan):
        assert all(math.isfinite(x) for x in vars(_bounded(trace, 0.125, 1e-18, None)).values())
        known = Adaptation(1.0, 0.125, 0.0, 1.0, 0.1, 900)
        assert _bounded(trace, 0.125, 1e-18, known) == known


def test_on_a_linear_fit_each_step_is_as_long_as_allowed() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(30, 1).double(), torch.randn(600, 30, dtype=F64)
    y = x @ torch.randn(30, 1, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - y
        return r.square().mean(), r

    optimizer = GaussNewtonFlow(model.parameters())
    for _ in range(5):
        report = optimizer.step(closure)
        assert report.search_loss_after / report.search_loss_before == pytest.approx(0.25, rel=0.05)


@pytest.mark.filterwarnings("ignore:The loss differs at the same weights")
def test_what_a_whole_sketch_may_is_not_carried_to_others() -> None:
    """Batches of 6 rows, which are all of them, in turn with such of 500."""
    torch.manual_seed(0)
    model, x = mlp(3, 8, 1), torch.randn(500, 3, dtype=F64)
    y = (3 * x).sin().sum(1, keepdim=True)
    optimizer = GaussNewtonFlow(model.parameters(), rows=20)
    for i in range(12):
        few = slice(0, 6 if i % 2 == 0 else 500)

        def closure(few: slice = few) -> tuple[Tensor, Tensor]:
            r = model(x[few]) - y[few]
            return r.square().mean(), r

        report = optimizer.step(closure)
        assert report.details["fraction"] <= (2 if few.stop == 6 else 0.5)


def test_a_state_with_other_numbers_is_refused() -> None:
    fresh = GaussNewtonFlow([nn.Parameter(torch.ones(2))])._fresh(FullBatch())
    adaptation = Adaptation(1.0, 0.125, 0.0, 1.0, 0.1, 30)
    known = replace(fresh, iteration=3, adaptation=adaptation, last_step=torch.ones(2))
    parts = taken_apart(known)
    again = put_together(fresh, parts)
    assert again.adaptation == adaptation
    assert again.iteration == 3
    assert again.last_step is not None
    assert torch.equal(again.last_step, torch.ones(2))
    assert put_together(fresh, taken_apart(fresh)).adaptation is None
    for key, value in parts.numbers.items():
        without = {name: x for name, x in parts.numbers.items() if name != key}
        with pytest.raises(ValueError, match=f"it has no {key}"):
            put_together(fresh, parts._replace(numbers=without))
        wrong: dict[type, tuple[Any, ...]] = {str: (3,), bool: ("x", None, 2), int: ("x", True, None, 1 << 64, 0.5, -1)}
        for bad in wrong.get(type(value), ("x", True, None, 1 << 64)):
            with pytest.raises(ValueError, match=f"has {key} = .*, which is no"):
                put_together(fresh, parts._replace(numbers={**parts.numbers, key: bad}))


@pytest.mark.parametrize("rollback", [True, False])
def test_a_step_that_raised_the_loss_is_undone_unless_asked_not_to(rollback: bool) -> None:
    w, x = nn.Parameter(torch.zeros(1, dtype=F64)), torch.ones(40, 1, dtype=F64)
    target = 1.0

    def closure(batch: Tensor) -> tuple[Tensor, Tensor]:
        r = batch * w - target
        return r.square().mean(), r

    optimizer, sets = GaussNewtonFlow([w], rollback=rollback), Subsets(x, batch_size=20, seed=0)
    optimizer.step(closure, sets)
    assert w.item() > 0.05
    target = -10.0  # from where the first step led away
    assert optimizer.step(closure, sets).accepted is not rollback


def test_sets_that_grow_are_refused() -> None:
    model, x = mlp(3, 4, 1), torch.randn(100, 3, dtype=F64)
    before = [p.detach().clone() for p in model.parameters()]

    def closure(batch: Tensor) -> tuple[Tensor, Tensor]:
        r = model(batch) - 1
        return r.square().mean(), r

    with pytest.raises(ValueError, match=r"sets that grow.*or KSD with Growing"):
        GaussNewtonFlow(model.parameters()).step(closure, Growing(x, batch_size=50, start=60, seed=0))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_states_of_the_other_method_are_refused(tmp_path: Path) -> None:
    model, closure = pinn()
    ksd, flow = KSD(model.parameters(), krylov_dim=3), GaussNewtonFlow(model.parameters())
    ksd.step(closure)
    flow.step(closure)
    for one, other in ((ksd, flow), (flow, ksd)):
        with pytest.raises(ValueError, match=f"one of '{type(other).__name__}'.* is a {type(one).__name__}"):
            one.load_state_dict(other.state_dict())
        path = checkpoint.save(tmp_path / "run.safetensors", model, other)
        with pytest.raises(ValueError, match=f"one of '{type(other).__name__}'.* is a {type(one).__name__}"):
            checkpoint.load(path, model, one)


def test_sketches_grow_where_the_flow_fails() -> None:
    """Every step fails: rows grow to four times as many, and not beyond the budget or the number of parameters."""
    torch.manual_seed(0)
    model, x = mlp(2, 20, 1), torch.rand(200, 2, dtype=F64)
    here = [p.detach().clone() for p in model.parameters()]

    def stuck() -> tuple[Tensor, Tensor]:
        r = model(x)[:, 0] - x[:, 0]
        moved = not all(torch.equal(p, q) for p, q in zip(model.parameters(), here, strict=True))
        return r.square().mean() + 1e3 * moved, r

    def rows(steps: int, **settings: Any) -> list[int]:
        optimizer = GaussNewtonFlow(model.parameters(), rows=20, **settings)
        found = [0]
        for _ in range(steps):
            report = optimizer.step(stuck)
            found.append(numbers_of(optimizer)["rows"])
            assert any(f"sketches have {found[-1]}" in note for note in report.notes) == (found[-1] > found[-2])
        return found

    free = rows(30)
    assert free[:3] == [0, 0, 0]
    assert sorted(set(free)) == [0, 30, 45, 68, 80]
    numel = sum(p.numel() for p in model.parameters())
    assert max(rows(30, memory_budget=sketch_bytes(50, numel, F64))) == 50
    model, here = mlp(2, 6, 1), []  # 25 parameters
    here += [p.detach().clone() for p in model.parameters()]
    assert max(rows(30)) == 25


def test_rows_that_are_not_finite_are_left_out() -> None:
    model, closure = pinn()
    sketch = Sketcher(100).draw(objective_of(model, closure), [Microbatch(None, None)], (0,))
    sketch.J[3, 2] = math.inf
    kept = finite_rows(sketch, SingleProcess())
    assert len(kept.J) == len(kept.rho) == len(kept.look()[1]) == len(sketch.J) - 1
    assert bool(kept.J.isfinite().all())
    assert sketch.whole
    assert not kept.whole


def test_memory_that_does_not_fit_is_refused_with_the_remedy() -> None:
    model, closure = pinn()
    n = sum(p.numel() for p in model.parameters())
    with pytest.raises(ValueError, match=rf"takes {int(3.3 * 400 * n * 8):,} bytes.*Use KSD"):
        GaussNewtonFlow(model.parameters(), memory_budget=1000).step(closure)


@pytest.mark.parametrize(
    "arguments",
    [{"rows": 0}, {"rows": 2.5}, {"momentum": 1.0}, {"momentum": -0.1}, {"memory_budget": -1}, {"weight_decay": -1.0}],
)
def test_settings_out_of_range(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}=.*must be"):
        GaussNewtonFlow([nn.Parameter(torch.ones(2))], **arguments)


def test_the_flow_knows_weight_decay() -> None:
    """At the minimum of loss and decay there is nothing to flow to."""
    model, closure, design, y = linear()
    optimizer = GaussNewtonFlow(model.parameters(), weight_decay=0.5)
    for _ in range(200):
        optimizer.step(closure)
    ridge = torch.linalg.solve(design.T @ design / 20 + 0.5 * torch.eye(7, dtype=F64), design.T @ y / 20)
    found = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(found, ridge[:, 0], atol=1e-6, rtol=0)


def test_groups_decay_each_in_its_own_way() -> None:
    """The decay of one group is no damping of the others."""
    model, closure, design, y = linear()
    weight, bias = model.parameters()
    groups = [{"params": [weight], "weight_decay": 0.5}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = GaussNewtonFlow(groups)
    for _ in range(200):
        optimizer.step(closure)
    c = torch.full((7,), 0.5, dtype=F64)
    c[weight.numel() :] = 0
    ridge = torch.linalg.solve(design.T @ design / 20 + c.diag(), design.T @ y / 20)
    found = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    torch.testing.assert_close(found, ridge[:, 0], atol=1e-6, rtol=0)

    losses = []
    for decay in (0.0, 1.0):  # of a parameter that is zero and stays it
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)).double()
        aside = nn.Parameter(torch.zeros(1, dtype=F64))
        x = torch.linspace(-1, 1, 60, dtype=F64)[:, None]

        def fit(net: nn.Module = net, aside: Tensor = aside, x: Tensor = x) -> tuple[Tensor, Tensor]:
            r = net(x) - torch.sin(4 * x) + 0 * aside
            return r.square().mean(), r

        groups = [{"params": list(net.parameters()), "weight_decay": 0.0}, {"params": [aside], "weight_decay": decay}]
        optimizer = GaussNewtonFlow(groups, rows=30)
        for _ in range(30):
            optimizer.step(fit)
        losses.append(float(fit()[0].detach()))
    assert losses[1] < 10 * losses[0]
