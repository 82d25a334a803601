"""Images, regression and DeepONet as problems of the PINN study: losses, errors, rows, runs and tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from experiments.__main__ import main
from experiments.common.records import read_run
from experiments.pinn import images, regressions
from experiments.pinn.fits import FITS, IMAGES
from experiments.pinn.problems import PROBLEMS, Problem, problem
from experiments.pinn.records import fields
from experiments.pinn.rivals import METHODS
from experiments.pinn.rivals.least_squares import ALL, LeastSquares
from experiments.pinn.table import table
from torch import Tensor, nn

from krylov_descent.flow.row_sampling import BatchRows
from tests.experiments.pinn_records import write

F64 = torch.float64

#: Larger images differ from the smallest in nothing but their number of pixels, and that their grids take seconds.
SMALLER = [name for name in FITS if name not in ("image128", "image256")]

#: Samples that suffice for what a fit does to be seen, and no test to be slow.
FEW = 60


def seen_by(made: Problem) -> list[Tensor]:
    """Inputs of all later calls of the model."""
    seen: list[Tensor] = []
    made.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    return seen


def dense_jacobian(z: Tensor, params: list[nn.Parameter]) -> Tensor:
    rows = [torch.autograd.grad(e, params, retain_graph=True) for e in z.reshape(-1)]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])


def test_fits_are_no_equations() -> None:
    assert not set(FITS) & set(PROBLEMS)
    assert {"image64", "image128", "image256", "image64-rgb", "regression", "deeponet"} <= set(FITS)


@pytest.mark.parametrize("network", ["3x32", "4x50"])
@pytest.mark.parametrize("name", SMALLER)
def test_the_loss_is_the_mean_square_of_residuals_whose_rows_are_samples(name: str, network: str) -> None:
    made = problem(name, seed=0, network=network, points=FEW)
    seen = seen_by(made)
    loss, (z,) = made.closure()
    assert len(seen) == 1
    assert len(seen[0]) == FEW
    assert z.shape == ((FEW, 3) if name == "image64-rgb" else (FEW,))
    torch.testing.assert_close(loss, z.square().mean())
    assert loss > 0
    with torch.no_grad():
        assert torch.equal(made.closure()[0], loss.detach())
    assert all(p.grad is None for p in made.model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters", "residuals"),
    [
        ("image64", 2241, 64**2),
        ("image128", 2241, 128**2),
        ("image256", 2241, 256**2),
        ("image64-rgb", 2307, 3 * 64**2),
        ("image64-fourier", 3201, 64**2),
        ("regression", 705, 1500),
        ("deeponet", 4960, 3000),
    ],
)
def test_sizes(name: str, parameters: int, residuals: int) -> None:
    made = problem(name, seed=0)
    assert sum(p.numel() for p in made.model.parameters()) == parameters
    with torch.no_grad():
        assert made.closure()[1][0].numel() == residuals
    assert all(isinstance(layer, nn.Linear) for layer in made.model.modules() if list(layer.parameters(recurse=False)))


@pytest.mark.parametrize("name", SMALLER)
def test_a_fit_comes_from_its_seed_and_is_tested_on_the_same_for_all(name: str) -> None:
    made, twin, other = (problem(name, seed=seed, points=FEW) for seed in (3, 3, 4))
    loss = made.closure()[0]
    assert torch.equal(loss, twin.closure()[0])
    assert made.held_out() == twin.held_out()
    other.model.load_state_dict(made.model.state_dict())
    assert not torch.equal(loss, other.closure()[0])  # other samples
    assert made.held_out() != other.held_out()
    assert other.error() == made.error()


@pytest.mark.parametrize("name", SMALLER)
def test_held_out_samples_and_test_samples_are_not_trained_on(name: str) -> None:
    made = problem(name, seed=0, points=FEW)
    seen = seen_by(made)
    made.closure()
    made.held_out()
    made.error()
    trained, held_out, test = seen
    assert held_out.shape == trained.shape
    assert torch.cdist(trained, held_out).min() > 1e-6
    assert torch.cdist(trained, test).min() > 1e-6


@pytest.mark.parametrize("name", SMALLER)
def test_the_error_is_1_for_the_zero_network_and_0_for_the_exact_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = problem(name, seed=0, points=FEW)
    with torch.no_grad():
        for p in made.model.parameters():
            p.zero_()
    assert made.error() == pytest.approx(1)
    assert made.grid.solution().abs().max() == 0
    assert made.grid.exact.shape == tuple(len(axis) for axis in made.grid.axes)
    assert made.grid.solution().shape == made.grid.exact.shape
    if name == "deeponet":
        return  # its functions are more than their values at the sensors
    exact: Callable[[Tensor], Tensor] = regressions.friedman
    if name in IMAGES:
        exact = images.picture if name == "image64-rgb" else lambda at: images.picture(at).mean(1)
    monkeypatch.setattr(made.model, "forward", exact)
    assert made.error() == 0
    torch.testing.assert_close(made.grid.solution(), made.grid.exact)
    noise = 0.2**2 if name == "regression-noisy" else 0.0
    assert float(made.closure()[0]) == pytest.approx(noise, rel=0.5)
    assert made.held_out() == pytest.approx(noise, rel=0.5)


@pytest.mark.parametrize("name", SMALLER)
def test_rows_of_the_jacobian_are_had_together_and_are_right(name: str) -> None:
    made = problem(name, seed=0, points=7)
    _, (z,) = made.closure()
    params = list(made.model.parameters())
    squares = LeastSquares(made)
    J, rho = squares.rows(ALL)
    expected = math.sqrt(2 / z.numel()) * dense_jacobian(z, params)
    by_column = expected.view(len(z), -1, expected.shape[1]).transpose(0, 1).reshape(expected.shape)
    torch.testing.assert_close(J, by_column)
    torch.testing.assert_close(J.T @ rho, squares.gradient()[1])
    assert not squares._objective.workspace.of(BatchRows).refuted


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["image64-rgb", "regression-noisy", "deeponet"])
def test_every_method_lowers_the_loss(name: str, method: str) -> None:
    if method == "soap":
        pytest.importorskip("pytorch_optimizer")
    made = problem(name, seed=0, points=FEW)
    before = float(made.closure()[0].detach())
    for _ in itertools.islice(METHODS[method](made, seed=0), 3):
        pass
    assert float(made.closure()[0].detach()) < before


def test_new_samples_are_refused_before_a_run_and_in_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="image64 is fitted to the samples it has"):
        problem("image64", seed=0, points=FEW).resample(1)
    with pytest.raises(SystemExit, match="--resample 5: image64 has no other samples to draw; leave it out"):
        main(["pinn", "run", "image64", "lm", "--resample", "5", "--results", str(tmp_path)])


def test_more_pixels_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="points is 5000: the image has 4096 pixels"):
        problem("image64", seed=0, points=5000)


def test_float32_starts_where_float64_does() -> None:
    for name in ("image64-rgb", "regression", "deeponet"):
        single, double = (problem(name, seed=0, points=FEW, dtype=dtype) for dtype in (torch.float32, F64))
        loss = single.closure()[0].detach()
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), double.closure()[0].detach(), rtol=1e-4, atol=0)
        assert single.error() == pytest.approx(double.error(), rel=1e-4)


def test_the_command_line_runs_a_fit(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    command = ["pinn", "run", "regression", "lm", "--seconds", "0.01", "--points", "80", "--quiet", "--no-tuned"]
    main([*command, "--results", str(tmp_path)])
    torch.set_num_threads(threads)
    found = read_run(tmp_path / "pinn" / "regression" / "3x32" / "lm-points80-0.01s-seed0.jsonl")
    assert found.final.loss < found.points[0].loss
    assert fields(found).exists()


def test_fits_have_tables_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, "wave", "lm", 0.5)
    alone = table(tmp_path)
    assert "fits" not in alone
    for name, error in (("deeponet", 1e-4), ("image64", 0.05), ("regression", 1e-2)):
        fields = error if name == "image64" else None
        write(tmp_path, name, "flow", error, fields=fields)
        write(tmp_path, name, "soap", 2 * error, fields=fields)
    text = table(tmp_path)
    assert text.startswith(alone.partition("\n\n## Runs")[0])  # the equations have neither rows nor columns of the fits
    fits = text.partition("## Error: 3x32, 60 s, fits\n")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in fits.splitlines() if line[:1] == "|"]
    assert cells[0] == ["problem", "GaussNewtonFlow", "SOAP"]
    assert cells[2:] == [
        ["image64", "**5.0e-2**", "1.0e-1"],
        ["regression", "**1.0e-2**", "2.0e-2"],
        ["deeponet", "**1.0e-4**", "2.0e-4"],
    ]
    assert "Ratios" not in text


def test_a_table_of_fits_alone(tmp_path: Path) -> None:
    write(tmp_path, "regression", "lm", 0.1)
    text = table(tmp_path)
    assert text.startswith("## Error: 3x32, 60 s, fits")
    assert "geometric mean |" not in text
