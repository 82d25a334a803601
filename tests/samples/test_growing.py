"""Sets that grow, what makes them grow, and runs of ``DEEP`` on them: resumed, failed, and led astray."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from krylov_descent import DEEP, KSD, Growing, Kronecker, StepReport, Subsets
from krylov_descent.curvature.output_roots import random_roots
from krylov_descent.objective.closure import Evaluation
from krylov_descent.preconditioners.interface import Preconditioner, Solved, identity
from krylov_descent.samples.growing import HoldoutSlope
from krylov_descent.stepping.gradient_pass import GradientPass

F64 = torch.float64


def regression(n: int, noise: float, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 12, generator=generator, dtype=F64)
    y = x @ torch.randn(12, 2, generator=generator, dtype=F64)
    return x.to(dtype), (y + noise * torch.randn(n, 2, generator=generator, dtype=F64)).to(dtype)


def network(dtype: torch.dtype = F64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 2)).to(dtype)


def closure_of(model: nn.Module) -> Callable[[Any], tuple[Tensor, Tensor]]:
    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch[0])
        return F.mse_loss(z, batch[1]), z

    return closure


def search_loss(optimizer: KSD, closure: Callable[[Any], tuple[Tensor, Tensor]], sets: Growing) -> float:
    """f on the C of the last step."""
    parameters = optimizer._parameters()
    state = optimizer._remember(parameters, sets)
    grown = state.samples  # and not what its evidence asks for next
    c = sets.draw(state.iteration - 1, krylov_dim=1, search_growth=grown.growths, model_growth=grown.doublings).c
    return optimizer._objective(closure, sets, parameters).value(c).mean


def theta(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_sizes_grow_by_half_up_to_all_samples() -> None:
    sets = Growing(torch.arange(1000), batch_size=64, start=300, seed=0)
    sizes = [sets.draw(0, krylov_dim=1, search_growth=growth).sizes for growth in (0, 1, 2, 3, 10**9)]
    assert [size["A"] for size in sizes] == [300, 450, 675, 1000, 1000]
    assert [size["C"] for size in sizes] == [size["B"] for size in sizes]
    assert [size["B"] for size in sizes] == [64, 64, 85, 125, 125]
    assert Growing(torch.arange(7), batch_size=64, seed=0).draw(0, krylov_dim=1).sizes == {"A": 7, "B": 7, "C": 7}


def test_sets_are_fresh_at_each_step_and_the_same_for_the_same_step() -> None:
    sets = Growing(torch.arange(1000), batch_size=64, start=100, seed=0)
    values = [torch.cat([b.data for b in sets.draw(i, krylov_dim=1).a]) for i in (0, 1, 0)]
    assert torch.equal(values[0], values[2])
    assert not torch.equal(values[0], values[1])
    assert len(set(values[0].tolist())) == 100
    draw = sets.draw(0, krylov_dim=1)
    assert draw.b is draw.c  # loaded once
    assert draw.a is draw.a


@pytest.mark.parametrize(("start", "others"), [(100, 32), (937, 59), (960, 40), (999, 1), (1000, 0)])
def test_half_of_the_samples_that_judge_a_step_are_others_as_long_as_there_are_any(start: int, others: int) -> None:
    draw = Growing(torch.arange(1000), batch_size=64, start=start, seed=0).draw(3, krylov_dim=1)
    a, c = (set(torch.cat([b.data for b in each]).tolist()) for each in (draw.a, draw.c))
    assert draw.holds_out is (others > 0)
    assert len(c - a) == others
    assert [b.data.tolist() for b in draw.statistics] == [b.data.tolist() for b in draw.b]


@pytest.mark.parametrize("start", [8000, 9700, 10_000])
def test_b_is_in_the_middle_of_a_larger_c(start: int) -> None:
    draw = Growing(torch.arange(10_000), batch_size=64, start=start, seed=0).draw(3, krylov_dim=1)
    a, b, c = (set(torch.cat([b.data for b in each]).tolist()) for each in (draw.a, draw.b, draw.c))
    assert len(b) == 512
    assert b < c
    assert len(b - a) == min(256, 10_000 - start)


@pytest.mark.parametrize("start", [0, -3, 2.5, True])
def test_a_start_that_is_no_number_of_samples(start: Any) -> None:
    with pytest.raises(ValueError, match="not a whole number ≥ 1"):
        Growing(torch.arange(10), batch_size=4, start=start, seed=0)


def test_the_holdout_slope_is_the_one_that_other_samples_began_with() -> None:
    """Least squares with one H for all samples: dᵀH′d − g′ᵀd is minus their slope where the step began, to rounding."""
    generator = torch.Generator().manual_seed(0)
    H = torch.randn(5, 5, generator=generator, dtype=F64)
    H = H @ H.T + torch.eye(5, dtype=F64)
    centres = torch.randn(50, 5, generator=generator, dtype=F64)
    x = torch.randn(5, generator=generator, dtype=F64)
    d = centres[:4].mean(0) - x  # to the minimum on four samples
    own, others = d @ H @ (x - centres[:4].mean(0)), d @ H @ (x - centres[4:].mean(0))
    ends = d @ H @ (x + d - centres[4:].mean(0))
    known = HoldoutSlope(slope=-float(own)).after(float(d @ H @ d - ends))
    assert known.ratio == pytest.approx(float(others / own), rel=1e-12)


def test_the_holdout_slope_needs_several_steps_and_a_step_to_judge() -> None:
    known = HoldoutSlope()
    for judged in range(22):
        assert known.growths == (judged >= 20)
        known = HoldoutSlope(1.0, known.expected, known.holdout, known.judged).after(0.4)
    assert known.ratio == pytest.approx(0.4)
    assert HoldoutSlope(0.0, 1.0, 0.1, 3).after(5.0) == HoldoutSlope(0.0, 1.0, 0.1, 3)
    assert HoldoutSlope(1.0, 1.0, 0.1, 3).after(math.nan) == HoldoutSlope(0.0, 1.0, 0.1, 3)
    assert HoldoutSlope(1.0, 0.0, 0.0, 9).after(1e9).ratio <= 1  # one step far from the model is one vote


@pytest.mark.parametrize(("ratio", "times"), [(0.3, 1), (0.2, 1.5), (0.1, 2.25), (0.03, 5.06), (-1.0, 5.06)])
def test_sets_that_are_far_too_small_grow_at_once_by_the_root_of_what_they_lack(ratio: float, times: float) -> None:
    known = HoldoutSlope(expected=1.0, holdout=ratio, judged=5.0)
    assert 1.5**known.growths == pytest.approx(times, rel=0.01)
    assert replace(known, judged=4.0).growths == 0


@pytest.mark.parametrize(("growth", "size"), [(0, 64), (1, 128), (2, 256), (3, 500), (9, 500)])
def test_a_model_that_promised_too_much_gets_more_samples(growth: int, size: int) -> None:
    draw = Growing(torch.arange(9000), batch_size=100, seed=0).draw(0, krylov_dim=1, model_growth=growth)
    assert draw.sizes == {"A": 500, "B": size, "C": size}
    later = Growing(torch.arange(9000), batch_size=100, seed=0).draw(
        0, krylov_dim=1, search_growth=4, model_growth=growth
    )
    assert later.sizes["B"] == max(-(-2531 // 8), min(512, 64 << growth))
    # The preconditioner averages over steps: its statistics take no more samples for that.
    assert sum(batch.samples or 0 for batch in draw.statistics) == 64
    assert sum(batch.samples or 0 for batch in later.statistics) == -(-2531 // 8)
    statistics, b = (set(torch.cat([batch.data for batch in each]).tolist()) for each in (draw.statistics, draw.b))
    assert statistics <= b


def cube(w: nn.Parameter) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """Least squares for w³ = 1: at w = 0.1 so flat that Gauss–Newton's step overshoots beyond all measure."""

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        r = w**3 * batch[0] - batch[0]
        return r.square().mean(), r

    return closure


