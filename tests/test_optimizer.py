"""The front: arguments, groups, state, resume, and errors that say what to do."""

from __future__ import annotations

import copy
import io
import itertools
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import krylov_descent
from krylov_descent import DEEP, KSD, PAPER, Fisher, GaussNewtonFlow, Search, Subsets
from tests import problems
from tests.problems import Problem


def noisy_regression(n: int = 120) -> Problem:
    """Few samples and much noise: a search on a handful of them overfits, so that steps are undone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 3, generator=generator)
    y = torch.sin(x.sum(1, keepdim=True)) + torch.randn(n, 1, generator=generator)

    def closure(batch: Any) -> tuple[Tensor, Any]:
        r = model(batch[0]) - batch[1]
        return r.square().mean(), r

    return Problem(model, (x, y), closure)


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize("gradient_fraction", [1.0, 0.5])
def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(gradient_fraction: float) -> None:
    """30 steps with rollbacks before step 15 and, where A is everything, after; a bare parameter takes the probe."""

    def start() -> tuple[Problem, KSD, Subsets]:
        problem = noisy_regression()
        scale = nn.Parameter(torch.ones(1))
        problem.model.register_parameter("scale", scale)
        inner = problem.closure

        def closure(batch: Any) -> tuple[Tensor, Any]:
            r = inner(batch)[1] * scale
            return r.square().mean() + (scale - 1).square().sum(), r

        sets = Subsets(problem.data, batch_size=50, fraction=0.1, gradient_fraction=gradient_fraction, seed=5)
        return Problem(problem.model, problem.data, closure), KSD(problem.model.parameters(), krylov_dim=5), sets

    def run(problem: Problem, optimizer: KSD, sets: Subsets, steps: int) -> list[dict[str, Any]]:
        reports = [optimizer.step(problem.closure, sets).as_dict() for _ in range(steps)]
        for report in reports:
            del report["seconds"]
        return reports

    whole = start()
    expected = run(*whole, 30)
    undone = [r["iteration"] for r in expected if not r["accepted"]]
    assert any(i < 15 for i in undone), undone
    if gradient_fraction == 1:
        assert any(i >= 15 for i in undone), undone

    first = start()
    got = run(*first, 15)
    model_state, state = saved_and_loaded(first[0].model.state_dict()), saved_and_loaded(first[1].state_dict())
    second = start()
    second[0].model.load_state_dict(model_state)
    optimizer = KSD(second[0].model.parameters(), krylov_dim=5, seed=99)  # the state's seed wins
    optimizer.load_state_dict(state)
    got += run(second[0], optimizer, second[2], 15)
    assert got == expected
    for p, q in zip(whole[0].params, second[0].params, strict=True):
        assert torch.equal(p, q)


def test_state_right_before_a_rollback_survives() -> None:
    """Resume between the step that raised the loss and the one that undoes it."""
    problem = noisy_regression()
    sets = Subsets(problem.data, batch_size=50, fraction=0.05, seed=5)
    optimizer = KSD(problem.params, krylov_dim=5)
    for _ in range(30):
        snapshot = saved_and_loaded(problem.model.state_dict()), saved_and_loaded(optimizer.state_dict())
        report = optimizer.step(problem.closure, sets)
        if not report.accepted:
            break
    assert not report.accepted
    after = [p.detach().clone() for p in problem.params]
    problem.model.load_state_dict(snapshot[0])
    resumed = KSD(problem.params, krylov_dim=5)
    resumed.load_state_dict(snapshot[1])
    again = resumed.step(problem.closure, sets)
    assert not again.accepted
    assert again.set_sizes["C"] == report.set_sizes["C"] == 12
    assert all(torch.equal(p, q) for p, q in zip(problem.params, after, strict=True))


def test_a_rise_is_undone_and_settled() -> None:
    problem = noisy_regression()
    sets = Subsets(problem.data, batch_size=200, fraction=0.05, seed=5)
    optimizer = KSD(problem.params, krylov_dim=5)
    losses, undone = [], 0
    for _ in range(20):
        report = optimizer.step(problem.closure, sets)
        losses.append(report.loss)
        undone += not report.accepted
    assert undone > 0
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(losses))
    settlement = optimizer.settle(problem.closure, sets)
    final = problem.closure(problem.data)[0].item()
    assert float(settlement) == pytest.approx(final, rel=1e-5)
    assert final <= losses[-1] * (1 + 1e-6)
    again = optimizer.settle(problem.closure, sets)
    assert again.accepted
    assert again.loss == pytest.approx(final, rel=1e-5)


def test_settle_undoes_the_last_step_if_it_rose() -> None:
    problem = noisy_regression()
    sets = Subsets(problem.data, batch_size=200, fraction=0.05, seed=5)
    optimizer = KSD(problem.params, krylov_dim=5)
    outcomes = set()
    for _ in range(20):
        before = [p.detach().clone() for p in problem.params]
        report = optimizer.step(problem.closure, sets)
        settlement = optimizer.settle(problem.closure, sets)
        outcomes.add(settlement.accepted)
        if not settlement.accepted:
            assert settlement.loss == report.loss
            assert all(torch.equal(p, q) for p, q in zip(problem.params, before, strict=True))
            assert "last_step" not in optimizer.state_dict()["state"][0]
    assert outcomes == {True, False}


def test_paper_keeps_every_step() -> None:
    problem = noisy_regression()
    sets = Subsets(problem.data, batch_size=200, fraction=0.05, seed=5)
    optimizer = KSD(problem.params, **{**krylov_descent.PAPER, "krylov_dim": 5})
    reports = [optimizer.step(problem.closure, sets) for _ in range(15)]
    assert all(report.accepted for report in reports)
    assert any(b.loss > a.loss for a, b in itertools.pairwise(reports))


def test_edited_parameters_are_not_rolled_back() -> None:
    problem = problems.mlp(60)
    sets = Subsets(problem.data, batch_size=30, fraction=0.3, seed=0)
    optimizer = KSD(problem.params, krylov_dim=3)
    for _ in range(3):
        first = optimizer.step(problem.closure, sets)
    edited = [10 * torch.randn_like(p) for p in problem.params]
    with torch.no_grad():
        for p, q in zip(problem.params, edited, strict=True):
            p.copy_(q)
    report = optimizer.step(problem.closure, sets)
    assert report.accepted
    assert report.loss > first.loss  # it stands where the user put it


def test_a_changed_loss_is_not_taken_for_a_rise() -> None:
    problem = noisy_regression(2000)
    sets = Subsets(problem.data, batch_size=500, fraction=0.5, seed=0)
    optimizer = KSD(problem.params, krylov_dim=3)
    first = optimizer.step(problem.closure, sets)

    def shifted(batch: Any) -> Any:
        loss, logits = problem.closure(batch)
        return loss + 5, logits

    report = optimizer.step(shifted, sets)
    assert report.loss > first.loss
    assert report.accepted


def test_fresh_gradient_set_is_compared_on_the_same_samples() -> None:
    """A fresh A differs by chance; only a rise beyond the measured noise undoes a step."""
    problem = noisy_regression(2000)
    sets = Subsets(problem.data, batch_size=20, fraction=0.1, gradient_fraction=0.1, seed=0)
    optimizer = KSD(problem.params, krylov_dim=5)
    reports = [optimizer.step(problem.closure, sets) for _ in range(15)]
    rises = sum(b.loss > a.loss for a, b in itertools.pairwise(reports))
    assert rises >= 3
    assert sum(not r.accepted for r in reports) < rises


def test_trainers_find_what_they_read() -> None:
    problem = problems.mlp(20)
    optimizer = KSD(problem.params, krylov_dim=3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = optimizer.step(lambda: problem.closure(problem.data))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    with pytest.warns(UserWarning, match="lr=0.1 has no effect"):
        after = optimizer.step(lambda: problem.closure(problem.data))
    assert float(after) < float(before)
    optimizer.zero_grad()
    assert "KSD" in repr(optimizer)


def test_groups_are_read_anew_at_every_step() -> None:
    torch.manual_seed(0)
    first, second, late = (nn.Linear(3, 3).double() for _ in range(3))
    x = torch.randn(30, 3, dtype=torch.float64)

    def closure() -> tuple[Tensor, Tensor]:
        r = late(torch.tanh(second(torch.tanh(first(x))))) - x
        return r.square().mean(), r

    groups: list[dict[str, Any]] = [
        {"params": list(first.parameters()), "weight_decay": 1e-3},
        {"params": list(second.parameters())},
    ]
    optimizer = KSD(groups, krylov_dim=4)
    optimizer.step(closure)
    kept = [p.detach().clone() for p in late.parameters()]
    optimizer.add_param_group({"params": list(late.parameters())})
    second.requires_grad_(False)
    frozen = [p.detach().clone() for p in second.parameters()]
    report = optimizer.step(closure)
    assert report.search_loss_after < report.loss
    assert any(not torch.equal(p, q) for p, q in zip(late.parameters(), kept, strict=True))
    assert all(torch.equal(p, q) for p, q in zip(second.parameters(), frozen, strict=True))
    optimizer.param_groups[0]["weight_decay"] = 100.0
    assert float(optimizer.step(closure)) > 10 * report.loss
    second.requires_grad_(True)
    optimizer.step(closure)
    state = saved_and_loaded(optimizer.state_dict())
    other = KSD(groups[:1] + [{"params": g["params"]} for g in optimizer.param_groups[1:]], krylov_dim=4)
    other.load_state_dict(state)
    assert other.param_groups[0]["weight_decay"] == 100.0


def test_copies_keep_settings_and_state() -> None:
    problem = problems.mlp(30)
    optimizer = KSD(problem.params, krylov_dim=3, curvature="fisher", search=Search(iterations=3))
    optimizer.step(lambda: problem.closure(problem.data))
    model, clone = copy.deepcopy((problem.model, optimizer))
    pickle.loads(pickle.dumps(optimizer))

    def on_copy() -> Any:
        logits = model(problem.data[0])
        return F.cross_entropy(logits, problem.data[1]), logits

    a, b = optimizer.step(lambda: problem.closure(problem.data)), clone.step(on_copy)
    assert (a.iteration, a.loss, a.search_loss_after) == (b.iteration, b.loss, b.search_loss_after)
    assert b.inner_iterations <= 3


def test_report_is_plain_and_frozen() -> None:
    problem = problems.mlp(60)
    sets = Subsets(problem.data, batch_size=30, seed=0, fraction=0.2)
    report = KSD(problem.params, krylov_dim=3).step(problem.closure, sets)
    assert json.loads(json.dumps(report.as_dict()))["set_sizes"] == {"A": 60, "B": 12, "C": 12}
    assert set(report.seconds) == {"gradient", "basis", "search"}
    assert "\n" not in str(report)
    assert f"{report.loss:.6g}" in str(report)
    assert math.isclose(float(report), report.loss)
    with pytest.raises(AttributeError):
        report.loss = 0.0  # type: ignore[misc]


def test_loss_alone_works_with_the_hessian_and_says_so() -> None:
    problem = problems.mlp(30)
    report = KSD(problem.params, curvature="hessian").step(lambda: problem.closure(problem.data)[0])
    assert report.preconditioner == "none"
    assert any("No preconditioner" in note for note in report.notes)


class Network:
    """A closure over batches, and its mistakes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.x = torch.randn(20, 4, dtype=torch.float64)
        self.y = torch.randint(0, 3, (20,))

    def logits(self) -> Tensor:
        z: Tensor = self.model(self.x)
        return z

    def loss(self) -> Tensor:
        return F.cross_entropy(self.logits(), self.y)


