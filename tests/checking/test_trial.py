"""A trial races what it may print, advises the best, leaves everything as it was, and outlives methods that fail."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import CheckReport, Growing, Subsets, check
from krylov_descent.checking.finding import TrialRow
from krylov_descent.checking.problem import Names, Problem
from krylov_descent.checking.restore import as_found
from krylov_descent.checking.trial import methods, run, winner
from krylov_descent.samples.interface import FullBatch
from tests.least_squares import F64, mlp, pinn

N = 1000
SECONDS = 0.15


def digits() -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).eval()
    x = torch.randn(N, 4)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch[0])
        return nn.functional.cross_entropy(z, batch[1]), z

    return model, closure, (x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())


def rows(report: CheckReport) -> dict[str, TrialRow]:
    return {row.name: row for row in report.trial}


def state(model: nn.Module) -> list[Any]:
    return [
        [(id(x), x.data_ptr(), x.tolist()) for x in (*model.parameters(), *model.buffers())],
        [None if p.grad is None else (id(p.grad), p.grad.tolist()) for p in model.parameters()],
        torch.get_rng_state().tolist(),
    ]


def test_least_squares() -> None:
    model, closure = pinn()
    closure()[0].backward()  # type: ignore[no-untyped-call]
    before = state(model)
    report = check(closure, model, try_seconds=SECONDS)
    assert state(model) == before
    assert report.ok
    found = rows(report)
    rivals = ["Adam, lr 0.001", "Adam, lr 0.01", "Adam, lr 0.0001", "Adam → L-BFGS"]
    assert list(found) == ["KSD", "GaussNewtonFlow", *rivals]
    start = closure()[0].item()
    for row in report.trial:
        assert row.note == ""
        assert row.loss_before == row.curve[0][1] == start
        assert row.loss_after == row.curve[-1][1] < start
        assert 0 < row.seconds == row.curve[-1][0]
        assert row.steps >= 1
    assert found["Adam, lr 0.001"].steps > found["KSD"].steps
    # The winner is marked, named and printed, and its line is what ran.
    best = winner(report.trial)
    assert best is not None
    assert report.line == best.line
    (method,) = [f.detail for f in report.findings if f.name == "method"]
    assert method.startswith(f"{best.name}: ")
    assert f"\n→ {best.name} " in str(report)
    (told,) = [f.detail for f in report.findings if f.name == "time"]
    assert told.startswith("measured, a step: KSD ")
    plain = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert [row["name"] for row in plain["trial"]] == list(found)


@pytest.mark.parametrize("of_model", [True, False])
@pytest.mark.parametrize("sets", [None, Subsets, Growing])
def test_every_line_trains(sets: Any, of_model: bool) -> None:
    model, closure, data = digits()
    given = None if sets is None else sets(data, batch_size=200, seed=3)
    whole = closure if sets else lambda: closure(data)
    report = check(whole, model if of_model else list(model.parameters()), given, try_seconds=0.02)
    assert len(report.trial) == (5 if sets else 4 + 1)  # cross-entropy has no rows for the flow
    for row in report.trial:
        scope: dict[str, Any] = {"model": model, "params": list(model.parameters()), "sets": given}
        exec(row.line, scope)
        if "krylov_descent" in row.line:
            scope["optimizer"].step(whole, scope["sets"])
        if row.name.startswith("KSD(**DEEP)"):
            assert repr(scope["sets"]).startswith("Growing(1000 samples, batch_size=200, start=500, seed=3)")
        if row.name.startswith("Adam, "):
            assert ("# mini-batches of 128 samples" in row.line) == (sets is not None)


def test_the_same_trial_twice() -> None:
    """Seeds and samples are the same for all; the steps of a fixed number of seconds are not, their losses are."""
    model, closure, data = digits()
    before = state(model)
    reports = [check(closure, model, Subsets(data, batch_size=200, seed=0), try_seconds=SECONDS) for _ in range(2)]
    assert state(model) == before
    names = ["KSD", "KSD(**DEEP), Growing", "Adam, lr 0.001", "Adam, lr 0.01", "Adam, lr 0.0001"]
    for report in reports:
        assert list(rows(report)) == names
        assert len({row.loss_before for row in report.trial}) == 1
        assert min(row.loss_after for row in report.trial) < report.trial[0].loss_before
    assert reports[0].trial[0].loss_before == reports[1].trial[0].loss_before
    assert reports[0].trial[0].loss_before == pytest.approx(closure(data)[0].item(), rel=1e-5)


def test_samples_come_through_the_loader_of_the_sets() -> None:
    model, closure, (x, y) = digits()

    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return N

        def __getitem__(self, i: int) -> Any:
            return {"x": x[i], "y": y[i]}

    sizes = set()

    def of_dicts(batch: Any) -> Any:
        sizes.add(len(batch["x"]))
        return closure((batch["x"], batch["y"]))

    report = check(of_dicts, model, Subsets(Samples(), batch_size=100, seed=0), try_seconds=0.02)
    assert all(row.loss_after == row.loss_after for row in report.trial), str(report)
    assert max(sizes) == 100  # smaller than those of Adam would be otherwise


def test_a_method_that_raises_is_a_dash() -> None:
    model, closure, data = digits()

    def picky(batch: Any) -> Any:
        if len(batch[0]) == 128:
            raise OSError("no such batch")
        return closure(batch)

    report = check(picky, model, Subsets(data, batch_size=200, fraction=0.2, seed=0), try_seconds=0.05)
    assert report.ok
    for row in report.trial:
        raised = row.name.startswith("Adam")
        assert row.note == ("OSError: no such batch" if raised else "")
        assert math.isnan(row.loss_after) == raised
    shown = [line for line in str(report).splitlines() if line.startswith("  Adam, lr 0.001")]
    assert shown[0].split()[-5:] == ["—", "OSError:", "no", "such", "batch"]
    plain = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert plain["trial"][2]["loss_after"] is None
    assert "KSD(" in report.line


def test_a_loss_that_is_not_finite_ends_its_method_alone() -> None:
    w = nn.Parameter(torch.full((3,), 0.02, dtype=F64))

    def closure() -> tuple[Tensor, Tensor]:
        return (w - 1e-9 * w.log()).mean(), w

    found = rows(check(closure, [w], try_seconds=0.05))
    assert math.isnan(found["Adam, lr 0.01"].loss_after)
    assert found["Adam, lr 0.01"].note == "ArithmeticError: the loss is nan"
    assert found["KSD"].loss_after < 0.02
    assert w.tolist() == [0.02] * 3


def test_no_trial_where_something_failed_or_samples_come_from_elsewhere() -> None:
    model, closure, data = digits()

    class Mine(FullBatch):
        pass

    report = check(lambda _: closure(data), model, Mine(), try_seconds=0.05)
    assert report.ok
    assert report.trial == ()
    assert "optimizer = KSD(" in report.line
    assert any("not run" in f.detail for f in report.findings)
    report = check(closure, model.train(), Subsets(data, batch_size=200, seed=0), try_seconds=0.05)
    assert not report.ok
    assert report.trial == ()
    for wrong in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="try_seconds"):
            check(closure, model, try_seconds=wrong)


def test_closures_of_torch() -> None:
    """The loss alone, or with backward inside: rivals take the same steps."""
    model, x = mlp(2, 4, 1), torch.rand(8, 2, dtype=F64)

    def plain() -> tuple[Tensor, Tensor]:
        r = model(x) - x[:, :1]
        return r.square().mean(), r

    def alone() -> Tensor:
        loss = plain()[0]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    names = Names(model)
    with as_found(model, names.parameters) as buffers:
        problem = Problem(plain, names, None, 20, "ggn", buffers)
        problem.load()
        problem.evaluation = problem.objective.evaluate(problem.batch)
        problem.room = 0  # none for the flow
        assert "GaussNewtonFlow" not in dict(methods(problem))
        (adam,) = [method for method in methods(problem) if method[0] == "Adam, lr 0.01"]
        ends = []
        for closure in (plain, alone, lambda: plain()[0]):
            problem.closure = closure
            row = run(problem, *adam, 0.1)
            assert row.note == ""
            ends.append(row.loss_after / row.loss_before)
    assert max(ends) < 0.7


def row_of(name: str, loss: float) -> TrialRow:
    line = f"from krylov_descent import {name}" if name.isupper() else "import torch"
    return TrialRow(name, line, 1.0, 1, 1.0, loss, ((0.0, 1.0), (1.0, loss)))


def test_the_winner() -> None:
    assert winner([row_of("KSD", 1.9), row_of("DEEP", 1.5), row_of("adam", 1.0)]) == row_of("DEEP", 1.5)
    assert winner([row_of("KSD", 2.1), row_of("a", 1.2), row_of("b", 1.0), row_of("c", math.nan)]) == row_of("b", 1.0)
    assert winner([row_of("KSD", -1.5), row_of("adam", -2.0)]) == row_of("adam", -2.0)
    assert winner([row_of("KSD", math.nan)]) is None
