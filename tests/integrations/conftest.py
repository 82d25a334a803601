"""One short test for each framework is of the first tier; the others are nightly."""

from __future__ import annotations

from pathlib import Path

import pytest

SHORT = {
    "test_the_steps_are_those_of_a_plain_loop",  # Lightning, transformers
    "test_regression_and_one_logit",  # skorch
    "test_steps_are_those_of_a_closure_written_by_hand",  # DeepXDE
    "test_another_solver_of_pina",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.name.partition("[")[0] not in SHORT:
            item.add_marker(pytest.mark.nightly)