def _with(net: Network, f: Callable[[Tensor, Tensor], Any]) -> Any:
    z = net.logits()
    return f(F.cross_entropy(z, net.y), z)


def _dependent(net: Network) -> Any:
    h = torch.tanh(net.model[0](net.x))
    z = net.model[2](h)
    return F.cross_entropy(z, net.y) + h.square().mean(), (h, z)


@pytest.mark.parametrize(
    ("closure", "message"),
    [
        (lambda net: None, r"returned NoneType \(None\)"),
        (lambda net: 3.0, r"returned float \(3.0\)"),
        (lambda net: _with(net, lambda f, z: (f, z, 1, 2)), "The closure returned"),
        (lambda net: _with(net, lambda f, z: (f, "z")), r"second value must be a real floating-point tensor"),
        (lambda net: _with(net, lambda f, z: (f, z, -1)), "weight of its mean, must be a number ≥ 0"),
        (lambda net: _with(net, lambda f, z: (f, z, "many")), "weight of its mean, must be a number ≥ 0"),
        (lambda net: _with(net, lambda f, z: (z.sum(1), z)), r"must be one real number; got shape \(20,\)"),
        (lambda net: _with(net, lambda f, z: (f.detach(), z)), "does not depend on the parameters"),
        (lambda net: _with(net, lambda f, z: (f, z.detach())), r"Output 0 .* was detached"),
        (lambda net: _with(net, lambda f, z: (f, torch.softmax(z, 1))), "not computed from the outputs"),
        (_dependent, "Output 1 of the closure is computed from its output 0"),
        (lambda net: _with(net, lambda f, z: (f, (z, z))), "the same tensor twice"),
    ],
)
def test_closures_that_cannot_be_used(closure: Callable[[Network], Any], message: str) -> None:
    net = Network()
    before = [p.detach().clone() for p in net.model.parameters()]
    with pytest.raises(ValueError, match=message):
        KSD(net.model.parameters()).step(lambda: closure(net))
    assert all(torch.equal(p, q) for p, q in zip(net.model.parameters(), before, strict=True))


