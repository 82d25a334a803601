"""``krylov-descent doctor`` on the device."""

from __future__ import annotations

import re

import pytest
import torch

from krylov_descent import KSD
from krylov_descent.checking.device import Counts
from krylov_descent.cli import main
from tests.device import mock
from tests.device.training import data, moved, on_all, perceptron


def test_doctor_finds_the_device_and_passes(device: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--skip", "lstm"]) == 0, capsys.readouterr().out  # torch has no LSTM for such a device
    shown = capsys.readouterr().out
    assert "\n19 passed, 2 skipped, 0 failed on mock:0 in " in shown
    assert "skipped tf32            cuda only" in shown
    assert re.search(r"^ok +full-batch +0e\+00 +0e\+00 ", shown, re.MULTILINE), shown
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
