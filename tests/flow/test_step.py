"""The rational basis: where its search begins, and the contract of a basis."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import DEEP, KSD, Rational, Subsets
from krylov_descent.curvature import CURVATURES
from krylov_descent.distributed import SingleProcess
from krylov_descent.flow.sketch import Sketcher, finite_rows, sketch_bytes
from krylov_descent.flow.step import RationalBuilder, _longest
from krylov_descent.krylov.basis import Turn
from krylov_descent.krylov.builder import KrylovBuilder
from krylov_descent.krylov.candidates import Carry, Family, Starts, best_start, climb
from krylov_descent.krylov.memory import Memory
from krylov_descent.report import StopReason
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.state import memory_of, memory_parts
from tests.least_squares import F64, Closure, dense, mlp, objective_of, pinn


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


def test_a_direction_that_leads_nowhere_gathers_rows_and_then_does() -> None:
    model, closure, best = noisy_fit()
    optimizer = KSD(model.parameters(), basis=Rational(rows=15))
    reports = [optimizer.step(closure) for _ in range(150)]
    assert sum(report.stop_reason is StopReason.GATHERING for report in reports) > 20
    assert reports[-1].loss - best < 0.2 * (reports[0].loss - best)
    fell = [a for a, b in itertools.pairwise(reports) if b.loss < a.loss]
    assert {a.stop_reason for a in fell} == {StopReason.CANDIDATE}
    grew = next(report for report in reports if report.notes)
    assert str(grew).endswith("had to gather rows: sketches have 20 from now on.")


@pytest.mark.parametrize("monitored", [False, True])
def test_a_run_is_patient_with_steps_that_gather(monitored: bool) -> None:
    """Seven in a row are usual: they are no steps without a better loss."""
    model, closure, best = noisy_fit()
    first = closure()[0].item()
    monitor = (lambda: closure()[0].item()) if monitored else None
    run = KSD(model.parameters(), basis=Rational(rows=15)).run(closure, patience=5, max_steps=150, monitor=monitor)
    reports = list(run)
    gathering = [report.stop_reason is StopReason.GATHERING for report in reports]
    assert max(sum(1 for _ in some) for gathers, some in itertools.groupby(gathering) if gathers) >= 5
    assert run.best is not None
    assert run.best.value - best < 0.2 * (first - best)


def test_a_sketch_beyond_the_memory_at_hand_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, closure = pinn()
    before = [p.detach().clone() for p in model.parameters()]
    monkeypatch.setattr("krylov_descent.flow.sketch.at_hand", lambda device: 1000)
    with pytest.raises(ValueError, match=r"more than what may be taken of the 1,000 at hand\. Use basis='krylov'"):
        KSD(model.parameters(), basis="rational").step(closure)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer = KSD(model.parameters(), basis="rational", memory_budget=10**7)  # says what may be taken
    optimizer.step(closure)


def family(n: int = 9) -> Family:
    carries = tuple(Carry(1.0, float(i), 0.0, 1.0) for i in range(n))
    return Family(torch.arange(float(n), dtype=F64)[:, None], n // 2, carries)


@pytest.mark.parametrize("low", [0, 3, 4, 8])
def test_the_climb_finds_the_minimum_of_a_family(low: int) -> None:
    tried = []

    def value(c: Tensor) -> float:
        tried.append(float(c))
        return (float(c) - low) ** 2 - 1

    assert climb(family(), value) == (low, -1)
    assert len(tried) <= abs(low - 4) + 3


def test_the_climb_out_of_overflow() -> None:
    assert climb(family(), lambda c: math.nan if float(c) < 7 else -float(c)) == (8, -8)
    assert climb(family(), lambda c: math.inf)[1] == math.inf


def test_the_first_family_with_a_better_point_is_taken() -> None:
    second = Family(100 + torch.arange(3.0, dtype=F64)[:, None], 1, (Carry(1.0, 7.0, 0.0, 1.0),) * 3)
    starts = Starts((family(), second), Carry(1.0, 9.0, 0.0, 1.0))
    found = best_start(starts, lambda c: -1 / (1 + float(c)), 0.0)
    assert found is not None
    assert (float(found[0]), found[1].length, found[2]) == (0.0, 0.0, -1.0)
    found = best_start(starts, lambda c: 1.0 if float(c) < 50 else -float(c), 0.0)
    assert found is not None
    assert (float(found[0]), found[1].length) == (102.0, 7.0)
    assert best_start(starts, lambda c: 1.0, 0.0) is None


def builders() -> list[Any]:
    return [
        pytest.param(lambda: KrylovBuilder(CURVATURES["ggn"], 6, None), id="krylov"),
        pytest.param(lambda: RationalBuilder(Rational(rows=10_000), None), id="rational"),
    ]


@pytest.mark.parametrize("make", builders())
@pytest.mark.parametrize("previous", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_contract_of_a_basis(make: Callable[[], Any], previous: bool, decay: float) -> None:
    """Orthonormal rows that span gradient and previous step, and the curvature among them, decay included."""
    model, closure = pinn()
    G, g = dense(model, closure)
    n = len(g)
    objective = objective_of(model, closure, decay)
    theta = objective.point()
    g = g + decay * theta
    d_prev = torch.randn(n, dtype=F64) if previous else None
    subspace = make()(objective, [Microbatch(None, None)], lambda w: w, g.clone(), d_prev, Turn())
    V = subspace.V.tensor()
    torch.testing.assert_close(V @ V.T, torch.eye(len(V), dtype=F64))
    torch.testing.assert_close(subspace.H, V @ (G + decay * torch.eye(n, dtype=F64)) @ V.T)
    for x in (g, d_prev):
        if x is not None:
            torch.testing.assert_close(V.T @ (V @ x), x)
    assert subspace.orthogonality_error < 1e-12
    assert torch.equal(objective.point(), theta)


def linear() -> tuple[nn.Module, Closure, Tensor, Tensor]:
    """Least squares: model, closure, design matrix and targets."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1).double()
    x, y = torch.randn(40, 6, dtype=F64), torch.randn(40, 1, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - y
        return r.square().mean(), r

    return model, closure, torch.cat([x, torch.ones(40, 1, dtype=F64)], 1), y


@pytest.mark.parametrize("basis", ["krylov", "rational"])
def test_both_solve_a_quadratic(basis: Any) -> None:
    model, closure, design, y = linear()
    run = KSD(model.parameters(), basis=basis).run(closure, max_steps=10)
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
    optimizer = KSD(model.parameters(), basis=Rational(rows=60))
    for _ in range(60):
        optimizer.step(closure)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    reports = [optimizer.step(closure) for _ in range(4)]
    other, again = problem()
    resumed = KSD(other.parameters(), basis=Rational(rows=60))
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert [resumed.step(again).loss for _ in range(4)] == [report.loss for report in reports]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert reports[-1].loss < 5e-3


def test_with_sets() -> None:
    torch.manual_seed(0)
    model = mlp(4, 8, 2).float()
    x = torch.randn(600, 4)
    sets = Subsets((x, (x[:, 0] * x[:, 1] > 0).long()), batch_size=128, fraction=0.3, seed=0)

    def closure(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]), logits

    run = KSD(model.parameters(), basis="rational").run(closure, sets, max_steps=60)
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

    optimizer = KSD(model.parameters(), basis="rational")
    reasons = []
    for _ in range(18):
        report = optimizer.step(closure)
        reasons.append(report.stop_reason)
        assert report.search_loss_after == report.search_loss_before
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), here, strict=True))
    carried = optimizer.state[next(model.parameters())]
    assert all(math.isfinite(carried[key]) for key in ("damping", "length", "scale", "damped", "lost"))
    assert carried["length"] >= 2.0**-14
    assert reasons[:7] == [StopReason.GATHERING] * 7
    assert reasons[7] is reasons[15] is not StopReason.GATHERING


