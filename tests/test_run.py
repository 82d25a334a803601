"""A run: why it ends, its best point, and what is told while a step goes on."""

from __future__ import annotations

import copy
import io
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext, redirect_stderr

import pytest
import torch
from experiments.baselines import HessianFree
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from krylov_descent import KSD, EndReason, Progress, Settlement, Subsets
from krylov_descent.progress import step_bar

Closure = Callable[[], tuple[Tensor, Tensor]]


def regression(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Closure]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)
    x = torch.linspace(-1, 1, 40, dtype=dtype)[:, None]

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - torch.sin(3 * x)
        return r.square().mean(), r

    return model, closure


def classification() -> tuple[nn.Module, Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]], Subsets]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(400, 4)
    sets = Subsets((x, (x[:, 0] * x[:, 1] > 0).long()), batch_size=128, fraction=0.2, seed=0)

    def closure(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]), logits

    return model, closure, sets


def test_a_run_is_its_steps() -> None:
    model, closure = regression()
    twin = copy.deepcopy(model)
    run = KSD(model.parameters()).run(closure, max_steps=5)
    losses = [report.loss for report in run]
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]

    def of_twin() -> tuple[Tensor, Tensor]:
        r = twin(x) - torch.sin(3 * x)
        return r.square().mean(), r

    optimizer = KSD(twin.parameters())
    assert losses == [optimizer.step(of_twin).loss for _ in range(5)]
    assert run.reason is EndReason.MAX_STEPS
    assert run.steps == 5
    assert run.loss == pytest.approx(closure()[0].item(), rel=1e-12)
    assert run.best is not None
    assert (run.best.steps, run.best.value) == (5, run.loss)


def test_the_gradient_ends_it() -> None:
    model, closure = regression()
    run = KSD(model.parameters()).run(closure, gtol=1e-3)
    norms = [report.grad_norm for report in run]
    assert run.reason is EndReason.GRADIENT
    assert norms[-1] <= 1e-3 < min(norms[:-1])


def test_time_ends_it() -> None:
    model, closure = regression()
    run = KSD(model.parameters()).run(closure, seconds=0.3, patience=None)
    seconds = [sum(report.seconds.values()) for report in run]
    assert run.reason is EndReason.SECONDS
    assert sum(seconds[:-1]) < 0.3


def test_rounding_ends_it() -> None:
    """In float32, full batch, no patience: a run stops by itself where nothing is found any more."""
    w = nn.Parameter(torch.tensor([3.0, -2.0]))
    target = torch.tensor([1.0, 0.3])
    run = KSD([w]).run(lambda: ((w - target).square().mean() + 1, w), patience=None)
    assert len(list(itertools.islice(run, 50))) < 50
    assert run.reason in (EndReason.STUCK, EndReason.GRADIENT)
    assert torch.allclose(w, target, atol=1e-3)


def test_patience_ends_it_with_sets() -> None:
    sets = classification()[2]
    model = nn.Linear(4, 2)

    def closure_of_linear(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]), logits

    run = KSD(model.parameters(), krylov_dim=5).run(closure_of_linear, sets, patience=3, max_steps=200)
    losses = [report.loss for report in run]
    assert run.reason is EndReason.PATIENCE
    assert len(losses) < 200
    assert run.best is not None
    assert run.best.value <= min(losses)


def test_sets_are_settled_and_the_loss_is_that_of_the_end() -> None:
    model, closure, sets = classification()
    optimizer = KSD(model.parameters(), krylov_dim=5)
    run = optimizer.run(closure, sets, max_steps=6)
    list(run)
    draw = sets.draw(6, krylov_dim=5)
    with torch.no_grad():
        losses = [(closure(batch.data)[0].item(), batch.samples or 0) for batch in draw.a]
    assert run.loss == pytest.approx(sum(f * n for f, n in losses) / 400, rel=1e-6)


def test_a_monitor_decides_what_is_best_and_it_can_be_put_back() -> None:
    model, closure = regression()
    values = iter([5.0, 3.0, 4.0, 4.0, 4.0, 1.0])
    points = []

    def monitor() -> float:
        points.append([p.detach().clone() for p in model.parameters()])
        return next(values)

    run = KSD(model.parameters()).run(closure, patience=3, monitor=monitor)
    list(run)
    assert run.reason is EndReason.PATIENCE
    assert run.steps == 5
    best = run.restore_best()
    assert (best.value, best.steps) == (3.0, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), points[1], strict=True))


