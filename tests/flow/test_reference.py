"""Each flow step agrees with dense algebra: direction, corrections, lengths, dampings, and momentum."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import GaussNewtonFlow
from krylov_descent.flow.sketch import Sketch, Sketcher
from tests.flow.reference import Dense, DenseFlow, Rows, chances
from tests.least_squares import F64, Closure, mlp, pinn

Problem = Callable[[], tuple[nn.Module, Closure]]
CLOSE = 1e-8  # relative


def curve(points: int, frequency: float, spike: float = 0.0) -> Problem:
    """A sine by a small network; one of its points may be far off."""

    def problem() -> tuple[nn.Module, Closure]:
        model, x = mlp(1, 6, 1), torch.linspace(-1, 1, points, dtype=F64)[:, None]
        y = torch.sin(frequency * x)
        y[points // 4] += spike

        def closure() -> tuple[Tensor, Tensor]:
            r = model(x) - y
            return r.square().mean(), r

        return model, closure

    return problem


few_points, spiked, smooth = curve(12, 4.0), curve(40, 4.0, 6.0), curve(40, 2.0)


def noise() -> tuple[nn.Module, Closure]:
    """Near the best fit of what is mostly noise: a few rows want to fit theirs, and the flow leads nowhere."""
    torch.manual_seed(5)
    model, x = nn.Linear(8, 1, bias=False).double(), torch.randn(24, 8, dtype=F64)
    y = x.sum(1, keepdim=True) + torch.randn(24, 1, dtype=F64)
    best = torch.linalg.lstsq(x, y).solution
    with torch.no_grad():
        model.weight.copy_(best.T).add_(0.1)

    def closure() -> tuple[Tensor, Tensor]:
        z = model(x)
        r = z + 0.3 * (z - x @ best).square() - y
        return r.square().mean(), r

    return model, closure


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.detach().reshape(-1) for x in tensors])


def apart(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


def observed(sketch: Sketch, at: Dense) -> Rows:
    """Which rows a sketch has, told by their directions, and how heavy they are; they are what their chances say."""
    found, rows = (torch.cat([J, rho[:, None]], 1) for J, rho in ((sketch.J, sketch.rho), (at.J, at.rho)))
    S = (nn.functional.normalize(found) @ nn.functional.normalize(rows).T).argmax(1)
    assert len(set(S.tolist())) == len(S)
    pi = chances((at.root * at.rho).square(), len(S))
    torch.testing.assert_close(found, pi[S].rsqrt()[:, None] * rows[S], rtol=CLOSE, atol=CLOSE * float(found.norm()))
    return Rows(S, 1 / pi[S])


class Side:
    """The optimizer and the reference side by side, each with a copy of a problem.

    Attributes:
        path: θ after each step of the optimizer.
        damping, length: λ and η after each.
    """

    def __init__(self, problem: Problem, rows: int, momentum: float, decay: Sequence[float] = ()) -> None:
        self.model, self.closure = problem()
        copy, closure = problem()
        params = list(self.model.parameters())
        c = decay or [0.0] * len(params)
        groups = [{"params": [p], "weight_decay": x} for p, x in zip(params, c, strict=True)]
        self.optimizer = GaussNewtonFlow(groups, rows=rows, momentum=momentum)
        self.reference = DenseFlow(list(copy.parameters()), closure, rows, momentum, c)
        self.path: list[Tensor] = []
        self.damping: list[float] = []
        self.length: list[float] = []

    def follow(self, steps: int, sketches: list[Sketch]) -> Side:
        """So many steps of both, which agree after each."""
        params, reference = list(self.model.parameters()), self.reference
        state = self.optimizer.state
        for k in range(steps):
            wanted = reference.rows_wanted()
            report = self.optimizer.step(self.closure)
            sketch = sketches[-1]
            reference.step(None if sketch.whole else partial(observed, sketch))
            assert sketch.whole or len(sketch.J) == wanted
            theta, numbers = flat(params), state[params[0]]["numbers"]
            assert apart(theta, reference.theta) < CLOSE, k
            assert reference.carried is not None
            for name, x in vars(reference.carried).items():
                assert numbers[f"adaptation.{name}"] == pytest.approx(x, rel=CLOSE, abs=0), (k, name)
            assert reference.last is not None
            assert apart(flat([state[p]["last_step"] for p in params]), reference.last) < CLOSE, k
            assert (report.details["fraction"] == 0) == (reference.kinds[-1] == "damped")
            self.path.append(theta)
            self.damping.append(numbers["adaptation.flow_damping"])
            self.length.append(numbers["adaptation.step_fraction"])
        return self


@pytest.fixture
def sketches(monkeypatch: pytest.MonkeyPatch) -> list[Sketch]:
    """All that are drawn."""
    found: list[Sketch] = []
    draw = Sketcher.draw

    def watched(self: Sketcher, *given: Any) -> Sketch:
        found.append(draw(self, *given))
        return found[-1]

    monkeypatch.setattr(Sketcher, "draw", watched)
    return found


@pytest.mark.parametrize("problem", [few_points, pinn], ids=["fit", "pinn"])
def test_steps_with_all_rows(problem: Problem, sketches: list[Sketch]) -> None:
    """Without momentum the path is another one, from the second step on."""
    sides = [Side(problem, 400, momentum).follow(10, sketches) for momentum in (0.9, 0.0)]
    assert all(sketch.whole for sketch in sketches)
    torch.testing.assert_close(sides[0].path[0], sides[1].path[0])
    assert apart(sides[0].path[1], sides[1].path[1]) > 1e-3
    for side in sides:
        assert len(set(side.length)) > 2
        assert len(set(side.damping)) > 2
        assert len(set(side.reference.settled)) > 2
        assert None in side.reference.settled
        assert set(side.reference.kinds) == {"flow"}


@pytest.mark.parametrize(("problem", "rows"), [(spiked, 15), (smooth, 12)], ids=["spiked", "smooth"])
def test_steps_with_rows_that_were_drawn(problem: Problem, rows: int, sketches: list[Sketch]) -> None:
    sides = [Side(problem, rows, momentum).follow(10, sketches) for momentum in (0.9, 0.0)]
    assert not any(sketch.whole for sketch in sketches)
    assert apart(sides[0].path[-1], sides[1].path[-1]) > 1e-3
    if problem is smooth:
        assert max(sides[0].length) == 0.5
    else:
        assert any(b > 3 * a for a, b in itertools.pairwise(sides[0].damping))  # where φ is far longer than θ


def test_corrections_matter(sketches: list[Sketch]) -> None:
    side = Side(few_points, 400, 0.9).follow(8, sketches)
    model, closure = few_points()
    plain = DenseFlow(list(model.parameters()), closure, corrected=0)
    for _ in range(8):
        plain.step()
    assert apart(side.path[-1], plain.theta) > 1e-3


@pytest.mark.parametrize("decay", [(1e-3,) * 4, (1e-3, 0.0, 1e-2, 0.0)], ids=["even", "groups"])
@pytest.mark.parametrize("rows", [400, 8], ids=["all", "some"])
def test_steps_with_weight_decay(decay: Sequence[float], rows: int, sketches: list[Sketch]) -> None:
    side = Side(few_points, rows, 0.9, decay).follow(8, sketches)
    assert apart(side.path[-1], Side(few_points, rows, 0.9).follow(8, sketches).path[-1]) > 1e-3


def test_damped_steps(sketches: list[Sketch]) -> None:
    """They come where no step along the direction of a few rows lowers the loss; then sketches grow."""
    side = Side(noise, 2, 0.9).follow(22, sketches)
    kinds, path = side.reference.kinds, side.path
    assert set(kinds) == {"flow", "damped"}
    assert all(
        apart(b, a) > 1e-6 for kind, (a, b) in zip(kinds[1:], itertools.pairwise(path), strict=True) if kind == "damped"
    )
    assert "flow" in kinds[kinds.index("damped") :]
    assert {2, 3, 4} <= {len(sketch.J) for sketch in sketches}


@pytest.mark.parametrize(("problem", "rows"), [(curve(12, 1.0), 12), (smooth, 5)], ids=["all", "some"])
@pytest.mark.parametrize(
    "numbers",
    [
        {"flow_damping": 1e9, "lm_damping": 1e9},
        {"flow_damping": 1e-30, "lm_damping": 1e-30},
        {"step_fraction": 8.0},
    ],
    ids=["most", "least", "longest"],
)
def test_what_is_carried_is_bounded(
    problem: Problem, rows: int, numbers: dict[str, float], sketches: list[Sketch]
) -> None:
    side = Side(problem, rows, 0.9).follow(1, sketches)
    reference = side.reference
    assert reference.carried is not None
    saved = side.optimizer.state[next(side.model.parameters())]["numbers"]
    saved.update({f"adaptation.{name}": x for name, x in numbers.items()})
    reference.carried = replace(reference.carried, **numbers)
    side.follow(2, sketches)
