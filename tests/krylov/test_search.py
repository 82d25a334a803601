"""Algorithm 3, lines 7-12, and the seams that subspaces, searches and preconditioners from outside use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Search, StopReason, Subsets
from krylov_descent.distributed import SingleProcess
from krylov_descent.krylov.orthonormal_basis import Subspace
from krylov_descent.krylov.search import LossOnLines, SearchStart, SubspaceSearch, whiten
from krylov_descent.krylov.subspace import SubspaceBuilder
from krylov_descent.objective.closure import Evaluation
from krylov_descent.objective.objective import Objective, Statistics
from krylov_descent.preconditioners.interface import Preconditioner, Solve, Solved
from krylov_descent.samples.interface import StepKey
from krylov_descent.stepping.gradient_pass import GradientPass
from krylov_descent.stepping.search_result import SearchResult
from krylov_descent.vectors.storage import BasisStorage

F64 = torch.float64


def quadratic_at(minimum: Tensor, bad: Callable[[Tensor], bool]) -> Callable[[Tensor], tuple[float, Tensor]]:
    def evaluate(d: Tensor) -> tuple[float, Tensor]:
        if bad(d):
            return float("nan"), torch.full_like(d, torch.nan)
        return float((d - minimum).square().sum()), 2 * (d - minimum)

    return evaluate


class PlainLines:
    """Lines of a function of d, evaluated anew at every point."""

    def __init__(self, evaluate: Callable[[Tensor], tuple[float, Tensor]], n: int) -> None:
        self.evaluate, self.origin, self.alpha, self.p = evaluate, torch.zeros(n, dtype=F64), 0.0, torch.zeros(n)

    def at_origin(self) -> tuple[float, Tensor]:
        return self.evaluate(self.origin)

    def value(self, p: Tensor | None = None) -> float:
        return self.evaluate(self.origin if p is None else self.origin + p)[0]

    def begin(self, p: Tensor, *, moved: bool) -> None:
        if moved:
            self.origin = self.origin + self.alpha * self.p
        self.p = p

    def at(self, alpha: float) -> tuple[float, float]:
        self.alpha = alpha
        f, self.g = self.evaluate(self.origin + alpha * self.p)
        return f, float(self.g @ self.p)

    def gradient(self) -> Tensor:
        return self.g


PLANE = Subspace(BasisStorage.of(torch.eye(2, dtype=F64)), torch.eye(2, dtype=F64), 2, 0.0)


@pytest.mark.parametrize("known", [True, False])
def test_the_minimum_is_found_round_a_region_that_is_not_finite(known: bool) -> None:
    """What is known at the start is not evaluated again."""
    minimum = torch.tensor([1.0, -1.0], dtype=F64)
    calls = []

    def evaluate(d: Tensor) -> tuple[float, Tensor]:
        calls.append(d.clone())
        return quadratic_at(minimum, lambda d: float(d[0]) > 1.2)(d)

    at_zero = (2.0, -2 * minimum) if known else None
    options = Search()
    found = options.minimise(PlainLines(evaluate, 2), PLANE, SearchStart(1e-15, SingleProcess(), at_zero), None)
    assert found.before == 2.0
    assert found.after < 1e-12
    assert found.d is not None
    torch.testing.assert_close(found.d, minimum)
    torch.testing.assert_close(torch.tensor(found.coefficients, dtype=F64), minimum)
    assert found.evaluations == len(calls)
    assert bool(calls[0].any()) == known


def test_only_nan_around() -> None:
    evaluate = quadratic_at(torch.ones(2, dtype=F64), lambda d: bool(d.any()))
    found = Search().minimise(PlainLines(evaluate, 2), PLANE, SearchStart(1e-15, SingleProcess()), None)
    assert found.d is None
    assert found.after == found.before == 2.0
    assert found.stop_reason in (StopReason.NON_FINITE, StopReason.NOISE)


class Shown:
    """Statistics from outside: count the micro-batches that they are shown."""

    def __init__(self) -> None:
        self.batches = 0

    @contextmanager
    def watch(self) -> Iterator[None]:
        yield

    def wanted(self, evaluation: Evaluation) -> Sequence[Tensor]:
        return evaluation.outputs

    def collect(
        self, evaluation: Evaluation, gradient: Sequence[Tensor | None], wanted: Sequence[Tensor | None]
    ) -> float:
        assert len(wanted) == 1
        assert wanted[0] is not None
        self.batches += 1
        return 0.25


@dataclass(frozen=True)
class HalvingState:
    """How often it was asked, and a tensor that is no vector of parameters."""

    asked: int = 0
    seen: Tensor | None = None


class Halving(Preconditioner):
    """A preconditioner from outside: halves every vector, and remembers how many micro-batches it was shown."""

    name = "halving"

    def init(self) -> HalvingState:
        return HalvingState()

    def gather(self, objective: Objective, key: StepKey) -> Statistics | None:
        assert key.seed == 0
        return Shown()

    def solve(self, at: GradientPass, state: HalvingState, noise: float) -> Solved:
        assert noise == 1.0
        seen = torch.tensor([at.gathered.batches, state.asked])
        return Solved(lambda w: w / 2, HalvingState(state.asked + 1, seen), self.name, ("Halved.",))


def test_a_preconditioner_from_outside() -> None:
    w = nn.Parameter(torch.ones(4, dtype=F64))
    optimizer = KSD([w], preconditioner=Halving())
    report = optimizer.step(lambda: (w.square().mean(), w))
    assert report.preconditioner == "halving"
    assert report.notes == ("Halved.",)
    assert report.search_loss_after < 1e-20
    entry = optimizer.state[w]
    assert entry["numbers"]["preconditioner.asked"] == 1
    assert entry["tensors"]["preconditioner.seen"].tolist() == [1, 0]
    with torch.no_grad():
        w.add_(1)
    optimizer.step(lambda: (w.square().mean(), w))
    assert optimizer.state[w]["tensors"]["preconditioner.seen"].tolist() == [1, 1]


class Steepest(SubspaceBuilder):
    """A builder from outside: the gradient alone, as if the curvature along it were one."""

    krylov_dim = 1

    def build(self, at: GradientPass, solve: Solve, state: Any) -> Subspace:
        g = at.take_gradient()
        return Subspace(BasisStorage.of((g / at.grad_norm)[None]), torch.ones(1, 1, dtype=F64), 1, 0.0)


def test_a_builder_from_outside() -> None:
    w = nn.Parameter(torch.tensor([3.0, 4.0], dtype=F64))
    optimizer = KSD([w], subspace=Steepest(), preconditioner=None)
    report = optimizer.step(lambda: (w.square().mean(), w))
    assert report.search_loss_after < 1e-20
    assert report.krylov_dim == 1
    torch.testing.assert_close(optimizer.state[w]["last_step"], torch.tensor([-3.0, -4.0], dtype=F64))
    with pytest.raises(ValueError, match="There is no basis"):
        optimizer.basis()


@dataclass(frozen=True)
class Length:
    """Of the next step."""

    length: float = 1.0


class Backtracking(SubspaceSearch):
    """A search from outside: halves a step along the model's minimum until the loss falls, and begins there next."""

    needs_gradient = True

    def init(self) -> Length:
        return Length()

    def minimise(self, lines: LossOnLines, subspace: Subspace, start: SearchStart, state: Length) -> SearchResult:
        assert start.gradient is not None
        p = -subspace.V.combine(torch.linalg.solve(subspace.H, subspace.V.dots(start.gradient)))
        before, length, tried = lines.value(), state.length, 1
        while (after := lines.value(length * p)) >= before:
            length, tried = length / 2, tried + 1
        found = SearchResult(length * p, before, after, 0, tried + 1, StopReason.MODEL, exact=True)
        return replace(found, state=Length(length))


def test_a_search_from_outside() -> None:
    w = nn.Parameter(torch.full((3,), 2.0, dtype=F64))
    sets = Subsets(torch.linspace(1, 2, 40, dtype=F64)[:, None], batch_size=40, fraction=0.25, seed=0)

    def closure(batch: Tensor) -> tuple[Tensor, Tensor]:  # the first Newton step overshoots to where the loss is higher
        z = 5 * batch * w
        return torch.log(torch.cosh(z)).mean(), z

    optimizer = KSD([w], krylov_dim=2, preconditioner=None, search=Backtracking())
    report = optimizer.step(closure, sets)
    assert report.search_loss_after < report.search_loss_before
    length = optimizer.state[w]["numbers"]["search.length"]
    assert 0 < length < 1
    report = optimizer.step(closure, sets)
    assert optimizer.state[w]["numbers"]["search.length"] <= length


def test_the_floor_of_an_all_negative_matrix_is_that_of_its_largest_magnitude() -> None:
    C = whiten(torch.diag(torch.tensor([-1.0, -4.0], dtype=torch.float64)), 0.1)
    torch.testing.assert_close(C @ C.T, 0.4 * torch.eye(2, dtype=torch.float64))
