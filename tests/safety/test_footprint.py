"""What a step touches: its own closure's modules in its own thread, put back after an error, and nothing else."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, GaussNewtonFlow
from krylov_descent.safety.footprint import Footprint, same_path_as_with_gradients

METHODS: dict[str, Callable[..., Any]] = {"KSD": KSD, "flow": GaussNewtonFlow}


class Follows(nn.Module):
    """A model with a buffer that follows its parameters, and buffers that are made on the way."""

    last: Tensor
    made: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)
        self.register_buffer("last", torch.zeros((), dtype=torch.float64))
        self.register_buffer("made", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        self.last.copy_(h.detach().square().mean())
        if self.made is None:
            self.made = torch.ones(2)
        if "later" not in self._buffers:
            self.register_buffer("later", torch.ones(1))
        return h


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at_call", [1, 2, 4, 6])
def test_buffers_are_as_before_a_step_that_raised(method: str, at_call: int) -> None:
    torch.manual_seed(0)
    model, x = Follows(), torch.randn(20, 3, dtype=torch.float64)
    y = 3 * torch.randn(20, 2, dtype=torch.float64)
    calls = 0

    def closure() -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        r = model(x) - y
        if calls == at_call:
            raise ZeroDivisionError
        return r.square().mean(), r

    model.last.fill_(7.0)
    own = model.last
    with pytest.raises(ZeroDivisionError):
        METHODS[method](model.parameters()).step(closure)
    assert calls == at_call
    assert model.last is own
    assert model.last.item() == 7.0
    assert model.made is None
    assert "later" not in model._buffers


def test_buffers_are_as_before_a_settle_that_raised() -> None:
    torch.manual_seed(0)
    model, x, raises = Follows(), torch.randn(20, 3, dtype=torch.float64), False

    def closure() -> tuple[Tensor, Tensor]:
        z = model(x)
        if raises:
            raise ZeroDivisionError
        return z.square().mean(), z

    optimizer = KSD(model.parameters())
    optimizer.step(closure)
    model.last.fill_(7.0)
    raises = True
    with pytest.raises(ZeroDivisionError):
        optimizer.settle(closure)
    assert model.last.item() == 7.0


@contextmanager
def running(model: nn.Module) -> Iterator[list[int]]:
    """A thread that trains on, and the number of its calls."""
    calls, end = [0], threading.Event()

    def run() -> None:
        while not end.is_set():
            model(torch.randn(16, 4))
            calls[0] += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield calls
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("method", METHODS)
def test_a_model_of_another_thread_is_left_alone(method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    x = torch.randn(300, 4, dtype=torch.float64)
    y = x.sum(1, keepdim=True).sin()
    foreign = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer, raises = METHODS[method](model.parameters()), False

    def closure() -> tuple[Tensor, Tensor]:
        if raises:
            raise ZeroDivisionError
        r = model(x) - y
        return r.square().mean(), r

    with running(foreign) as calls:
        for step in range(8):
            raises = step % 4 == 3
            if raises:
                with pytest.raises(ZeroDivisionError):
                    optimizer.step(closure)
            else:
                optimizer.step(closure)
    norm = foreign[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == calls[0]


def test_a_sparse_buffer_is_carried_along() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model.register_buffer("neighbours", torch.eye(6).to_sparse())
    x = torch.randn(6, 3)
    optimizer = KSD(model.parameters(), memory_budget=1_000_000)

    def closure() -> tuple[Tensor, Tensor]:
        z = torch.sparse.mm(model.neighbours, model(x))
        return z.square().mean(), z

    before = optimizer.step(closure).loss
    assert optimizer.step(closure).loss < before


def test_the_context_ends_its_notes() -> None:
    layer = nn.Linear(2, 2)
    with Footprint() as seen:
        layer(torch.ones(1, 2))
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2))
    assert list(seen.modules.values()) == [layer]


def test_the_fast_path_returns_when_the_last_thread_has_left() -> None:
    """Whatever the order in which threads leave, the switch ends as it began."""
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with same_path_as_with_gradients():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with same_path_as_with_gradients():
        thread.start()
        entered.wait()
    assert not torch.backends.mha.get_fastpath_enabled()  # the other thread still compares losses
    leave.set()
    thread.join()
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_scripted_model_trains_and_is_as_before_an_error() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).eval())
    x, raises = torch.randn(8, 3), False

    def closure() -> tuple[Tensor, Tensor]:
        z = model(x)
        if raises:
            raise KeyboardInterrupt
        return z.square().mean(), z

    optimizer = KSD(model.parameters())
    before = optimizer.step(closure).loss
    assert optimizer.step(closure).loss < before
    raises = True
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)


def test_mode_and_size_of_buffers_are_as_before_an_error() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_buffer("cache", torch.arange(4.0))
    x = torch.randn(5, 3)

    def closure() -> tuple[Tensor, Tensor]:
        model(x)
        model.eval()
        model.get_buffer("cache").resize_(9)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        KSD(model.parameters()).step(closure)
    assert model.training
    assert model[0].training
    assert torch.equal(model.get_buffer("cache"), torch.arange(4.0))