def test_rows_that_are_not_samples() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(2, 3).double()
    x, y = torch.randn(40, 5, 2, dtype=torch.float64), torch.randint(0, 3, (40, 5))
    sets = Subsets((x, y), batch_size=20, fraction=0.2, seed=0)

    def flattened(batch: Any) -> tuple[Tensor, Tensor]:
        z = layer(batch[0]).reshape(-1, 3)
        return F.cross_entropy(z, batch[1].reshape(-1)), z

    with pytest.raises(ValueError, match=r"shape \(100, 3\) for a micro-batch of 20 samples.*before flattening"):
        KSD(layer.parameters(), krylov_dim=3).step(flattened, sets)
    assert KSD(layer.parameters(), krylov_dim=3, preconditioner=None).step(flattened, sets).krylov_dim == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"krylov_dim": 0}, "krylov_dim=0"),
        ({"krylov_dim": 2.5}, "krylov_dim=2.5"),
        ({"curvature": "gauss"}, "curvature='gauss'.*fisher.*ggn.*hessian"),
        ({"preconditioner": "kfac"}, "preconditioner='kfac'"),
        ({"previous": "last"}, "previous='last'"),
        ({"search": 30}, "search=30"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"memory_budget": -1}, "memory_budget=-1"),
        ({"seed": "x"}, "seed='x'"),
        ({"memory_budget": "1GB"}, "memory_budget='1GB'"),
        ({"preconditioner": Fisher}, "preconditioner=<class"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KSD([nn.Parameter(torch.ones(2))], **arguments)


@pytest.mark.parametrize(
    "bad", [{"iterations": 0}, {"evaluations": 0}, {"tolerance": 1.0}, {"floor": 0.0}, {"negative": "flip"}]
)
def test_search_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"Search\("):
        Search(**bad)