@pytest.mark.parametrize(("samples", "sizes"), [(3000, [64, 128]), (400, [64, 128])])  # or A has all of them
def test_a_model_that_is_wrong_doubles_its_sets_and_a_note_says_so(samples: int, sizes: list[int]) -> None:
    w = nn.Parameter(torch.tensor([0.1], dtype=F64))
    x = torch.rand(samples, 1, generator=torch.Generator().manual_seed(0), dtype=F64) + 1
    sets = Growing((x,), batch_size=3000, seed=0)
    first, second = (KSD([w], **DEEP) for _ in range(2))
    report = first.step(cube(w), sets)
    assert report.set_sizes["B"] == sizes[0]
    assert not report.notes
    assert search_loss(first, cube(w), sets) == pytest.approx(report.search_loss_after, rel=1e-12)
    state = copy.deepcopy(first.state_dict())
    second.load_state_dict(state)
    for size in (sizes[0], sizes[1]):  # not after one step, which may be too long for any model
        with torch.no_grad():
            w.fill_(0.1)
        report = second.step(cube(w), sets)
        assert report.set_sizes["B"] == size
    assert any("of the predicted decrease" in note for note in report.notes)
    for _ in range(10):
        report = second.step(cube(w), sets)
        assert search_loss(second, cube(w), sets) == pytest.approx(report.search_loss_after, rel=1e-12)
        assert report.set_sizes["B"] >= sizes[1]
    assert float(w.detach()) == pytest.approx(1.0, abs=1e-3)


