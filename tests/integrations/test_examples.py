"""The examples with other frameworks run to their end on a tiny budget and draw a picture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

pytestmark = pytest.mark.nightly

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.mark.parametrize(
    "command",
    [
        ("lightning_regression.py", "--steps", "4"),
        ("trainer_text.py", "--steps", "2"),
        ("skorch_cross_validation.py", "--epochs", "1"),
        ("deepxde_poisson.py", "--seconds", "0.2", "--method", "flow"),
        ("deepxde_poisson.py", "--seconds", "0.2", "--method", "ksd"),
        ("pina_poisson.py", "--epochs", "2", "--method", "flow"),
        ("pina_poisson.py", "--epochs", "2", "--method", "ksd"),
    ],
    ids=lambda command: f"{command[0]}-{command[-1]}",
)
def test_it_runs_and_draws(command: tuple[str, ...], tmp_path: Path) -> None:
    """In a process of its own: DeepXDE chooses its backend when it is imported, and the loops set global state."""
    picture = tmp_path / "picture.png"
    line = [sys.executable, str(EXAMPLES / command[0]), *command[1:], "--out", str(picture)]
    environment = {**os.environ, "MPLBACKEND": "Agg", "DDE_BACKEND": "pytorch"}
    process = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    pixels = matplotlib.image.imread(picture)
    assert min(pixels.shape[:2]) > 200
    assert float(pixels[..., :3].std()) > 0.02  # something is drawn
