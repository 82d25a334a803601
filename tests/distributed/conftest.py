"""The processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    processes = Pool()
    yield processes
    processes.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run these tests in one process of pytest-xdist: ranks of two tests at a time would wait for each other."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("ranks"))
