"""The device of the tests in this folder. Registering it is for good: test_on_device.py gives them a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.device import mock


@pytest.fixture(scope="session")
def device() -> torch.device:
    return mock.register()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