def test_parameters_are_checked() -> None:
    real = nn.Parameter(torch.ones(2))
    for params, message in (
        ([real, nn.Parameter(torch.ones(2, dtype=torch.float64))], r"share one of the dtypes.*float32.*float64"),
        ([nn.Parameter(torch.ones(2, dtype=torch.complex64))], "real floating-point parameters"),
        ([real, nn.Parameter(torch.ones(2, device="meta"))], r"share one of the devices.*meta"),
        ([nn.Parameter(torch.ones(2), requires_grad=False)], "requires_grad=False"),
    ):
        with pytest.raises(ValueError, match=message):
            KSD(params)
    with pytest.raises(ValueError, match="weight_decay=nan"):
        KSD([{"params": [real], "weight_decay": torch.nan}])


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True)

    def closure() -> tuple[Tensor, Tensor]:
        z = table(torch.tensor([1, 2]))
        return z.square().mean(), z

    with pytest.raises(ValueError, match="sparse=False"):
        KSD(table.parameters()).step(closure)


def test_step_is_called_wrongly() -> None:
    net = Network()
    optimizer = KSD(net.model.parameters())
    sets = Subsets((net.x,), batch_size=5, seed=0)
    with pytest.raises(ValueError, match="None for a closure"):
        optimizer.step()
    with pytest.raises(ValueError, match=r"calls closure\(batch\)"):
        optimizer.step(lambda: None, sets)
    with pytest.raises(ValueError, match=r"calls closure\(\)"):
        optimizer.step(lambda batch: None)
    with pytest.raises(ValueError, match="sets is a Tensor"):
        optimizer.step(lambda batch: None, net.x)  # type: ignore[arg-type]
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        optimizer.step(lambda: None)