def test_without_rollback_the_best_is_kept_though_the_run_went_on() -> None:
    model, closure, _ = classification()
    optimizer = KSD(model.parameters(), krylov_dim=5, rollback=False)
    data = torch.randn(60, 4), torch.randint(0, 2, (60,))
    small = Subsets(data, batch_size=60, fraction=0.1, seed=0)
    run = optimizer.run(closure, small, max_steps=12)
    losses = [report.loss for report in run]
    assert min(losses) < losses[-1]  # C of six samples: steps do raise the loss on A
    best = run.restore_best()
    assert best.value == min(*losses, run.loss)
    assert closure(data)[0].item() == pytest.approx(best.value, rel=1e-6)


def test_a_broken_off_run_goes_on_in_another() -> None:
    model, closure = regression()
    optimizer = KSD(model.parameters())
    for report in optimizer.run(closure):
        if report.iteration == 2:
            break
    rest = [report.iteration for report in optimizer.run(closure, max_steps=2)]
    assert rest == [3, 4]


def risky() -> tuple[nn.Module, Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]], Subsets]:
    """Six samples in C: steps do raise the loss on A."""
    model, closure, _ = classification()
    g = torch.Generator().manual_seed(1)
    data = torch.randn(60, 4, generator=g), torch.randint(0, 2, (60,), generator=g)
    return model, closure, Subsets(data, batch_size=60, fraction=0.1, seed=0)


def stepped(steps: int) -> tuple[nn.Module, Settlement]:
    """So many steps by hand, and what settles them."""
    model, closure, sets = risky()
    optimizer = KSD(model.parameters(), krylov_dim=5)
    for _ in range(steps):
        optimizer.step(closure, sets)
    return model, optimizer.settle(closure, sets)


@pytest.fixture(scope="module")
def bad() -> int:
    """The number of the first step that the next one undoes."""
    model, closure, sets = risky()
    reports = KSD(model.parameters(), krylov_dim=5).run(closure, sets, max_steps=30)
    return next(report.iteration for report in reports if not report.accepted) - 1


@pytest.mark.parametrize("left_by", ["break", "error", "close"])
def test_a_loop_that_is_left_judges_the_last_step(bad: int, left_by: str) -> None:
    twin, settlement = stepped(bad + 1)
    assert not settlement.accepted
    model, closure, sets = risky()
    run = KSD(model.parameters(), krylov_dim=5).run(closure, sets)
    if left_by == "close":
        reports = iter(run)
        for iteration in range(bad + 1):
            assert next(reports).iteration == iteration
        assert isinstance(reports, Generator)
        reports.close()
    else:
        with pytest.raises(KeyError) if left_by == "error" else nullcontext():
            for report in run:
                if report.iteration == bad:
                    if left_by == "break":
                        break
                    raise KeyError
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert (run.reason, run.steps, run.loss) == (None, bad + 1, settlement.loss)
    assert run.best is not None
    assert run.best.value == run.loss  # that of the point before the bad step


def test_a_second_loop_goes_on() -> None:
    """As if there had been no break: a point is not compared twice, which would use up patience."""
    (one, closure), (other, same) = regression(), regression()
    whole = KSD(one.parameters()).run(closure, max_steps=5, patience=1)
    losses = [report.loss for report in whole]
    parts, seen = KSD(other.parameters()).run(same, max_steps=5, patience=1), []
    for _ in range(5):
        for report in parts:
            seen.append(report.loss)
            break
        assert parts.reason is None
    assert list(parts) == []
    assert seen == losses
    assert str(parts) == str(whole)


def test_a_second_loop_goes_on_after_a_step_that_was_undone(bad: int) -> None:
    model, closure, sets = risky()
    run = KSD(model.parameters(), krylov_dim=5).run(closure, sets, max_steps=bad + 3)
    for report in run:
        if report.iteration == bad:
            break
    undone = run.loss
    rest = list(run)
    assert [report.iteration for report in rest] == [bad + 1, bad + 2]
    assert rest[0].accepted  # it was undone before
    assert rest[0].loss == pytest.approx(undone, rel=1e-6)
    assert run.reason is EndReason.MAX_STEPS


