"""The processes that tests of several ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    processes = Pool()
    yield processes
    processes.close()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of ranks in one process of pytest-xdist: ranks of two tests at a time would wait for each other."""
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()) or item.path.parent.name == "distributed":
            item.add_marker(pytest.mark.xdist_group("ranks"))
