"""What the recorder sees of layers, and what it leaves alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from krylov_descent.layers.calls import LayerCall, Recorder

LAYER, X = nn.Linear(2, 3), torch.ones(4, 2)


def calls_in(work: Callable[[], Any], *params: Tensor) -> list[LayerCall]:
    recorder = Recorder(params or list(LAYER.parameters()))
    with recorder:
        work()
    return recorder.calls


def elsewhere() -> None:
    thread = threading.Thread(target=lambda: LAYER(X))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    "work",
    [
        lambda: LAYER(X),
        lambda: F.linear(X, bias=LAYER.bias, weight=LAYER.weight),
        lambda: torch.func.functional_call(LAYER, dict(LAYER.named_parameters()), (X,)),
        lambda: F.relu_(LAYER(X)),
    ],
)
def test_calls_of_modules_and_functions_are_seen_alike(work: Callable[[], Any]) -> None:
    (call,) = calls_in(work)
    assert (call.weight, call.bias) == (0, 1)
    assert torch.equal(call.a, X)
    assert call.dense


@pytest.mark.parametrize(
    "work",
    [
        elsewhere,
        lambda: torch.func.vmap(LAYER)(X),
        lambda: torch.compile(LAYER, backend="aot_eager")(X),
        lambda: nn.Linear(2, 3)(X),
        lambda: LAYER.requires_grad_(False)(X),
    ],
)
def test_other_threads_and_transformed_code_are_left_alone(work: Callable[[], Any]) -> None:
    assert not calls_in(work)
    LAYER.requires_grad_(True)


def test_parameters_may_be_weight_bias_or_both() -> None:
    (call,) = calls_in(lambda: LAYER(X), LAYER.bias)
    assert (call.weight, call.bias) == (None, 0)
    table = torch.ones(5, 2, requires_grad=True)
    (call,) = calls_in(lambda: F.embedding(torch.tensor([1, 4]), table, padding_idx=-1), table)
    assert call.table
    assert call.positions(torch.ones(2, 2)) == 1  # the last row is padding
    assert not calls_in(lambda: F.embedding(torch.tensor([1]), table, sparse=True), table)


def test_a_closure_that_is_called_again_is_recorded_anew() -> None:
    recorder = Recorder(list(LAYER.parameters()))
    for _ in range(2):
        with recorder:
            LAYER(X)
    assert len(recorder.calls) == 1


def test_delta_is_that_of_the_layer_whatever_overwrites_its_output() -> None:
    recorder = Recorder(list(LAYER.parameters()))
    with recorder:
        y = torch.sigmoid_(LAYER(X))
    seen: list[Tensor] = []
    handle = recorder.calls[0].on_backward(seen.append)
    inputs: list[Any] = [recorder.calls[0].edge, *LAYER.parameters()]
    asked, *_ = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    handle.remove()
    torch.autograd.grad(y.sum(), inputs)
    torch.testing.assert_close(asked, (y * (1 - y)).detach())
    assert len(seen) == 1
    assert torch.equal(seen[0], asked)