def test_what_is_carried_is_bounded_however_long_a_run_fails() -> None:
    bounded = RationalBuilder._bounded
    high, low = (bounded(2.0, 0.125, 1e-18, Carry(x, 0.5, 0.0, x)) for x in (1e300, 1e-300))
    assert high.length == low.length == 0.125
    assert high.damping <= 2.0 * 1e-5 * (1 + 1e-12)
    assert high.damped == 200.0
    assert low.damping == pytest.approx(2e-18)
    assert 0 < low.damped < 1e-11
    for trace in (0.0, math.inf, math.nan):
        assert all(math.isfinite(x) for x in vars(bounded(trace, 0.125, 1e-18, None)).values())


def test_pieces_become_longer_only_where_the_loss_falls_as_the_flow_says() -> None:
    def after(lengths: Sequence[float], fall: Callable[[float], float], lost: float = 0.0, kept: bool = True) -> float:
        longest = 0.0
        for eta in lengths:
            longest = _longest(Carry(1.0, eta, 0.0, 1.0, lost=lost, longest=longest, fell=fall(eta)), kept=kept)
        return longest

    def said(eta: float) -> float:
        return (1 - eta) ** 2

    eighth = 2.0**-3
    assert _longest(None, kept=True) == eighth
    assert after([eighth] * 2, said) < 0.25 <= after([eighth] * 3, said)  # twice as long in three steps
    assert after([eighth] * 3 + [0.25] * 3 + [0.5] * 9, said) == 0.5  # and then no more
    assert after([eighth] * 9, lambda eta: said(eta) ** 0.8) == eighth  # some residuals do not shrink
    assert after([eighth / 2] * 9, said) == eighth  # a longer one would have been worse
    assert after([eighth] * 9, said, lost=1.0) == after([eighth] * 9, said, kept=False) == eighth
    assert after([eighth] * 9, lambda eta: -1.0) == eighth  # a loss of either sign says nothing
    assert after([*[eighth] * 3, 0.25, 0.25, eighth], said) < 0.25  # back at once
    carry = RationalBuilder._bounded(1.0, 0.157, 1e-18, Carry(1e-6, 0.25, 0.0, 1.0))
    assert carry.length == eighth  # lengths are halvings of each other, whatever the bound