def test_a_model_that_is_wrong_doubles_its_sets_also_where_no_step_was_found() -> None:
    w = nn.Parameter(torch.ones(3, dtype=F64))

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        moved = not torch.equal(w.detach(), torch.ones(3, dtype=F64))
        r = batch[0] * w * (torch.nan if moved else 1.0)
        return r.square().mean(), r

    sets = Growing((torch.rand(3000, 3, dtype=F64) + 1,), batch_size=3000, seed=0)
    optimizer = KSD([w], **DEEP)
    report = optimizer.step(closure, sets)
    assert report.search_loss_after == report.search_loss_before
    assert [optimizer.step(closure, sets).set_sizes["B"] for _ in range(2)] == [64, 128]


def test_growing_sets_need_the_previous_step() -> None:
    model = nn.Linear(12, 2).double()
    optimizer = KSD(model.parameters(), **{**DEEP, "previous": None})
    calls: list[Any] = []
    with pytest.raises(ValueError, match="previous='step'"):
        optimizer.step(calls.append, Growing(regression(4000, 1.0), batch_size=4000, start=40, seed=0))
    assert not calls  # it is refused before anything is evaluated


def steps(model: nn.Module, optimizer: KSD, sets: Growing, count: int) -> list[StepReport]:
    closure = closure_of(model)
    return [optimizer.step(closure, sets) for _ in range(count)]


def test_noise_makes_sets_grow_and_its_absence_does_not() -> None:
    sizes = {}
    for noise in (0.0, 3.0):
        model = nn.Linear(12, 2).double()
        optimizer = KSD(model.parameters(), **DEEP)
        sets = Growing(regression(4000, noise), batch_size=4000, start=40, seed=0)
        reports = steps(model, optimizer, sets, 250)
        sizes[noise] = [report.set_sizes["A"] for report in reports]
        grew = [i for i, report in enumerate(reports) if any("confirmed" in note for note in report.notes)]
        changed = [i for i in range(1, 250) if sizes[noise][i - 1] != sizes[noise][i]]
        assert grew == changed  # a note says why, when it happens
        if noise:
            x, y = regression(4000, noise)
            best = F.mse_loss(x @ torch.linalg.lstsq(x, y).solution, y)
            assert F.mse_loss(model(x), y) < 1.02 * best
    assert set(sizes[0.0]) == {40}
    assert sizes[3.0][-1] > 200


def test_a_point_that_was_edited_is_not_the_last_steps_doing() -> None:
    model = network()
    optimizer, sets = KSD(model.parameters(), **DEEP), Growing(regression(500, 1.0), batch_size=100, start=50, seed=0)
    steps(model, optimizer, sets, 5)
    first = next(model.parameters())
    judged = optimizer.state[first]["numbers"]["samples.slope.judged"]
    steps(model, optimizer, sets, 1)
    assert optimizer.state[first]["numbers"]["samples.slope.judged"] == judged + 1
    with torch.no_grad():
        first.add_(0.1)
    (report,) = steps(model, optimizer, sets, 1)
    assert optimizer.state[first]["numbers"]["samples.slope.judged"] == judged + 1
    assert any("changed since the last step" in note for note in report.notes)
    (report,) = steps(model, optimizer, sets, 1)
    assert not any("changed since" in note for note in report.notes)


