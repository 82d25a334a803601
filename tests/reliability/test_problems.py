"""Random problems, small in number: the same trials that ``python -m reliability`` takes by the thousand.

Below them, each fault that they found, by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reliability.closures import RAISES, RETURNS
from reliability.problems import trial
from reliability.recipe import CHOICES, Problem
from reliability.snapshot import Snapshot, same
from torch import Tensor, nn

from krylov_descent import KSD, GaussNewtonFlow, Search, StopReason, Subsets
from krylov_descent.krylov.search import whiten

pytestmark = pytest.mark.nightly

PROBLEMS = st.builds(Problem, **{name: st.sampled_from(values) for name, values in CHOICES.items()})
PLAIN = Problem(**{name: values[0] for name, values in CHOICES.items()} | {"method": "default"})


def changed(**fields: Any) -> Problem:
    """The simplest problem, with something else about it."""
    return Problem(**{**vars(PLAIN), **fields})


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(PROBLEMS)
def test_nothing_is_lost(problem: Problem) -> None:
    assert trial(problem).lost == []


def test_a_problem_is_that_of_its_seed() -> None:
    assert Problem.drawn("flow", 102) == Problem.drawn("flow", 102) != Problem.drawn("flow", 103)
    assert Problem.drawn("flow", 102) == replace(Problem.drawn("PAPER", 102), method="flow")
    assert Problem.drawn("flow", 1, "exception").fault != "none"


def test_each_kind_of_fault_ends_as_it_should() -> None:
    for fault in RAISES:
        for call in (1, 2, 4, 9):
            judgement = trial(changed(fault=fault, fault_call=call))
            assert (judgement.ended, judgement.lost) == ("raised as given", []), (fault, call)
    for fault in RETURNS:
        judgement = trial(changed(fault=fault, fault_call=1))
        assert (judgement.ended, judgement.lost) == ("refused", []), (fault, judgement)


@pytest.mark.parametrize(
    "broken",
    [
        {"inputs": "nan"},
        {"targets": "inf"},
        {"loss": "cross entropy", "outputs": 3, "targets": "too large"},
        {"network": "batch norm"},
        {"network": "dropout"},
        {"oddity": "all frozen"},
        {"oddity": "nan weight"},
        {"weight_decay": 1e300, "dtype": "float32"},
        {"memory": "no room"},
        {"loss": "sum", "sets": "half"},
    ],
)
def test_what_cannot_work_is_refused(broken: dict[str, Any]) -> None:
    judgement = trial(changed(**broken))
    assert judgement.lost == []
    assert judgement.ended in ("refused", "raised as given")


# That the judge can tell


def test_the_judge_sees_a_rise_a_nan_and_what_is_left_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = KSD.step

    def after(do: Callable[[KSD], object]) -> Callable[..., Any]:
        def spoiled(self: KSD, *args: Any) -> Any:
            try:
                return step(self, *args)
            finally:
                with torch.no_grad():
                    do(self)

        return spoiled

    for problem, do, why in (
        (PLAIN, lambda self: self.trained()[0].add_(3), "the loss rose"),
        (PLAIN, lambda self: self.trained()[0].fill_(math.nan), "no longer finite"),
        (
            changed(oddity="frozen"),
            lambda self: self.param_groups[0]["params"][0].add_(1),
            "frozen parameter has moved",
        ),
        (PLAIN, lambda self: torch.rand(()), "random state changed"),
        (changed(fault="nothing"), lambda self: self.trained()[0].add_(1), "parameters changed by a step that failed"),
    ):
        monkeypatch.setattr(KSD, "step", after(do))
        assert why in "; ".join(trial(problem).lost)
    monkeypatch.setattr(KSD, "step", lambda self, *args: 1 / 0)
    assert "ZeroDivisionError" in trial(PLAIN).lost[0]


def test_a_snapshot_compares_bits() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.5)
    snapshot = Snapshot(model, optimizer)
    assert snapshot.changed() == []
    model.weight.data.zero_()
    model.eval()
    assert snapshot.changed() == ["parameters", "training"]
    assert not same(torch.tensor(0.0), torch.tensor(-0.0))
    assert same({"a": [torch.tensor(math.nan)]}, {"a": [torch.tensor(math.nan)]})


# What they found


def test_a_loss_without_a_minimum_does_not_end_in_nan() -> None:
    for dtype in (torch.float32, torch.float64):
        w = nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = KSD([w])
        for _ in range(3):
            report = optimizer.step(lambda w=w: (w.mean(), w))
        assert bool(w.isfinite().all())
        assert report.loss < -1e30


def test_a_gradient_longer_than_its_dtype_can_say_is_still_a_direction() -> None:
    w = nn.Parameter(torch.full((4,), 0.1))
    report = KSD([w], preconditioner=None).step(lambda: ((3e38 * w).sum(), w))
    assert report.grad_norm > torch.finfo(torch.float32).max
    assert bool(w.isfinite().all())


def test_a_step_that_rounds_to_something_worse_is_not_taken() -> None:
    """Of a thousand points that bfloat16 can hold, the search sees others than the step ends at."""
    for seed in range(20):
        torch.manual_seed(seed)
        w = nn.Parameter(torch.randn(4, 2).bfloat16())
        x, y = torch.randn(1, 4).bfloat16(), torch.randn(1, 2).bfloat16()

        def closure(w: Tensor = w, x: Tensor = x, y: Tensor = y) -> tuple[Tensor, Tensor]:
            z = x @ w
            return (z - y).abs().mean(), z

        optimizer = KSD([w], curvature="fisher", search=Search(floor=1e-12))
        for _ in range(4):
            before = closure()[0].item()
            report = optimizer.step(closure)
            assert report.search_loss_after == closure()[0].item() <= before * (1 + 8 * 2**-7)


def test_any_floor_has_a_factor() -> None:
    torch.manual_seed(0)
    q = torch.linalg.qr(torch.randn(30, 30, dtype=torch.float64))[0]
    H = q * torch.logspace(0, -40, 30, dtype=torch.float64) @ q.T
    C = whiten((H + H.T) / 2, 1e-300)
    torch.testing.assert_close(C @ C.T, H, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sets", [None, 2])
def test_the_flow_without_curvature_and_with_outputs_without_elements(sets: int | None) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    w = nn.Parameter(torch.ones(3))

    def closure(batch: Tensor = x) -> tuple[Tensor, Any]:
        z = batch @ w
        return z.mean(), (z, (batch[:0] @ w)) if sets is None else z

    given = () if sets is None else (Subsets(x, batch_size=sets, fraction=0.5, seed=0),)
    report = GaussNewtonFlow([w]).step(closure, *given)
    assert report.search_loss_after < report.search_loss_before


def test_the_flow_in_half_precision() -> None:
    judgement = trial(changed(method="flow", dtype="bfloat16 throughout", outputs=2))
    assert (judgement.ended, judgement.lost) == ("improved", [])


def test_outputs_that_the_loss_does_not_use_are_refused_by_the_flow() -> None:
    w = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="not computed from the outputs"):
        GaussNewtonFlow([w]).step(lambda: (w.square().mean(), w.softmax(0)))


def test_the_flow_on_one_sample_that_is_fitted() -> None:
    """Where H_L is rounding, and seems to couple rows of which there is one."""
    for seed in range(20):
        torch.manual_seed(seed)
        w, x = nn.Parameter(torch.randn(4, 3, dtype=torch.float64)), torch.randn(1, 4, dtype=torch.float64)

        def closure(w: Tensor = w, x: Tensor = x) -> tuple[Tensor, Tensor]:
            z = x @ w
            return nn.functional.cross_entropy(z, torch.tensor([1])), z

        optimizer = GaussNewtonFlow([w])
        losses = [optimizer.step(closure).loss for _ in range(8)]
        assert losses[-1] < losses[0]


def test_nan_in_a_parameter_that_nothing_uses_does_not_stop_the_rollback() -> None:
    """Steps on one sample of seven, which raise the loss of the others."""
    for seed in (962, *range(10)):
        problem = changed(
            network="deep mlp",
            width=8,
            oddity="unused nan",
            inputs="constant",
            sets="tenth",
            previous="none",
            seed=seed,
        )
        assert trial(problem).lost == []


def test_dropout_that_drops_the_same_twice_is_refused_nonetheless() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.Dropout(1e-9))
    x = torch.ones(1, 2)

    def closure() -> tuple[Tensor, Tensor]:
        z = model(x)
        return z.square().mean(), z

    with pytest.raises(ValueError, match=r"which is chance\. Dropout is active in Dropout"):
        KSD(model.parameters()).step(closure)


def test_a_closure_that_is_random_is_refused_where_the_loss_may_be_infinite() -> None:
    w, calls = nn.Parameter(torch.ones(3)), iter(range(100))

    def closure() -> tuple[Tensor, Tensor]:
        return w.square().mean() / min(next(calls), 1), w  # infinite at the first call

    with pytest.raises(ValueError, match=r"closure is random: the same batch gave the loss inf and then 1\.0"):
        KSD([w]).step(closure)


def test_a_step_that_was_not_taken_is_told_of() -> None:
    w = nn.Parameter(torch.tensor([3.0, -2.0]))
    higher = False

    def closure() -> tuple[Tensor, Tensor]:
        # As if rounding raised the loss at the point taken: that is looked at without a graph.
        return w.pow(4).mean() + (100.0 if higher and not w.requires_grad else 0.0), w

    optimizer = KSD([w], search=Search(iterations=1))
    optimizer.step(closure)
    higher, before = True, w.detach().clone()
    report = optimizer.step(closure)
    assert torch.equal(w.detach(), before)
    assert report.search_loss_after == report.search_loss_before == report.loss
    assert report.stop_reason is StopReason.NOISE
    assert "lost in rounding" in report.notes[-1]
    higher = False
    assert optimizer.step(closure).search_loss_after < report.loss