def test_on_a_linear_fit_they_do() -> None:
    """Nothing bends: each step follows its longest piece, and a state remembers how long that is."""
    torch.manual_seed(0)
    model, x = nn.Linear(30, 1).double(), torch.randn(600, 30, dtype=F64)
    y = x @ torch.randn(30, 1, dtype=F64)

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - y
        return r.square().mean(), r

    optimizer = KSD(model.parameters(), basis="rational")
    reports = [optimizer.step(closure) for _ in range(14)]
    falls = [report.search_loss_after / report.search_loss_before for report in reports]
    assert falls[0] == pytest.approx(0.875**2, rel=0.05)
    resumed = KSD(model.parameters(), basis="rational")
    resumed.load_state_dict(optimizer.state_dict())
    last = resumed.step(closure)
    for fall in (falls[-1], last.search_loss_after / last.search_loss_before):
        assert fall == pytest.approx(0.25, rel=0.05)


def test_what_a_whole_sketch_may_is_not_carried_to_others() -> None:
    """Batches of 6 rows, which are all of them, in turn with such of 500."""
    torch.manual_seed(0)
    model, x = mlp(3, 8, 1), torch.randn(500, 3, dtype=F64)
    y = (3 * x).sin().sum(1, keepdim=True)
    optimizer = KSD(model.parameters(), basis=Rational(rows=20))
    for i in range(12):
        few = slice(0, 6 if i % 2 == 0 else 500)

        def closure(few: slice = few) -> tuple[Tensor, Tensor]:
            r = model(x[few]) - y[few]
            return r.square().mean(), r

        optimizer.step(closure)
        carried = next(iter(optimizer.state.values()))
        assert carried["longest"] == 0 if few.stop == 6 else 0.125 <= carried["longest"] <= 0.5


def test_a_state_with_other_numbers_is_refused() -> None:
    memory = Memory(3, 0, carry=Carry(1.0, 0.125, 0.0, 1.0, waits=0.1, longest=0.25, fell=0.7))
    vectors, numbers = memory_parts(memory)
    assert memory_of(vectors, numbers).carry == memory.carry
    for key in numbers:
        with pytest.raises(ValueError, match="not what a KSD remembers"):
            memory_of(vectors, {name: x for name, x in numbers.items() if name != key})
        for bad in ("x", True, None, 1 << 64, *((0.5, -1.0) if key in ("iteration", "growths") else ())):
            with pytest.raises(ValueError, match=f"{key} = .*, which is no number of its kind"):
                memory_of(vectors, {**numbers, key: bad})


def test_sketches_grow_where_the_flow_waits_for_rows() -> None:
    """Every step waits, or damped steps find nothing: rows grow to four times as many, and not beyond the budget."""
    torch.manual_seed(0)
    model, x = mlp(2, 20, 1), torch.rand(200, 2, dtype=F64)
    here = [p.detach().clone() for p in model.parameters()]

    def stuck() -> tuple[Tensor, Tensor]:
        r = model(x)[:, 0] - x[:, 0]
        moved = not all(torch.equal(p, q) for p, q in zip(model.parameters(), here, strict=True))
        return r.square().mean() + 1e3 * moved, r

    def rows(steps: int, **settings: Any) -> list[int]:
        optimizer = KSD(model.parameters(), basis=Rational(rows=20), **settings)
        found = [0]
        for _ in range(steps):
            report = optimizer.step(stuck)
            found.append(int(optimizer.state[next(model.parameters())]["rows"]))
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
    assert len(kept.J) == len(kept.rho) == len(kept.change()) == len(sketch.J) - 1
    assert bool(kept.J.isfinite().all())
    assert sketch.whole
    assert not kept.whole


def test_memory_that_does_not_fit_is_refused_with_the_remedy() -> None:
    model, closure = pinn()
    n = sum(p.numel() for p in model.parameters())
    with pytest.raises(ValueError, match=rf"takes {int(6.25 * 400 * n * 8):,} bytes.*Use basis='krylov'"):
        KSD(model.parameters(), basis="rational", memory_budget=1000).step(closure)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"basis": "cubic"}, "basis='cubic'"),
        ({"basis": "rational", "curvature": "hessian"}, "curvature='hessian'"),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KSD([nn.Parameter(torch.ones(2))], **arguments)


@pytest.mark.parametrize("arguments", [{"rows": 0}, {"rows": 2.5}, {"momentum": 1.0}, {"momentum": -0.1}])
def test_settings_out_of_range(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Rational(**arguments)


def test_the_flow_knows_weight_decay() -> None:
    """At the minimum of loss and decay there is nothing to flow to."""
    model, closure, design, y = linear()
    optimizer = KSD(model.parameters(), basis="rational", weight_decay=0.5)
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
    optimizer = KSD(groups, basis="rational")
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
        optimizer = KSD(groups, basis=Rational(rows=30))
        for _ in range(30):
            optimizer.step(fit)
        losses.append(float(fit()[0].detach()))
    assert losses[1] < 10 * losses[0]


def test_what_the_rational_basis_has_no_use_for_is_refused() -> None:
    with pytest.raises(ValueError, match="Leave one of the two out"):
        KSD([nn.Parameter(torch.ones(2))], **{**DEEP, "basis": "rational"})