class Failing:
    """A closure that raises while ``fails``."""

    def __init__(self, closure: Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]) -> None:
        self.closure, self.calls, self.fails = closure, 0, False

    def __call__(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.fails:
            raise OSError("disk")
        return self.closure(batch)


def test_a_loop_that_is_collected_later_is_not_settled() -> None:
    """It may be inside of another step: a notebook keeps the frames of its last error."""
    model, closure, sets = risky()
    failing = Failing(closure)
    kept = []

    def loop() -> None:
        kept.append(iter(KSD(model.parameters(), krylov_dim=5).run(failing, sets)))
        next(kept[0])

    loop()
    calls = failing.calls
    kept.clear()
    assert failing.calls == calls


def test_a_step_that_raises_is_not_settled() -> None:
    model, closure, sets = risky()
    failing = Failing(closure)
    run = KSD(model.parameters(), krylov_dim=5).run(failing, sets)
    reports = iter(run)
    first, calls, failing.fails = next(reports), failing.calls, True
    with pytest.raises(OSError, match="disk"):
        next(reports)
    del reports
    assert failing.calls == calls + 1  # the one that raised
    assert (run.steps, run.loss) == (1, first.loss)


def test_an_error_in_settling_after_a_break_is_a_warning(bad: int) -> None:
    model, closure, sets = risky()
    optimizer, failing = KSD(model.parameters(), krylov_dim=5), Failing(closure)
    run = optimizer.run(failing, sets)

    def loop() -> None:
        for report in run:
            if report.iteration == bad:
                failing.fails = True
                break

    with pytest.warns(UserWarning, match=r"not judged, .*OSError\('disk'\).*call optimizer\.settle") as told:
        loop()
    assert told[0].filename == __file__
    assert run.steps == bad + 1
    failing.fails = False  # nothing is lost: the step is still there to be judged
    twin, settlement = stepped(bad + 1)
    assert optimizer.settle(failing, sets) == settlement
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.nightly
def test_the_end_of_the_interpreter_settles_nothing() -> None:
    """Torch cannot compute any more: it would abort the process."""
    code = """
import torch
from krylov_descent import KSD, Subsets
model = torch.nn.Linear(4, 1)
def closure(batch):
    r = model(batch[0]) - 1
    return r.square().mean(), r
reports = iter(KSD(model.parameters()).run(closure, Subsets((torch.randn(200, 4),), batch_size=50, seed=0)))
next(reports)
class Circle: pass
circle = Circle()
circle.self, circle.reports = circle, reports
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")


def test_other_methods_run_too() -> None:
    model, closure = regression()
    run = HessianFree(model.parameters()).run(closure, max_steps=8)
    losses = [report.loss for report in run]
    assert losses[-1] < 0.8 * losses[0]
    assert run.reason is EndReason.MAX_STEPS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_steps": -1}, "max_steps=-1"),
        ({"seconds": -0.5}, "seconds=-0.5"),
        ({"patience": 0}, "patience=0: must be at least 1"),
        ({"gtol": math.nan}, "gtol=nan"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, float], message: str) -> None:
    model, closure = regression()
    with pytest.raises(ValueError, match=message):
        KSD(model.parameters()).run(closure, **arguments)  # type: ignore[arg-type]


def test_no_best_before_a_step() -> None:
    model, closure = regression()
    with pytest.raises(ValueError, match="no best point"):
        KSD(model.parameters()).run(closure).restore_best()


def test_progress_counts_what_the_report_counts() -> None:
    model, closure, sets = classification()
    optimizer = KSD(model.parameters(), krylov_dim=5)
    seen: list[Progress] = []
    optimizer.step(closure, sets)
    optimizer.on_progress = seen.append
    report = optimizer.step(closure, sets)
    by_phase = {phase: [p for p in seen if p.phase == phase] for phase in ("gradient", "basis", "search")}
    assert [p.done for p in by_phase["gradient"]] == [1, 2, 3, 4]  # 400 samples by 128
    assert {p.total for p in by_phase["gradient"]} == {4}
    assert [p.done for p in by_phase["basis"]] == [1, 2, 3, 4, 5, 6]
    assert {p.total for p in by_phase["basis"]} == {6}
    assert len(by_phase["search"]) == report.inner_evaluations
    order = [p.phase for p in seen]
    assert order == sorted(order, key=["gradient", "basis", "search"].index)


def test_the_bar_tells_phase_and_loss_and_is_off_by_default() -> None:
    model, closure = regression()
    optimizer = KSD(model.parameters())
    screen = io.StringIO()
    with redirect_stderr(screen):
        list(optimizer.run(closure, max_steps=2))
    assert screen.getvalue() == ""
    with redirect_stderr(screen), step_bar(optimizer, 3, mininterval=0) as show:
        for _ in range(3):
            show(optimizer.step(closure))
    shown = screen.getvalue()
    assert "pass over A 1 of 1" in shown
    assert "basis vector 7 of 21" in shown
    assert "search evaluation 2" in shown
    assert "3/3" in shown
    assert optimizer.on_progress is None


def test_a_stream_of_samples_is_refused_with_the_remedy() -> None:
    class Endless(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            while True:
                yield torch.zeros(1)

    with pytest.raises(ValueError, match="IterableDataset"):
        Subsets(Endless(), batch_size=4, seed=0)
