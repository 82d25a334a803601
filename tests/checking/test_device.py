"""``krylov-descent doctor``: its report, its exit status, and the checks themselves on the CPU."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import Tensor

from krylov_descent.checking import device as module
from krylov_descent.checking.device import Check, Device, Outcome, SkippedError, diagnosed
from krylov_descent.cli import doctor as command
from krylov_descent.cli import main

CPU = torch.device("cpu")


@pytest.mark.nightly
def test_the_cpu_agrees_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("krylov-descent ")
    assert len(re.findall(r"^ok .* 0e\+00 +0e\+00 ", shown, re.MULTILINE)) == len(module.CHECKS) - 1
    assert "\n20 passed, 1 skipped, 0 failed on cpu in " in shown


def test_a_difference_an_error_and_a_warning_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter((1.0, 1.6, 2.0, 2.0))  # by turns of the device and of the CPU

    def off(device: Device) -> Outcome:
        return Outcome(curvature=2.0, loss=next(losses), operators=1234, reads=5)

    def warns(device: Device) -> Outcome:
        warnings.warn("slow here\nand there", stacklevel=1)
        return off(device)

    def broken(device: Device) -> Outcome:
        raise RuntimeError("out of order\nand more")

    def unable(device: Device) -> Outcome:
        raise SkippedError("no such thing")

    checks = {"off": Check(off, loss=0.1), "warns": Check(warns), "broken": Check(broken), "unable": Check(unable)}
    for place in (module, command):
        monkeypatch.setattr(place, "CHECKS", checks)
    assert main(["doctor", "--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    at = {line[8:24].strip(): i for i, line in enumerate(lines) if line[:8].strip()}
    assert re.fullmatch(r"FAILED  off +0e\+00 +4e-01 +0\.00 +0\.00 +1,234 +5", lines[at["off"]])
    assert "loss 1.0, the CPU's 1.6, allowed 1e-01" in shown
    assert lines[at["warns"]].startswith("ok ")
    assert lines[at["warns"] + 1].strip() == "UserWarning: slow here"
    assert lines[at["broken"]] == "FAILED  broken          RuntimeError: out of order"
    assert lines[at["unable"]] == "skipped unable          no such thing"
    assert "\n1 passed, 1 skipped, 2 failed on cpu in " in shown
    assert lines[-1] == "FAILED: off, broken. Please paste all of this into an issue."


def test_not_a_number_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter((Outcome(float("nan"), 1.0, 0, 0), Outcome(1.0, 1.0, 0, 0)))
    monkeypatch.setattr(module, "CHECKS", {"nan": Check(lambda device: next(outcomes))})
    assert [row.status for row in diagnosed(CPU)] == ["FAILED"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "nonsense"), "torch cannot use the device 'nonsense'"),
        (("--device", "cpu", "--skip", "paper", "sleep"), "There is no check 'sleep'.\n→ The checks are full-batch, "),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_training_that_gains_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(device: Device) -> Outcome:
        model = torch.nn.Linear(2, 1)
        x = torch.randn(5, 2)

        def closure() -> tuple[Tensor, Tensor]:
            r = 0 * model(x) + 1
            return r.square().mean(), r

        return module._trained(model, closure)

    monkeypatch.setattr(module, "CHECKS", {"stuck": Check(stuck)})
    (row,) = diagnosed(CPU)
    assert row.status == "FAILED"
    assert "the loss went from 1 to 1 in 3 steps" in row.notes[0]
