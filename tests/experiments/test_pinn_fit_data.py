"""The data and networks of the PINN study's fits: an image, Friedman's function, antiderivatives."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from experiments.pinn import images, operators, regressions
from experiments.pinn.problems import problem
from scipy.integrate import dblquad, quad
from torch import Tensor, nn

F64 = torch.float64


def test_the_image() -> None:
    at = images.centres(64)
    assert at[0].tolist() == [-1 + 1 / 64, -1 + 1 / 64]
    assert at[-1].tolist() == [1 - 1 / 64, 1 - 1 / 64]
    shown = images.picture(images.centres(256))
    assert shown.shape == (256**2, 3)
    assert float(shown.abs().max()) <= 1
    # The middle of the disk, of a stroke, and two places either side of the disk's edge.
    disk, stroke = images.picture(torch.tensor([[-0.5, 0.45], [-0.8, -0.5]], dtype=F64))
    assert disk.tolist() == pytest.approx([-0.9, -0.6, -0.75], abs=1e-9)
    assert stroke.tolist() == pytest.approx([0.95, 0.8, 0.65], abs=0.1)
    within, without = images.brightness(torch.tensor([[-0.5, 0.72], [-0.5, 0.78]], dtype=F64), 1)
    assert without - within > 0.5
    # Sizes are samples of one image: four pixels of 128 are about one of 64, but at edges.
    coarse, fine = (images.brightness(images.centres(side), 1).view(side, side) for side in (64, 128))
    assert (fine.view(64, 2, 64, 2).mean((1, 3)) - coarse).abs().median() < 0.005


def test_the_sine_network_starts_as_its_authors_say() -> None:
    model = images.SineNetwork([2, 64, 64, 1], seed=0, dtype=F64)
    first, second, last = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    assert first.weight.abs().max().item() == pytest.approx(1 / 2, rel=0.05)
    assert second.weight.abs().max().item() == pytest.approx(math.sqrt(6 / 64) / 30, rel=0.05)
    # Then what goes into a sine of the second layer is about standard normal, biases apart.
    at = images.centres(32)
    before = torch.sin(30 * first(at))
    assert (30 * before @ second.weight.T).std().item() == pytest.approx(1, abs=0.2)
    hidden = torch.sin(30 * second(before))
    torch.testing.assert_close(model(at), last(hidden)[:, 0])


def test_fourier_features_are_drawn_from_the_seed_and_not_trained() -> None:
    model, twin, other = (images.FourierNetwork([2, 6, 6, 1], seed, F64) for seed in (0, 0, 1))
    assert torch.equal(model.B, twin.B)
    assert not torch.equal(model.B, other.B)
    assert set(model.state_dict()) == {"B", *(name for name, _ in model.named_parameters())}
    at = images.centres(4)
    features = torch.cat([f(at @ model.B) for f in (torch.sin, torch.cos)], 1)
    torch.testing.assert_close(model(at), model.network.layers(features)[:, 0])


def test_friedmans_function_has_mean_0_and_variance_1() -> None:
    mean, square = (
        dblquad(lambda a, b, power=power: math.sin(math.pi * a * b) ** power, 0, 1, 0, 1)[0] for power in (1, 2)
    )
    # Of (x − ½)²: mean 1/12, variance 1/80 − 1/144; of x: 1/2 and 1/12.
    at = torch.full((1, 8), 0.5, dtype=F64)
    raw = 10 * math.sin(math.pi / 4) + 7.5
    variance = 100 * (square - mean**2) + 400 * (1 / 80 - 1 / 144) + 125 / 12
    assert float(regressions.friedman(at)) == pytest.approx((raw - 10 * mean - 20 / 12 - 7.5) / variance**0.5, abs=1e-3)
    high = at.clone()
    high[:, 3] = 1
    high[:, 5:] = 0.9  # nothing to do with it
    assert float(regressions.friedman(high) - regressions.friedman(at)) == pytest.approx(5 / variance**0.5, rel=1e-3)


def test_integrals_of_the_random_functions() -> None:
    coefficients = torch.randn(2, 2, 100, dtype=F64, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([[0.0, 0.3, 1.0]], dtype=F64).expand(2, 3)
    found = operators.integrals(coefficients, y)
    for i, j in itertools.product(range(2), range(3)):

        def value(s: float, i: int = i) -> float:
            return float(operators.values(coefficients[i : i + 1], torch.tensor([[s]], dtype=F64)))

        assert float(found[i, j]) == pytest.approx(quad(value, 0, float(y[i, j]))[0], abs=1e-9)


def test_functions_are_of_a_smooth_gaussian_process() -> None:
    coefficients = torch.randn(4000, 2, 100, dtype=F64, generator=torch.Generator().manual_seed(0))
    v = operators.values(coefficients, torch.tensor([0.0, 0.1, 0.2], dtype=F64).expand(4000, 3))
    covariance = v.T @ v / 4000
    assert covariance.diagonal().tolist() == pytest.approx([1, 1, 1], abs=0.1)
    for j, distance in ((1, 0.1), (2, 0.2)):
        assert float(covariance[0, j]) == pytest.approx(math.exp(-(distance**2) / (2 * 0.2**2)), abs=0.15)


def test_pairs_of_the_operator() -> None:
    made = problem("deeponet", seed=0, points=23)
    seen: list[Tensor] = []
    made.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    made.closure()
    (pairs,) = seen
    assert pairs.shape == (23, operators.SENSORS + 1)
    assert len(torch.unique(pairs[:, :-1], dim=0)) == 5  # a function has five places
    assert len(torch.unique(pairs[:, -1])) == 23
    assert pairs[:, -1].min() >= 0
    assert pairs[:, -1].max() <= 1
    assert made.grid.names == ("function", "y")
    assert (made.grid.exact[:, 0] == 0).all()  # integrals from 0 to 0
    model = made.model
    assert isinstance(model, operators.DeepONet)
    features = model.branch(pairs[:, :-1]) * model.trunk(pairs[:, -1:])
    assert features.shape == (23, 32)
    torch.testing.assert_close(model(pairs), features.mean(1) * math.sqrt(32))
