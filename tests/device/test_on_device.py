"""Runs the tests of the device "mock", each file in a process of its own: a device cannot be unregistered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = ("device_itself.py", "steps.py", "refusals.py", "runs.py", "integrations.py", "diagnosis.py")


@pytest.mark.nightly
@pytest.mark.parametrize("file", FILES)
def test_on_device(file: str) -> None:
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / file)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=FOLDER.parent.parent)
    if done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        pytest.skip(done.stdout.splitlines()[-2])
    assert done.returncode == 0, done.stdout + done.stderr
