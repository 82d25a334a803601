"""The example, run as a user runs it: by torchrun and in one process, with the same losses."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "distributed_mnist.py"
VARIABLE = "KRYLOV_DESCENT_DATA"
STEPS, SAMPLES = 6, 2000  # losses are those before a step: the last one is that after five

_LINE = re.compile(r"  *(\d+)  loss (\S+)")
_END = re.compile(r"end  loss (\S+)  held-out error (\S+)%")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of MNIST, if there is one; otherwise one of a file like it.

    Each digit has four patterns, seen through noise and half a pattern of any digit. As with MNIST, and unlike what is
    simpler, rounding hardly grows from step to step.
    """
    given = os.environ.get(VARIABLE)
    if given and (Path(given) / "mnist.npz").is_file():
        return Path(given)
    directory = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    patterns = np.kron(random.random((10, 4, 7, 7)) < 0.3, np.ones((4, 4)))
    arrays = {}
    for part, n in (("train", SAMPLES), ("test", 200)):
        digits = random.integers(0, 10, n)
        images = patterns[digits, random.integers(0, 4, n)]
        others = patterns[random.integers(0, 10, n), random.integers(0, 4, n)]
        seen = 127 * (images + 0.8 * others) * random.random((n, 28, 28))
        arrays[f"x_{part}"], arrays[f"y_{part}"] = seen.astype(np.uint8), digits.astype(np.uint8)
    np.savez_compressed(directory / "mnist.npz", **arrays)  # type: ignore[arg-type]
    return directory


def launch(ranks: int, options: list[str]) -> str:
    """What the example prints; no ranks is without torchrun."""
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else ["-W", "error"]
    done = subprocess.run(
        [sys.executable, *start, str(EXAMPLE), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def here(options: list[str]) -> str:
    """What the example prints, run in this process: spares the import of torch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    printed = io.StringIO()
    try:
        with mock.patch.object(sys, "argv", ["example", *options]), contextlib.redirect_stdout(printed):
            runpy.run_path(str(EXAMPLE), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    return printed.getvalue()


def losses(ranks: int | None, data: Path, *options: str, steps: int = STEPS) -> tuple[dict[int, float], float]:
    """The losses that are printed, with that of the end under the number of steps; and the held-out error."""
    given = ["--data", str(data), "--samples", str(SAMPLES), "--steps", str(steps), *options]
    printed = here(given) if ranks is None else launch(ranks, given)
    *lines, end = printed.splitlines()
    matches = [_LINE.fullmatch(line) for line in lines]
    assert all(matches), printed
    found = {int(match[1]): float(match[2]) for match in matches if match}
    assert len(found) == len(lines), "a line was printed by several ranks"
    last = _END.fullmatch(end)
    assert last, printed
    found[steps] = float(last[1])
    return found, float(last[2])


def test_any_number_of_ranks_prints_the_same_losses(data: Path, tmp_path: Path) -> None:
    one, error = losses(0, data, "--dtype", "float64")
    assert list(one) == [*range(STEPS + 1)]
    assert one[STEPS] < 0.5 * one[0]
    assert error < 40  # guessing gets 90
    for ranks in (2, 3):
        found, held_out = losses(ranks, data, "--dtype", "float64", "--timeout", "60")
        assert found == pytest.approx(one, rel=1e-10), ranks
        assert held_out == error
    # Four ranks begin, and one process goes on.
    saved = ["--dtype", "float64", "--checkpoint", str(tmp_path / "run.safetensors")]
    begun, _ = losses(4, data, *saved, steps=STEPS - 1)
    assert begun == pytest.approx({i: one[i] for i in range(STEPS)}, rel=1e-10)  # five steps
    ended, held_out = losses(None, data, *saved)
    assert list(ended) == [STEPS - 1, STEPS]
    assert ended == pytest.approx({i: one[i] for i in ended}, rel=1e-10)
    assert held_out == error


def test_float32_to_its_noise(data: Path) -> None:
    two, one = losses(2, data)[0], losses(None, data)[0]
    assert one == pytest.approx(two, rel=5e-3)  # rounding, which the steps amplify: on the real digits to 2e-3


@pytest.mark.parametrize("directory", [False, True])
def test_without_data_it_says_what_to_do(
    directory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "argv", ["example", *(["--data", str(tmp_path)] if directory else [])])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    said = capsys.readouterr().err
    assert (f"mnist.npz is not in {tmp_path}" if directory else "there is no data") in said
    assert "by --data, or set " + VARIABLE in said