def test_a_step_without_sets_may_follow() -> None:
    """Also one that was promised too much, or ends where the full batch is not finite."""
    w = nn.Parameter(torch.tensor([0.1], dtype=F64))
    x = torch.rand(3000, 1, generator=torch.Generator().manual_seed(0), dtype=F64) + 1
    optimizer, sets = KSD([w], **DEEP), Growing((x,), batch_size=3000, seed=0)
    optimizer.step(cube(w), sets)
    assert optimizer.state[w]["numbers"]["samples.agreement"] < 1
    report = optimizer.step(lambda: cube(w)((x,)))
    assert report.search_loss_after < report.search_loss_before
    for _ in range(3):
        optimizer.step(cube(w), sets)
    bad = w.detach().clone()

    def blown() -> tuple[Tensor, Tensor]:
        loss, r = cube(w)((x,))
        return (loss * math.inf if torch.equal(w.detach(), bad) else loss), r

    report = optimizer.step(blown)
    assert not report.accepted
    assert any("was undone." in note for note in report.notes)


def test_sets_of_another_kind_begin_anew() -> None:
    """The run itself goes on: its count of steps, and what the last one left."""
    model = nn.Linear(12, 2).double()
    data = regression(4000, 3.0)
    optimizer, sets = KSD(model.parameters(), **DEEP), Growing(data, batch_size=4000, start=40, seed=0)
    grown = steps(model, optimizer, sets, 250)[-1].set_sizes["A"]
    assert grown > 400
    subsets = Subsets(data, batch_size=1000, fraction=0.05, seed=0)
    assert optimizer.step(closure_of(model), subsets).set_sizes["C"] == 200
    assert "last_step" in optimizer.state[model.weight]
    (report,) = steps(model, optimizer, sets, 1)
    assert report.set_sizes["A"] == 40
    assert report.iteration == 251
    assert report.accepted


def test_the_search_loss_of_the_last_step_is_on_its_own_set() -> None:
    model = nn.Linear(12, 2).double()
    sets = Growing(regression(4000, 3.0), batch_size=4000, start=40, seed=0)
    optimizer = KSD(model.parameters(), **DEEP)
    grew = 0
    for report in (optimizer.step(closure_of(model), sets) for _ in range(60)):
        grew += any("confirmed" in note for note in report.notes)
        assert search_loss(optimizer, closure_of(model), sets) == report.search_loss_after
    assert grew


def test_earlier_steps_join_the_basis_once_a_has_all_samples() -> None:
    """On a quadratic, with B = C = A, the step ends where the gradient has no part along any of them."""
    x, y = regression(60, 1.0)
    x *= torch.logspace(-1, 1, 12, dtype=F64)  # many steps for the gradient, which so much damping leaves
    damped = {**DEEP, "preconditioner": Kronecker(damping=1e6)}
    torch.manual_seed(0)
    model = nn.Linear(12, 2).double()
    optimizer, sets = KSD(model.parameters(), **damped), Growing((x, y), batch_size=60, start=60, seed=0)
    taken: list[Tensor] = []
    for i in range(9):
        before = theta(model)
        report = optimizer.step(closure_of(model), sets)
        assert len(report.ritz_values) == min(i, 6) + 1
        taken.insert(0, theta(model) - before)
        loss, _ = closure_of(model)((x, y))
        g = torch.cat([p.reshape(-1) for p in torch.autograd.grad(loss, list(model.parameters()))])
        for d in taken[:7]:
            assert abs(float(g @ d)) < 1e-6 * float(g.norm() * d.norm())
    bounded, few = KSD(model.parameters(), **damped, memory_budget=10**9), KSD(model.parameters(), **damped)
    others = KSD(model.parameters(), **damped, curvature="hessian")
    some = Growing((x, y), batch_size=60, start=30, seed=0)
    for rows in (1, 2, 2, 2):
        for changed, drawn in ((bounded, sets), (few, some), (others, sets)):
            with torch.no_grad():
                model.weight.add_(1.0)  # away from where others have led
            assert len(changed.step(closure_of(model), drawn).ritz_values) == rows
            assert "subspace.earlier.0" not in changed.state[model.weight]
    assert "subspace.earlier.4" in optimizer.state[model.weight]
    assert len(optimizer.step(closure_of(model), some).ritz_values) == 2  # A has not all samples
    assert "subspace.earlier.0" not in optimizer.state[model.weight]


