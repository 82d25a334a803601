"""``krylov-descent doctor`` on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from krylov_descent import DEEP, KSD, GaussNewtonFlow, Growing, check
from krylov_descent.checking.device import Counts
from krylov_descent.cli import main
from tests.device import mock
from tests.device.training import data, moved, on_all, perceptron


def test_doctor_finds_the_device_and_passes(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """Without float64, which steps.py has."""
    with mock.without_float64():
        status = main(["doctor", "--skip", "lstm"])  # torch has no LSTM for such a device
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert "\n18 passed, 3 skipped, 0 failed on mock:0 in " in shown
    assert "skipped float64         mock:0 has no float64" in shown
    assert "skipped tf32            cuda only" in shown
    assert "issue" in shown.splitlines()[-1]


def test_the_doctor_counts_what_the_device_counts(device: torch.device) -> None:
    model = perceptron(device)
    optimizer, closure = KSD(model.parameters()), on_all(model, moved(data(60), device))
    optimizer.step(closure)
    before = mock.counts()
    with Counts(device) as counts:
        optimizer.step(closure)
    after = mock.counts()
    assert counts.reads == after.reads - before.reads
    assert counts.operators == pytest.approx(after.launches - before.launches, rel=0.1)  # allocations are no launches


def test_check_without_float64(device: torch.device) -> None:
    model = perceptron(device, torch.float32)
    closure = on_all(model, moved(data(60, torch.float32), device))
    with mock.without_float64():
        report = check(closure, model)
        for method in (KSD, GaussNewtonFlow):  # with weight decay, and BFGS in the span of several vectors
            steps = list(method(model.parameters(), weight_decay=1e-4).run(closure, max_steps=4))
            assert steps[-1].loss < steps[0].loss
    assert report.ok, str(report)


@pytest.mark.parametrize("width", [300, 1000])  # inverses in float64 once sets hold all samples, or at once
def test_wide_layers_train_without_float64(device: torch.device, width: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 2)).to(device)
    x = torch.randn(200, 8)
    optimizer, sets = KSD(model.parameters(), **DEEP), Growing((x, torch.sin(x[:, :2])), seed=0, device=device)

    def closure(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        r = model(batch[0]) - batch[1]
        return r.square().mean(), r

    with mock.without_float64():
        first, second = (optimizer.step(closure, sets).loss for _ in range(2))
    assert second < first
