"""The device is as strict as a GPU, and counts what it does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.device import mock

Refused = Callable[[Tensor], object]


def test_results_are_the_cpus(device: torch.device) -> None:
    x = torch.randn(5, 4, dtype=torch.float64)
    y = torch.linalg.inv(x.to(device).T @ x.to(device)).softmax(0)
    assert y.device == device
    assert torch.equal(y.cpu(), torch.linalg.inv(x.T @ x).softmax(0))


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(3) + x.sum(),  # a number of the device and a vector of the host
        lambda x: torch.ones(()).add_(x.sum()),
        lambda x: x.add_(torch.ones(3)),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: torch._foreach_add([x], [torch.ones(3)]),
        lambda x: x @ torch.ones(3),
        lambda x: x.index_select(0, torch.arange(2)),
        lambda x: torch.ones(3)[x.long()],
        lambda x: torch.mv(x[None], x, out=torch.ones(1)),
    ],
)
def test_mixed_devices_are_refused(device: torch.device, mixed: Refused) -> None:
    with pytest.raises(RuntimeError, match=r"on the same device|be on the same device as|either on cpu or on the same"):
        mixed(torch.ones(3, device=device))


def test_numbers_and_indices_of_the_host_are_allowed(device: torch.device) -> None:
    x = torch.arange(3.0, device=device)
    assert (x * torch.tensor(2.0)).tolist() == [0.0, 2.0, 4.0]
    assert x[torch.tensor([2, 0])].tolist() == [2.0, 0.0]


def test_the_host_cannot_look_inside(device: torch.device) -> None:
    with pytest.raises(TypeError, match=r"Tensor.cpu\(\)"):
        torch.ones(3, device=device).numpy()


def test_random_numbers_are_its_own(device: torch.device) -> None:
    before = torch.get_rng_state()
    x, y = torch.randn(4, device=device), torch.randn(4, device=device)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x.cpu(), torch.randn(4))  # both have the seed of the fixture
    assert torch.equal(y.cpu(), torch.randn(4))
    with pytest.raises(RuntimeError, match="for generator but found 'cpu'"):
        torch.randn(3, device=device, generator=torch.Generator())


def test_pinned_memory(device: torch.device) -> None:
    x = torch.ones(3)
    assert not x.is_pinned()
    assert x.pin_memory().is_pinned()
    assert x.pin_memory().to(device, non_blocking=True).tolist() == [1.0, 1.0, 1.0]


def test_counts(device: torch.device) -> None:
    x, begin = torch.ones(7, device=device), mock.counts()
    y = x.exp() + x
    middle = mock.counts()
    assert (middle.launches - begin.launches, middle.reads - begin.reads) == (2, 0)
    y.cpu()
    float(y.sum())
    end = mock.counts()
    assert (end.launches - middle.launches, end.reads - middle.reads, end.values - middle.values) == (1, 2, 8)