def test_a_step_that_is_not_taken_ends_what_came_before() -> None:
    x, y = regression(60, 0.0)
    torch.manual_seed(0)
    model = nn.Linear(12, 2).double()
    optimizer, sets = KSD(model.parameters(), **DEEP), Growing((x, y), batch_size=60, start=60, seed=0)
    seen = False
    for _ in range(30):
        report = optimizer.step(closure_of(model), sets)
        remembered = {key for key in optimizer.state[model.weight] if key.startswith(("subspace.earlier", "last_step"))}
        if report.search_loss_after < report.search_loss_before:
            seen |= "subspace.earlier.0" in remembered
        else:
            assert not remembered
            break
    else:
        pytest.fail("there was always something left to gain")
    assert seen


@pytest.mark.parametrize(("batch_size", "kept"), [(50, True), (20, False)])
def test_a_large_a_is_streamed(batch_size: int, kept: bool) -> None:
    """Nobody can hold much data at once: eight micro-batches at most."""
    data = regression(400, 1.0)
    draw = Growing(data, batch_size=batch_size, start=400, seed=0).draw(0, krylov_dim=1)
    assert draw.covers_all
    first, second = (list(draw.a) for _ in range(2))
    assert (first[0] is second[0]) == kept
    assert sum(len(batch.data[0]) for batch in second) == 400


class Counting(Preconditioner):
    """Counts the samples that it may take its statistics from."""

    def __init__(self) -> None:
        self.samples: list[int] = []

    def solve(self, at: GradientPass, state: Any, noise: float) -> Solved:
        self.samples.append(sum(batch.samples or 0 for batch in at.sets.statistics))
        return Solved(identity, state, self.name)


def test_statistics_leave_the_doublings_of_b_out() -> None:
    w = nn.Parameter(torch.tensor([0.1], dtype=F64))
    x = torch.rand(3000, 1, generator=torch.Generator().manual_seed(0), dtype=F64) + 1
    statistics = Counting()
    optimizer = KSD([w], **{**DEEP, "preconditioner": statistics})
    sets = Growing((x,), batch_size=3000, seed=0)
    for size in (64, 64, 128):
        with torch.no_grad():
            w.fill_(0.1)
        assert optimizer.step(cube(w), sets).set_sizes["B"] == size
    assert statistics.samples == [64, 64, 64]


