"""Trains a problem on the CPU and on the device; every number must be the same to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

F64 = torch.float64
CPU = torch.device("cpu")


class Training(NamedTuple):
    """What a step needs."""

    model: nn.Module
    optimizer: Any
    closure: Callable[..., Any]
    sets: Any = None


Make = Callable[[torch.device], Training]


def data(n: int, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 6, generator=g, dtype=F64)
    return x.to(dtype), torch.sin(x @ torch.randn(6, 2, generator=g, dtype=F64)).to(dtype)


def perceptron(device: torch.device, dtype: torch.dtype = F64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).to(device, dtype)


def on_batches(model: nn.Module) -> Callable[..., tuple[Tensor, Tensor]]:
    """A closure of regression on batches."""

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        r = model(batch[0]) - batch[1]
        return r.square().mean(), r

    return closure


def on_all(model: nn.Module, batch: Any) -> Callable[[], tuple[Tensor, Tensor]]:
    """A closure of regression on the full batch."""
    return lambda: on_batches(model)(batch)


def moved(batch: Any, device: torch.device) -> Any:
    return tuple(x.to(device) for x in batch)


def numbers(training: Training, steps: int) -> list[dict[str, Any]]:
    """Take steps, and return each report's numbers and a digest of the weights."""
    found = []
    for _ in range(steps):
        given = () if training.sets is None else (training.sets,)
        report = training.optimizer.step(training.closure, *given).as_dict()
        del report["seconds"]  # the clock's
        found.append({"weights": digest(training.model), **report})
    return found


def agree(found: list[dict[str, Any]], expected: list[dict[str, Any]], *, exact: bool) -> bool:
    """Whether the numbers of steps are the same, or else their losses to rounding."""
    losses = ([report["loss"] for report in reports] for reports in (found, expected))
    return found == expected if exact else next(losses) == pytest.approx(next(losses), rel=1e-9)


def digest(model: nn.Module) -> str:
    """A digest of the parameters and buffers, to the bit."""
    values = [x.detach().cpu().reshape(-1).view(torch.uint8).numpy() for x in model.state_dict().values()]
    return hashlib.sha256(b"".join(x.tobytes() for x in values)).hexdigest()


def assert_same(make: Make, device: torch.device, steps: int = 3) -> None:
    """Assert that training on the device lowers the loss, with the CPU's numbers to the bit."""
    here = numbers(make(CPU), steps)
    there = on(device, make, steps)
    for i, (a, b) in enumerate(zip(here, there, strict=True)):
        assert b == a, f"step {i}: {[(k, a[k], b[k]) for k in a if a[k] != b[k]]}"


def assert_near(make: Make, device: torch.device, steps: int = 3) -> None:
    """Assert that training on the device lowers the loss, as on the CPU in the first step up to rounding."""
    (here,) = numbers(make(CPU), 1)
    there = on(device, make, steps)[0]
    for name, allowed in (("loss", 1e-12), ("grad_norm", 1e-12), ("search_loss_after", 1e-6)):
        assert there[name] == pytest.approx(here[name], rel=allowed), name
    assert there["ritz_values"][-1:] == pytest.approx(here["ritz_values"][-1:], rel=1e-9)


def on(device: torch.device, make: Make, steps: int) -> list[dict[str, Any]]:
    """The numbers of a training that stays on the device and lowers the loss."""
    training = make(device)
    found = numbers(training, steps)
    assert found[-1]["search_loss_after"] < found[0]["loss"]
    assert {p.device for p in training.model.parameters()} == {device}
    return found
