"""Points drawn by the user's function: the same until the loss on others parts from theirs."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, GaussNewtonFlow, Points, check, checkpoint
from krylov_descent.samples.points import PointsState

F64 = torch.float64


def on_line(n: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Points in the interval, and a few at its ends."""
    inner = 2 * torch.rand(n, 1, generator=generator, dtype=F64) - 1
    return {"inner": inner, "ends": torch.tensor([[-1.0], [-1.0], [1.0], [1.0]], dtype=F64)}


def network(width: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1)).double()


def closure_of(model: nn.Module) -> Callable[[Any], Any]:
    """u' = 3 cos 3x with u = sin 3x at the ends."""

    def closure(points: dict[str, Tensor]) -> Any:
        x = points["inner"].detach().requires_grad_()
        (rate,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        residuals = {
            "inner": rate - 3 * torch.cos(3 * x),
            "ends": model(points["ends"]) - torch.sin(3 * points["ends"]),
        }
        return torch.stack([r.square().mean() for r in residuals.values()]).sum(), residuals

    return closure


METHODS: list[Any] = [GaussNewtonFlow, functools.partial(KSD, krylov_dim=4)]


def trained(method: Any, steps: int, size: int = 6) -> tuple[nn.Module, Any, list[Any]]:
    model = network()
    optimizer, points = method(model.parameters()), Points(on_line, size)
    return model, optimizer, [optimizer.step(closure_of(model), points) for _ in range(steps)]


@pytest.mark.parametrize("method", METHODS)
def test_few_points_are_overfitted_and_drawn_anew_and_then_more(method: Any) -> None:
    _, _, reports = trained(method, 25)
    assert [r.iteration for r in reports if "held_out" in r.details] == list(range(4, 25, 5))
    draws = [int(r.details["draw"]) for r in reports]
    changed = [r for r, before in zip(reports[1:], draws, strict=False) if r.details["draw"] != before]
    assert len(changed) >= 3
    for report in changed:
        assert report.notes[0].startswith("The loss on other points is ")
        if report.notes[0].endswith(": other points from now on."):
            assert report.loss == pytest.approx(report.details["held_out"], rel=1e-12)  # the held-out points themselves
    assert reports[-1].set_sizes["A"] > 6
    assert any(note.endswith(": 12 points from now on.") for r in changed for note in r.notes)
    assert all(r.accepted for r in reports)


@pytest.mark.parametrize("method", METHODS)
def test_many_points_stay(method: Any) -> None:
    _, _, reports = trained(method, 10, size=300)
    assert {r.details["draw"] for r in reports} == {0.0}
    assert not any("other points" in note for r in reports for note in r.notes)
    assert reports[-1].loss < reports[0].loss


def test_the_steps_are_those_of_a_closure_without_points() -> None:
    """To the bit, and with as many calls but for the held-out loss."""
    model, twin, calls = network(), network(), [0, 0]
    points = Points(on_line, 300)
    fixed = points.drawn(PointsState())

    def with_points(given: Any) -> Any:
        calls[0] += 1
        return closure_of(model)(given)

    def without() -> Any:
        calls[1] += 1
        return closure_of(twin)(fixed)

    one, other = GaussNewtonFlow(model.parameters()), GaussNewtonFlow(twin.parameters())
    for _ in range(10):
        assert one.step(with_points, points).loss == other.step(without).loss
    assert calls[0] == calls[1] + 2


@pytest.mark.parametrize("method", METHODS)
def test_a_run_resumes_exactly(method: Any, tmp_path: Path) -> None:
    model, optimizer, _ = trained(method, 12)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    path = checkpoint.save(tmp_path / "run.safetensors", model, optimizer)
    points = Points(on_line, 6)
    expected = [optimizer.step(closure_of(model), points).loss for _ in range(4)]

    for load in ("state_dict", "checkpoint"):
        again = network()
        other = method(again.parameters())
        if load == "state_dict":
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            again.load_state_dict(saved["model"])
            other.load_state_dict(saved["optimizer"])
        else:
            checkpoint.load(path, again, other)
        points = Points(on_line, 6)
        assert [other.step(closure_of(again), points).loss for _ in range(4)] == expected, load


def test_the_same_state_gives_the_same_points_and_shards_are_parts_of_them() -> None:
    points, state = Points(on_line, 10, seed=3), PointsState(draw=2, doublings=1)
    whole = points.drawn(state)["inner"]
    assert len(whole) == 20
    assert torch.equal(Points(on_line, 10, seed=3).drawn(state)["inner"], whole)
    for other in (Points(on_line, 10, seed=4).drawn(state), points.drawn(PointsState(draw=3, doublings=1))):
        assert not torch.equal(other["inner"], whole)
    parts = [points.choose(7, state, krylov_dim=1, shard=i, of_shards=3).sets.b[0].data for i in range(3)]
    assert torch.equal(torch.cat([part["inner"] for part in parts]), whole[:18])
    assert [len(part["ends"]) for part in parts] == [1, 1, 1]


def test_losses_of_different_draws_are_not_compared() -> None:
    """Where points change the loss rises, yet the last step is kept; a run takes its best point from the last draw."""
    model = network()
    optimizer = GaussNewtonFlow(model.parameters())
    run = optimizer.run(closure_of(model), Points(on_line, 6), max_steps=25)
    reports = list(run)
    rises = [b for a, b in itertools.pairwise(reports) if b.loss > 2 * a.loss]
    assert rises
    assert all(r.accepted and any("other points" in note for note in r.notes) for r in rises)
    assert run.best is not None
    last = [r.loss for r in reports if r.details["draw"] == reports[-1].details["draw"]]
    assert run.best.value <= min(last)
    assert run.best.value > min(r.loss for r in reports)
    assert run.best.steps >= 25 - len(last)


def test_a_loss_without_bound_below_keeps_its_points() -> None:
    w = nn.Parameter(torch.zeros(1, dtype=F64))
    optimizer, points = KSD([w]), Points(lambda n, generator: torch.rand(n, generator=generator, dtype=F64), 2)

    def energy(x: Tensor) -> Any:
        return (w * w - w - 3 * x).mean(), w

    assert {optimizer.step(energy, points).details["draw"] for _ in range(10)} == {0.0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.rand(3, 1), 3), "draw is a Tensor, not a function"),
        ((on_line, 0), "size is 0: pass a whole number ≥ 1"),
        ((on_line, 2.5), r"size is 2\.5"),
    ],
)
def test_arguments_are_refused_in_words(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Points(*arguments)


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda n, generator: None, "returned a NoneType where points are needed"),
        (lambda n, generator: (), "returned a tuple where points are needed"),
        (lambda n, generator: {"x": [0.5]}, "returned a float where points are needed"),
        (lambda n, generator: torch.rand(0, 1), r"returned a tensor of shape \(0, 1\) where"),
        (lambda n, generator: torch.rand(n, 1), "different points for the same generator"),
    ],
)
def test_draws_are_refused_in_words(draw: Any, words: str) -> None:
    model = network().float()
    before = [p.detach().clone() for p in model.parameters()]

    def closure(x: Tensor) -> Any:
        r = model(x) - x
        return r.square().mean(), r

    with pytest.raises(ValueError, match=words):
        GaussNewtonFlow(model.parameters()).step(closure, Points(draw, 5))
    assert all(map(torch.equal, model.parameters(), before))


def test_too_few_points_for_the_ranks_are_refused_in_words() -> None:
    points = Points(on_line, 10)
    with pytest.raises(ValueError, match="4 points, too few for 5 ranks"):
        _ = points.choose(0, PointsState(), krylov_dim=1, shard=0, of_shards=5).sets.b


def test_check_takes_points_and_advises_the_flow() -> None:
    model = network()
    report = check(closure_of(model), model, Points(on_line, 300))
    assert report.ok, str(report)
    assert "GaussNewtonFlow(model.parameters())" in str(report)