# With 500, A has all samples, and steps before the last are remembered.
@pytest.mark.parametrize("start", [50, pytest.param(500, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(dtype: torch.dtype, start: int) -> None:
    data = regression(500, 2.0, dtype)

    def fresh() -> tuple[nn.Module, KSD, Growing]:
        torch.manual_seed(0)
        model = network(dtype) if start == 500 else nn.Linear(12, 2).to(dtype)
        optimizer = KSD(model.parameters(), **DEEP)
        return model, optimizer, Growing(data, batch_size=100, start=start, seed=0)

    model, optimizer, sets = fresh()
    reports = steps(model, optimizer, sets, 90)
    assert reports[-1].set_sizes["A"] > 50  # what tells of noise has to resume, too
    for stop in (7, 57):
        first, early, sets = fresh()
        steps(first, early, sets, stop)
        if stop == 7:
            assert ("subspace.earlier.4" in early.state[next(first.parameters())]) == (start == 500)
        file = io.BytesIO()
        torch.save({"model": first.state_dict(), "optimizer": early.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        second, late, sets = fresh()
        second.load_state_dict(saved["model"])
        late.load_state_dict(saved["optimizer"])
        rest = steps(second, late, sets, 90 - stop)
        assert torch.equal(theta(second), theta(model))
        assert [report.loss for report in rest] == [report.loss for report in reports[stop:]]


def test_a_step_that_raises_leaves_the_factors_as_they_were() -> None:
    data = regression(300, 0.1)
    model = network()
    optimizer, sets = KSD(model.parameters(), **DEEP), Growing(data, batch_size=60, start=60, seed=0)
    steps(model, optimizer, sets, 5)
    before, at = copy.deepcopy(optimizer.state_dict()), theta(model)
    calls = 0

    def raising(batch: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        if calls > 3:  # after the statistics of B
            raise ZeroDivisionError("of the closure")
        return closure_of(model)(batch)

    with pytest.raises(ZeroDivisionError):
        optimizer.step(raising, sets)
    assert torch.equal(theta(model), at)
    assert optimizer.state_dict()["krylov_descent"] == before["krylov_descent"]  # a checksum of all of it


def test_a_loss_that_is_not_finite_on_fresh_samples_goes_back() -> None:
    data = regression(300, 0.1)
    model = network()
    optimizer, sets = KSD(model.parameters(), **DEEP), Growing(data, batch_size=300, start=60, seed=0)
    steps(model, optimizer, sets, 3)
    before = optimizer.state[next(model.parameters())]["earlier"]
    bad = theta(model)

    def blown(batch: Any) -> tuple[Tensor, Tensor]:
        loss, z = closure_of(model)(batch)
        return (loss * math.inf if torch.equal(theta(model), bad) else loss), z

    report = optimizer.step(blown, sets)
    assert not report.accepted
    assert math.isfinite(report.loss)
    assert torch.isfinite(theta(model)).all()
    assert not torch.equal(theta(model), bad)
    assert before is not None


def test_what_the_loss_does_not_see_does_not_matter() -> None:
    """Rows that a mask leaves out have no part in the factors, whatever they hold."""
    x, y = regression(400, 0.0)
    kept = (torch.arange(400) % 10 == 0)[:, None].double()
    ends = []
    for value in (0.0, 100.0):
        model = network()

        def closure(batch: Any, model: nn.Module = model) -> tuple[Tensor, Tensor, float]:
            r = (model(batch[0]) - batch[1]) * batch[2]
            weight = float(batch[2].sum())
            return r.square().sum() / max(weight, 1), r, weight

        sets = Growing((torch.where(kept > 0, x, value), y, kept), batch_size=400, start=200, seed=0)
        optimizer = KSD(model.parameters(), **DEEP)
        for _ in range(5):
            optimizer.step(closure, sets)
        ends.append(theta(model))
    torch.testing.assert_close(ends[0], ends[1])


def test_unfreezing_a_layer_hands_no_factors_to_another() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(12, 12) for _ in range(3)], nn.Linear(12, 2)).double()
    model[0].requires_grad_(False)
    optimizer, sets = KSD(model.parameters(), **DEEP), Growing(regression(300, 0.1), batch_size=100, start=60, seed=0)
    steps(model, optimizer, sets, 6)
    model[0].requires_grad_(True)
    steps(model, optimizer, sets, 1)
    assert optimizer.state[next(model.parameters())]["numbers"]["preconditioner.updates"] == 1


def test_a_layer_with_very_many_outputs_has_a_diagonal() -> None:
    model = nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 5000))
    x = regression(60, 0.1, torch.float32)[0]
    optimizer = KSD(model.parameters(), **DEEP)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch)
        return F.cross_entropy(z, torch.zeros(len(z), dtype=torch.long)), z

    optimizer.step(closure, Growing(x, batch_size=60, seed=0))
    factors = optimizer.state[next(model.parameters())]["tensors"]
    assert factors["preconditioner.blocks.2.diagonal"].shape == (20_000,)
    assert factors["preconditioner.blocks.0.outputs"].shape == (4, 4)


def test_signs_do_not_fade_in_half_precision() -> None:
    z = torch.zeros(2000, 10, dtype=torch.bfloat16, requires_grad=True)
    evaluation = Evaluation(
        F.cross_entropy(z.float(), torch.zeros(2000, dtype=torch.long)), (z,), 1.0, 2000, aligned=True
    )
    ((_, u),), exact = random_roots(evaluation, (0,))
    assert exact
    lengths = 2000 * u.float().square().sum(1)  # of mean Σp(1 − p) = 0.9
    assert float(lengths[1000:].mean()) == pytest.approx(0.9, rel=0.1)


def test_options_are_checked() -> None:
    w = [nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="must be 'fisher', 'kronecker'"):
        KSD(w, preconditioner="shampoo")  # type: ignore[arg-type]
    assert KSD(w, preconditioner=Kronecker(damping=0.1)).step(lambda: (w[0].square().sum(), w[0])).preconditioner == (
        "kronecker"
    )
