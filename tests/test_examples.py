"""Every example runs to its end on a tiny budget, writes a picture with something on it, and says what it reached."""

from __future__ import annotations

import itertools
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from krylov_descent import KSD

pytestmark = pytest.mark.nightly

EXAMPLES = Path(__file__).parent.parent / "examples"
TINY = ("--seconds", "0.05", "--max-steps", "2")


@dataclass(frozen=True)
class Example:
    """A program, arguments that make it short, the beginning of its last line, and what that line must contain."""

    file: str
    arguments: tuple[str, ...]
    name: str
    closing: str


# To add one: a line here. ``--out`` is given by the test.
DRAWING = [
    Example(
        "mnist_autoencoder.py", (*TINY, "--samples", "200"), "autoencoder of drawn strokes", r"error [\d.]+ with KSD"
    ),
    Example(
        "burgers_pinn.py",
        (*TINY, "--adam-steps", "3", "--points", "64"),
        "burgers",
        r"error KSD [\d.e-]+ .*L-BFGS [\d.e-]+",
    ),
    Example("implicit_image.py", (*TINY, "--size", "16", "--width", "8"), "image of 16 × 16", r"[\d.]+ dB with KSD"),
    Example("adding_rnn.py", (*TINY, "--samples", "100"), "adding problem", r"[\d.]+% .*with KSD.*, [\d.]+% with Adam"),
    Example(
        "loss_in_a_plane.py", ("--max-steps", "2", "--points", "5"), "loss in a plane", r"step 1 ended at [\d.e-]+,"
    ),
    Example("character_transformer.py", (*TINY, "--sequences", "60"), "character transformer", r"[\d.]+ nats .*KSD"),
]

Run = Callable[..., int]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs an example as a user does, in this process, which spares it the imports; gives its exit status."""
    matplotlib.use("Agg")
    monkeypatch.delenv("KRYLOV_DESCENT_DATA", raising=False)
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(file: str, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", [file, *arguments])
        try:
            runpy.run_path(str(EXAMPLES / file), run_name="__main__")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0

    dtype = torch.get_default_dtype()
    with torch.random.fork_rng():
        yield run
    torch.set_default_dtype(dtype)
    plt.close("all")


def test_readme_names_every_example() -> None:
    links = set(re.findall(r"\]\(([^)#]+)\)", (EXAMPLES / "README.md").read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} <= links
    assert all((EXAMPLES / link).exists() for link in links)


@pytest.mark.parametrize("example", DRAWING, ids=lambda example: example.file)
def test_example_draws(example: Example, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.png"
    assert run(example.file, *example.arguments, "--out", str(picture)) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(example.name)
    assert re.search(example.closing, last), last
    assert "nan" not in last

    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = matplotlib.image.imread(picture)[..., :3]  # decodes all of it
    assert min(pixels.shape[:2]) >= 300
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100
    assert 0.01 < np.mean(pixels.min(2) < 0.9) < 0.9  # neither an empty page nor a full one


def test_autoencoder_says_which_file_is_missing(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mnist_autoencoder.py", "--data", str(tmp_path)) == 2
    assert f"mnist.npz is not in {tmp_path}" in capsys.readouterr().err


def test_autoencoder_reads_digits(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (60, 28, 28), dtype=np.uint8)
    np.savez(tmp_path / "mnist.npz", x_train=images, x_test=images)
    out = tmp_path / "picture.png"
    assert run("mnist_autoencoder.py", *TINY, "--samples", "60", "--data", str(tmp_path), "--out", str(out)) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("autoencoder of MNIST")
    assert out.exists()


def test_exact_burgers_solution_solves_the_equation(monkeypatch: pytest.MonkeyPatch) -> None:
    """By finite differences, away from the shock."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    burgers: dict[str, Any] = runpy.run_path(str(EXAMPLES / "burgers_pinn.py"), run_name="burgers")
    x, t = (
        torch.tensor([[-0.7], [-0.3], [0.4], [0.9]], dtype=torch.float64),
        torch.full((4, 1), 0.6, dtype=torch.float64),
    )
    h = 1e-4

    def u(dx: float = 0.0, dt: float = 0.0) -> torch.Tensor:
        value: torch.Tensor = burgers["exact"](x + dx, t + dt)
        return value

    u_t, u_x = (u(dt=h) - u(dt=-h)) / (2 * h), (u(dx=h) - u(dx=-h)) / (2 * h)
    u_xx = (u(dx=h) - 2 * u() + u(dx=-h)) / h**2
    torch.testing.assert_close(u_t + u() * u_x, burgers["VISCOSITY"] * u_xx, atol=1e-5, rtol=0)
    torch.testing.assert_close(burgers["exact"](x, 0 * t), -torch.sin(torch.pi * x))


def test_the_loss_in_a_plane_is_that_of_the_closure() -> None:
    """The parameters are put back bit for bit, also where the closure fails."""
    example: dict[str, Any] = runpy.run_path(str(EXAMPLES / "loss_in_a_plane.py"), run_name="plane")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)).double()
    x = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    calls = itertools.count(1)
    fails = False

    def closure() -> tuple[torch.Tensor, torch.Tensor]:
        if fails and next(calls) == 3:
            raise RuntimeError("out of memory")
        r = model(x) - torch.sin(4 * x)
        return r.square().mean(), r

    optimizer = KSD(model.parameters(), krylov_dim=5)
    report = [optimizer.step(closure) for _ in range(3)][-1]
    end = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    found = example["plane"](optimizer, closure, report, points=5)
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), end)
    assert float(found.loss[2, 2]) == pytest.approx(report.search_loss_after, rel=1e-12)

    V, c = optimizer.basis(), torch.tensor(report.coefficients)
    along = c.abs().argsort(descending=True)[:2].tolist()
    assert found.end == tuple(report.coefficients[k] for k in along)
    a, b = (axis - at for axis, at in zip(found.axes, found.end, strict=True))
    for i, j in itertools.product(range(5), repeat=2):
        torch.nn.utils.vector_to_parameters(end + a[i] * V[along[0]] + b[j] * V[along[1]], model.parameters())
        assert float(found.loss[j, i]) == pytest.approx(float(closure()[0].detach()), rel=1e-12)
    torch.nn.utils.vector_to_parameters(end.clone(), model.parameters())

    fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        example["plane"](optimizer, closure, report, points=5)
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), end)
