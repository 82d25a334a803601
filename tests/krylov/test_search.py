"""Algorithm 3, lines 7-12, and the protocols that other bases and preconditioners will use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Search, StopReason
from krylov_descent.distributed import Comm, SingleProcess
from krylov_descent.krylov.basis import Subspace, Turn
from krylov_descent.krylov.candidates import Carry, Family, Starts
from krylov_descent.krylov.memory import Memory
from krylov_descent.krylov.search import search_subspace, whiten
from krylov_descent.krylov.step import Settings, ksd_step
from krylov_descent.objective.closure import Evaluation
from krylov_descent.objective.objective import Objective
from krylov_descent.samples.subsets import FullBatch, Microbatch
from krylov_descent.vectors.parameters import ParameterVector
from krylov_descent.vectors.storage import Rows

F64 = torch.float64


def quadratic_at(minimum: Tensor, bad: Callable[[Tensor], bool]) -> Callable[[Tensor], tuple[float, Tensor]]:
    def evaluate(d: Tensor) -> tuple[float, Tensor]:
        if bad(d):
            return float("nan"), torch.full_like(d, torch.nan)
        return float((d - minimum).square().sum()), 2 * (d - minimum)

    return evaluate


class PlainWalk:
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


def starting(c: Tensor | None) -> Starts | None:
    """One start."""
    carry = Carry(1.0, 1.0, 0.0, 1.0)
    return None if c is None else Starts((Family(c[None], 0, (carry,)),), carry)


@pytest.mark.parametrize("start", [None, [0.9, -0.9], [50.0, 0.0], [-5.0, 5.0]])
def test_a_starting_point_is_used_only_if_it_is_better(start: list[float] | None) -> None:
    """[50, 0] is higher than the point of rest and [-5, 5] is not finite."""
    V, H = torch.eye(2, dtype=F64), torch.eye(2, dtype=F64)
    offered = None if start is None else torch.tensor(start, dtype=F64)
    minimum = torch.tensor([1.0, -1.0], dtype=F64)
    calls = []

    def evaluate(d: Tensor) -> tuple[float, Tensor]:
        calls.append(d.clone())
        return quadratic_at(minimum, lambda d: float(d[0]) < -2)(d)

    found = search_subspace(
        PlainWalk(evaluate, 2), Subspace(Rows.of(V), H, 2, 0.0, starting(offered)), Search(), 1e-15, SingleProcess()
    )
    assert found.before == 2.0
    assert found.d is not None
    if start == [0.9, -0.9]:  # taken as it is
        assert offered is not None
        torch.testing.assert_close(found.d, offered)
    else:
        assert found.after < 1e-12
        torch.testing.assert_close(found.d, minimum)
    assert found.evaluations == len(calls)
    assert not calls[0].any()
    if start is not None:
        torch.testing.assert_close(calls[1], offered)


def test_only_nan_around() -> None:
    subspace = Subspace(
        Rows.of(torch.eye(2, dtype=F64)),
        torch.eye(2, dtype=F64),
        2,
        0.0,
        starting(torch.tensor([2.0, 0.0], dtype=F64)),
    )
    evaluate = quadratic_at(torch.ones(2, dtype=F64), lambda d: bool(d.any()))
    found = search_subspace(PlainWalk(evaluate, 2), subspace, Search(), 1e-15, SingleProcess())
    assert found.d is None
    assert found.after == found.before == 2.0
    assert found.stop_reason in (StopReason.NON_FINITE, StopReason.NOISE)


class Halving:
    """A preconditioner from outside: counts what it is shown and halves every vector."""

    def __init__(self) -> None:
        self.batches = 0

    def start(self, objective: Objective, *key: int) -> Halving:
        assert key == (0, 0, 0)
        return self

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

    def solver(self, comm: Comm) -> Callable[[Tensor], Tensor]:
        return lambda w: w / 2


def test_a_preconditioner_from_outside() -> None:
    w = nn.Parameter(torch.ones(4, dtype=F64))
    mine = Halving()
    report = KSD([w], preconditioner=mine).step(lambda: (w.square().mean(), w))
    assert mine.batches == 1
    assert report.preconditioner == "halving"
    assert report.search_loss_after < 1e-20


def test_a_builder_from_outside() -> None:
    """The gradient alone, with a starting point: steepest descent in a subspace of one."""

    def steepest(
        objective: Objective,
        batches: Sequence[Microbatch],
        precondition: Callable[[Tensor], Tensor],
        g: Tensor,
        d_prev: Tensor | None,
        turn: Turn,
    ) -> Subspace:
        length = float(g.norm())
        return Subspace(
            Rows.of((g / length)[None]),
            torch.ones(1, 1, dtype=F64),
            1,
            0.0,
            starting(torch.tensor([-length], dtype=F64)),
        )

    w = nn.Parameter(torch.tensor([3.0, 4.0], dtype=F64))

    def closure(_: Any) -> tuple[Tensor, Tensor]:
        return w.square().mean(), w

    objective = Objective(closure, ParameterVector([{"params": [w], "weight_decay": 0.0}]), SingleProcess())
    settings = Settings(steepest, None, Search(), "step", rollback=True)
    report, memory = ksd_step(objective, lambda growth: FullBatch(), Memory(0, 0), settings)
    assert report.search_loss_after < 1e-20
    assert memory.iteration == 1
    assert memory.d_prev is not None
    torch.testing.assert_close(memory.d_prev, torch.tensor([-3.0, -4.0], dtype=F64))


def test_the_floor_of_an_all_negative_matrix_is_that_of_its_largest_magnitude() -> None:
    C = whiten(torch.diag(torch.tensor([-1.0, -4.0], dtype=torch.float64)), 0.1)
    torch.testing.assert_close(C @ C.T, 0.4 * torch.eye(2, dtype=torch.float64))
