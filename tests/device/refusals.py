"""Devices that do not fit are refused before anything changes, and the device's random state is kept."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, GaussNewtonFlow, Subsets, check
from tests.device.training import data, digest, moved, on_all, on_batches, perceptron

MIXED = r"on the same device.*(mock:0.*cpu|cpu.*mock:0)"
METHODS = pytest.mark.parametrize("method", [KSD, GaussNewtonFlow])


@METHODS
def test_samples_on_the_cpu(device: torch.device, method: type[KSD] | type[GaussNewtonFlow]) -> None:
    model = perceptron(device)
    before = digest(model)
    optimizer = method(model.parameters())
    with pytest.raises(RuntimeError, match=MIXED):
        optimizer.step(on_all(model, data(20)))
    with pytest.raises(RuntimeError, match=MIXED):
        optimizer.step(on_batches(model), Subsets(data(200), batch_size=50, seed=0))
    assert digest(model) == before
    sets = Subsets(data(200), batch_size=50, seed=0, device=device)  # the remedy
    for _ in optimizer.run(on_batches(model), sets, max_steps=5):
        pass
    assert digest(model) != before


@METHODS
def test_parameters_on_two_devices(device: torch.device, method: type[KSD] | type[GaussNewtonFlow]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).to(device))
    with pytest.raises(ValueError, match="mock:0"):
        method(model.parameters())


def test_outputs_on_the_cpu(device: torch.device) -> None:
    """A closure may compute the loss elsewhere, as long as autograd leads back; not for the flow."""
    model = perceptron(device)
    x, y = data(20)

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x.to(device)).cpu() - y
        return r.square().mean(), r

    optimizer = KSD(model.parameters())
    losses = [optimizer.step(closure).loss for _ in range(3)]
    assert losses[2] < losses[0]
    before = digest(model)
    with pytest.raises(ValueError, match=r"residuals on the device of the parameters, mock:0; output 0 .* on cpu"):
        GaussNewtonFlow(model.parameters()).step(closure)
    assert digest(model) == before


def test_check_names_the_devices(device: torch.device) -> None:
    model = perceptron(device)
    report = check(on_all(model, data(20)), model)
    assert not report.ok
    found = next(finding for finding in report.findings if finding.status == "fail")
    assert "mock:0" in found.detail
    assert "cpu" in found.detail


def test_a_random_closure_is_refused_and_the_generator_restored(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 2)).double().to(device)
    closure = on_all(model, moved(data(20), device))
    state = torch.get_device_module(device).get_rng_state()
    with pytest.raises(ValueError, match="random"):
        KSD(model.parameters()).step(closure)
    assert torch.equal(torch.get_device_module(device).get_rng_state(), state)
    assert not check(closure, model).ok
    assert torch.equal(torch.get_device_module(device).get_rng_state(), state)


@METHODS
def test_a_failed_step_is_undone(device: torch.device, method: type[KSD] | type[GaussNewtonFlow]) -> None:
    model = perceptron(device)
    optimizer = method(model.parameters())
    working = on_all(model, moved(data(60), device))
    calls, last = 0, math.inf

    def closure() -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        if calls > last:
            raise OSError("the disk is gone")
        torch.rand(3, device=device)
        return working()

    optimizer.step(closure)
    before, state = digest(model), torch.get_device_module(device).get_rng_state()
    calls, last = 0, 2
    with pytest.raises(OSError, match="the disk is gone"):
        optimizer.step(closure)
    assert digest(model) == before
    assert torch.equal(torch.get_device_module(device).get_rng_state(), state)
    last = 10**9
    assert optimizer.step(closure).search_loss_after < math.inf