def test_an_exception_of_the_closure_leaves_everything_as_it_was() -> None:
    problem = problems.mlp(60)
    sets = Subsets(problem.data, batch_size=30, fraction=0.3, seed=0)
    optimizer = KSD(problem.params, krylov_dim=3)
    optimizer.step(problem.closure, sets)
    calls = 0

    def counted(batch: Any) -> Any:
        nonlocal calls
        calls += 1
        return problem.closure(batch)

    copy_of = copy.deepcopy((problem.model.state_dict(), optimizer.state_dict()))
    optimizer.step(counted, sets)
    problem.model.load_state_dict(copy_of[0])
    optimizer.load_state_dict(copy_of[1])
    total = calls
    for stop in range(1, total + 1):
        calls = 0

        def failing(batch: Any, stop: int = stop) -> Any:
            if calls + 1 == stop:  # noqa: B023 — the count is shared on purpose
                raise KeyboardInterrupt
            return counted(batch)

        with pytest.raises(KeyboardInterrupt):
            optimizer.step(failing, sets)
        for p, q in zip(problem.params, copy_of[0].values(), strict=True):
            assert torch.equal(p, q)
            assert p.requires_grad
            assert p.grad is None
        assert optimizer.state_dict()["state"][0]["numbers"]["iteration"] == 1


def test_settle_is_atomic() -> None:
    problem = noisy_regression()
    sets = Subsets(problem.data, batch_size=20, fraction=0.05, seed=5)
    optimizer = KSD(problem.params, krylov_dim=5)
    for _ in range(20):
        optimizer.step(problem.closure, sets)
        snapshot = copy.deepcopy((problem.model.state_dict(), optimizer.state_dict()))
        if not optimizer.settle(problem.closure, sets).accepted:
            break
    problem.model.load_state_dict(snapshot[0])
    optimizer.load_state_dict(snapshot[1])
    for stop in range(12):  # six micro-batches at each of two points
        calls = itertools.count()

        def failing(batch: Any, stop: int = stop, calls: Any = calls) -> Any:
            if next(calls) == stop:
                raise KeyboardInterrupt
            return problem.closure(batch)

        with pytest.raises(KeyboardInterrupt):
            optimizer.settle(failing, sets)
        assert all(torch.equal(p, q) for p, q in zip(problem.params, snapshot[0].values(), strict=True))
    assert not optimizer.settle(problem.closure, sets).accepted


def test_autocast_around_the_step_is_switched_off() -> None:
    def run(outside: bool) -> float:
        problem = noisy_regression()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
            return KSD(problem.params).step(lambda: problem.closure(problem.data)).search_loss_after

    assert run(True) == run(False)


@pytest.mark.parametrize("outside", [True, False])
def test_autocast_inside_the_closure(outside: bool) -> None:
    problem = noisy_regression()

    def closure() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = problem.model(problem.data[0])
        r = z.float() - problem.data[1]
        return r.square().mean(), r

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
        report = KSD(problem.params).step(closure)
    assert report.search_loss_after < 0.95 * report.loss


def test_default_device_is_not_used() -> None:
    problem = problems.mlp(60)
    sets = Subsets(problem.data, batch_size=16, fraction=0.2, seed=0)
    torch.set_default_device("meta")
    try:
        report = KSD(problem.params, krylov_dim=3).step(problem.closure, sets)
        assert math.isfinite(report.search_loss_after)
    finally:
        torch.set_default_device(None)


def test_a_copy_carries_no_workspace() -> None:
    layer = nn.Linear(100, 100)
    x = torch.randn(20, 100)

    def closure() -> Any:
        z = layer(x)
        return z.square().mean(), z

    optimizer = KSD(layer.parameters())
    optimizer.step(closure)
    assert len(pickle.dumps(optimizer)) < 6 * 4 * 10_100


def test_parameters_of_another_model() -> None:
    problem, other = problems.mlp(30), problems.mlp(30)
    with pytest.raises(ValueError, match="depends on none of the parameters given to KSD"):
        KSD(other.params).step(lambda: problem.closure(problem.data))


def test_swapped_values_are_named() -> None:
    net = Network()
    with pytest.raises(ValueError, match="the loss comes first"):
        KSD(net.model.parameters()).step(lambda: _with(net, lambda f, z: (z, f)))


def test_gradient_penalty_with_respect_to_parameters() -> None:
    """Forward-only passes cannot freeze the parameters of such a closure."""
    problem = problems.mlp(60)
    sets = Subsets(problem.data, batch_size=60, fraction=0.3, seed=0)

    def closure(batch: Any) -> Any:
        loss, _ = problem.closure(batch)
        grads = torch.autograd.grad(loss, problem.params, create_graph=True)
        return loss + 0.01 * torch.stack([g.square().sum() for g in grads]).sum()

    optimizer = KSD(problem.params, krylov_dim=3, curvature="hessian")
    with pytest.raises(ValueError, match="not the weighted mean"):  # squares of a mean are no mean of squares
        optimizer.step(closure, sets)
    report = optimizer.step(lambda: closure(problem.data))
    assert report.search_loss_after < report.loss


def test_step_under_no_grad_works_and_grads_are_left_alone() -> None:
    problem = problems.mlp(30)
    for p in problem.params:
        p.grad = torch.full_like(p, 7.0)
    with torch.no_grad():
        report = KSD(problem.params).step(lambda: problem.closure(problem.data))
    assert report.search_loss_after < report.loss
    assert all(bool((p.grad == 7).all()) for p in problem.params if p.grad is not None)


def test_whole_numbers_of_numpy_are_taken() -> None:
    KSD([nn.Parameter(torch.ones(2))], krylov_dim=np.int64(5), seed=np.int32(3))  # type: ignore[arg-type]


def test_first_group_may_be_empty() -> None:
    w = nn.Parameter(torch.ones(2))
    groups: list[dict[str, Any]] = [{"params": []}, {"params": [w]}]
    optimizer = KSD(groups)
    optimizer.step(lambda: (w.square().mean(), w))
    assert optimizer.state_dict()["state"][0]["numbers"]["iteration"] == 1


def test_custom_options_by_object() -> None:
    problem = problems.mlp(30)
    report = KSD(problem.params, preconditioner=Fisher(floor=1e-2, probes=3)).step(
        lambda: problem.closure(problem.data)
    )
    assert report.preconditioner == "fisher"


def test_the_search_loss_is_f_on_c_also_after_steps_were_undone() -> None:
    """Weights that are masks, a weight decay, and a C that is doubled: everything that f on C depends on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y, mask = torch.randn(60, 4, dtype=torch.float64), torch.randint(0, 3, (60,)), (torch.rand(60) > 0.3).double()

    def closure(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        logits = model(batch[0])
        losses = F.cross_entropy(logits, batch[1], reduction="none")
        return (losses * batch[2]).sum() / batch[2].sum().clamp(min=1), logits, batch[2].sum()

    sets = Subsets((x, y, mask), batch_size=7, fraction=0.2, seed=0)
    optimizer = KSD(model.parameters(), krylov_dim=6, weight_decay=0.01)
    undone = 0
    for i in range(10):
        report = optimizer.step(closure, sets)
        undone += not report.accepted
        assert report.set_sizes["C"] == min(60, 12 << undone)
        c = sets.draw(i, krylov_dim=6, search_growth=undone).c
        with torch.no_grad():
            terms = [(float(loss), float(weight)) for loss, _, weight in (closure(batch.data) for batch in c)]
            decay = 0.005 * sum(float(p.square().sum()) for p in model.parameters())
        mean = sum(loss * weight for loss, weight in terms) / sum(weight for _, weight in terms)
        assert report.search_loss_after == pytest.approx(mean + decay, rel=1e-12)
    assert undone > 1


@pytest.mark.parametrize("shared", [torch.zeros(6, 1).expand(6, 3), torch.randn(8).as_strided((3, 4), (2, 1))])
def test_a_parameter_whose_entries_share_memory_is_refused(shared: Tensor) -> None:
    for method in (KSD, GaussNewtonFlow):
        with pytest.raises(ValueError, match=r"share memory .*nn\.Parameter\(x\.clone\(\)\)"):
            method([nn.Parameter(shared)])
    KSD([nn.Parameter(torch.zeros(0, 5)), nn.Parameter(torch.zeros(())), nn.Parameter(torch.randn(3, 6).t())])


@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_a_loss_that_torch_cannot_differentiate_under_autocast_is_refused_in_words(curvature: Any) -> None:
    layer, x, y = nn.Linear(3, 2), torch.randn(5, 3), torch.randn(5, 2)

    def closure() -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = layer(x)
        return nn.functional.huber_loss(z, y), z

    with pytest.raises(ValueError, match=r"Cast the outputs before the loss.*outputs\.float\(\)"):
        KSD(layer.parameters(), curvature=curvature).step(closure)


@pytest.mark.parametrize("settings", [{}, PAPER, DEEP])
def test_parameters_without_entries_are_at_rest(settings: dict[str, Any]) -> None:
    frozen, empty = nn.Linear(2, 1).requires_grad_(False), nn.Parameter(torch.zeros(0, 3))
    x = torch.randn(5, 2)

    def closure() -> tuple[Tensor, Tensor]:
        z = frozen(x) + empty.sum()
        return z.square().mean(), z

    report = KSD([*frozen.parameters(), empty], **settings).step(closure)
    assert report.stop_reason is krylov_descent.StopReason.ZERO_GRADIENT


def test_two_parameters_that_share_memory_are_refused() -> None:
    w = torch.randn(4)
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(4,\) share memory"):
        KSD([nn.Parameter(w), nn.Parameter(w[:2])])
    KSD([nn.Parameter(w[:2]), nn.Parameter(w[2:])])


def test_a_run_with_an_unused_parameter_of_nan_is_resumed() -> None:
    w, unused = nn.Parameter(torch.tensor([3.0, -2.0])), nn.Parameter(torch.full((2,), math.nan))

    def closure() -> tuple[Tensor, Tensor]:
        return (w**4).mean(), w

    optimizer = KSD([w, unused])
    optimizer.step(closure)
    resumed = KSD([w, unused])
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.step(closure).iteration == 1


@pytest.mark.parametrize(
    ("method", "argument", "words"),
    [
        (KSD, {"lr": 0.1}, "KSD takes no lr: .* search on the loss.*Leave it out"),
        (KSD, {"momentum": 0.9}, "the last step is part of the subspace"),
        (KSD, {"max_iter": 20, "line_search_fn": "strong_wolfe"}, "KSD takes no (max_iter|line_search_fn)"),
        (GaussNewtonFlow, {"lr": 0.1}, "GaussNewtonFlow takes no lr"),
    ],
)
def test_arguments_of_other_optimizers_are_refused_in_words(method: Any, argument: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        method(Network().model.parameters(), **argument)
    assert GaussNewtonFlow(Network().model.parameters(), momentum=0.5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'kyrlov_dim'"):
        KSD(Network().model.parameters(), kyrlov_dim=3)  # type: ignore[call-arg]


def test_a_scheduler_is_told_once_that_it_has_no_effect() -> None:
    net = Network()
    optimizer = KSD(net.model.parameters(), krylov_dim=2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    optimizer.step(net.loss)
    scheduler.step()
    with pytest.warns(UserWarning, match=r"lr=0\.9 has no effect.*scheduler"):
        optimizer.step(net.loss)
    scheduler.step()
    optimizer.step(net.loss)


def test_a_new_mini_batch_at_each_step_is_told_once() -> None:
    net = Network()
    optimizer = KSD(net.model.parameters(), krylov_dim=2)

    def steps(number: int) -> None:
        for _ in range(number):
            chosen = torch.randperm(20)[:5]
            optimizer.step(lambda chosen=chosen: F.cross_entropy(net.model(net.x[chosen]), net.y[chosen]))

    steps(3)
    with pytest.warns(UserWarning, match=r"loss differs at the same weights.*step\(closure, loader\)"):
        steps(1)
    steps(6)


def test_new_points_now_and_then_and_changed_weights_are_no_mini_batches() -> None:
    net = Network()
    optimizer = KSD(net.model.parameters(), krylov_dim=2)
    chosen = [torch.arange(20)]
    for step in range(12):
        if step % 3 == 2:
            chosen[:] = [torch.randperm(20)[:10]]
        else:
            torch.nn.init.normal_(next(net.model.parameters()))
        optimizer.step(lambda: F.cross_entropy(net.model(net.x[chosen[0]]), net.y[chosen[0]]))
