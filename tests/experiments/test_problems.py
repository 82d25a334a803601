"""The problems of the experiments; what needs data files is skipped unless the environment names their directory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from experiments.supervised import data, losses, pretraining, recurrent, speech, starcraft
from experiments.supervised.curves import curves
from experiments.supervised.networks import autoencoder
from experiments.supervised.problems import PROBLEMS, Problem, load_problem
from torch import Tensor, nn

from krylov_descent import KSD, Subsets

PARAMETERS = {
    "curves": 842_340,
    "curves5": 842_289,
    "mnist-ae": 2_837_314,
    "mnist-class": 1_665_010,
    "mnist-pretrained": 1_665_010,
    "spoken-digits": 2_372_156,
    "starcraft": 10_007,
    "adding-50": 10_401,
    "adding-100": 10_401,
    "order-50": 11_104,
    "order-100": 11_104,
    "fashion-conv": 54_314,
    "char-lstm": 34_144,
    "char-transformer": 116_576,
}
FILES = {
    "mnist": data.MNIST,
    "fashion": data.FASHION_MNIST,
    "spoken-digits": data.SPOKEN_DIGITS,
    "starcraft": data.STARCRAFT,
}


def loaded(name: str, samples: int | None = None) -> Problem:
    """The problem, or a skip that says which file is missing."""
    source = FILES.get(PROBLEMS[name].source)
    if source is not None:
        need(source)
    return load_problem(name, None, samples)


def need(source: data.Source) -> None:
    directory = os.environ.get(data.VARIABLE)
    if not directory or not (Path(directory) / source.file).is_file():
        pytest.skip(f"{data.VARIABLE} names no directory with {source.file}")


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != "mnist-pretrained"])
def test_a_problem_fits_its_network_and_is_the_same_every_time(name: str) -> None:
    problem, again = loaded(name, 60), loaded(name, 40)
    config = PROBLEMS[name]
    assert len(problem.train[0]) == len(problem.train[-1]) == 60
    assert len(problem.held_out[0]) == len(problem.held_out[-1]) == min(60, config.held_out)
    assert all(torch.equal(a[:40], b) for a, b in zip(problem.train, again.train, strict=True))
    assert not torch.equal(problem.train[0][:40], problem.held_out[0][:40])
    assert problem.train[0].dtype == (torch.long if config.source == "text" else torch.float32)
    assert problem.train[0].isfinite().all()
    model, twin, other = (problem.make_model(seed) for seed in (3, 3, 4))
    state = model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in twin.state_dict().items())
    assert not all(torch.equal(state[key], value) for key, value in other.state_dict().items())
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]
    z = model(problem.train[0])
    loss, error = problem.loss(z, problem.train[-1]), problem.error(z, problem.train[-1])
    assert loss.shape == ()
    assert loss.isfinite()
    assert error.shape == (60,)
    assert problem.error_name in ("squared error", "classification error, %")
    halves = [problem.loss(z[half], problem.train[-1][half]) for half in (slice(30), slice(30, 60))]
    torch.testing.assert_close(loss, torch.stack(halves).mean())  # a mean over cases


@pytest.mark.parametrize("name", ["curves", "adding-50", "order-50", "starcraft"])
def test_ksd_descends(name: str) -> None:
    problem = loaded(name, 400)
    model = problem.make_model(0)
    optimizer = KSD(model.parameters(), weight_decay=problem.weight_decay)

    def closure(batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        z = model(batch[0])
        return problem.loss(z, batch[-1]), z

    sets = Subsets(problem.train, batch_size=100, seed=0)
    values = [optimizer.step(closure, sets).loss for _ in range(6)]
    assert values[-1] < 0.95 * values[0]


def test_names_and_samples_are_checked() -> None:
    with pytest.raises(ValueError, match="no problem is named 'curve': choose from curves"):
        load_problem("curve", None)
    with pytest.raises(ValueError, match="samples is 0"):
        load_problem("curves", None, 0)


def test_curves_are_those_of_the_recipe() -> None:
    train, test = curves(20_000, 0), curves(10_000, 1)
    assert losses.pca_error(train, test, 18) == pytest.approx(5.89, abs=0.1)
    assert float(train.mean()) == pytest.approx(0.052, abs=0.001)
    p = test.double()
    floor = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)).sum(1).mean()
    assert float(floor) == pytest.approx(50.2, abs=0.5)
    assert torch.equal((255 * train).round() / 255, train)


def test_curves_are_distances_to_the_path() -> None:
    # A naive transcription: distances to a hundred points of the parabola, one by one.
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    points = 5 + 17 * torch.rand(20, 3, 2, dtype=torch.float64, generator=generator)
    basis = torch.stack([2 * (t - 0.5) * (t - 1), -4 * t * (t - 1), 2 * t * (t - 0.5)], 1)
    path = next(p for p in (basis @ q for q in points) if bool(((p >= 2) & (p <= 25)).all()))
    image = curves(20, 0)[0].view(28, 28)
    for i in range(28):
        for j in range(28):
            distance = (path - torch.tensor([i, j])).square().sum(1).sqrt().min()
            assert abs(image[i, j] - torch.sigmoid((1 - distance) / 0.426)) <= 0.51 / 255


def test_the_autoencoder_is_sparse_with_a_linear_code() -> None:
    model = autoencoder((40, 30, 3), seed=0)
    kinds = [type(layer) for layer in model]
    assert kinds == [nn.Linear, nn.Sigmoid, nn.Linear, nn.Linear, nn.Sigmoid, nn.Linear]
    for layer in model:
        if isinstance(layer, nn.Linear):
            assert ((layer.weight != 0).sum(1) == min(15, layer.in_features)).all()
            assert not layer.bias.any()


def test_errors_are_per_case() -> None:
    logits = torch.tensor([[0.0, 100.0], [0.0, 0.0]])
    torch.testing.assert_close(losses.squared_error(logits, torch.ones(2, 2)), torch.tensor([0.25, 0.5]))
    assert losses.misclassified(logits, torch.tensor([1, 1])).tolist() == [0.0, 100.0]
    answers = torch.tensor([[0.53], [0.55], [float("nan")]])
    assert losses.missed(answers, torch.full((3, 1), 0.5)).tolist() == [0.0, 100.0, 100.0]


def test_the_error_of_autoencoders_gives_the_known_pca_figure() -> None:
    problem = loaded("mnist-ae")
    assert losses.pca_error(problem.train[0], problem.held_out[0], 30) == pytest.approx(13.87, abs=0.01)
    assert loaded("mnist-class").train[1].bincount().tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949
    ]  # fmt: skip


def test_pca_and_autoencoders_share_one_error() -> None:
    torch.manual_seed(0)
    train, test = torch.rand(50, 6), torch.rand(20, 6)
    mean = train.mean(0)
    basis = torch.linalg.svd(train - mean)[2][:2]
    image = mean + (test - mean) @ basis.T @ basis
    expected = losses.squared_error(torch.logit(image), test).mean()
    assert losses.pca_error(train, test, 2) == pytest.approx(float(expected), rel=1e-4)


def test_spoken_digits_are_standardised_windows() -> None:
    problem = loaded("spoken-digits", 20_000)
    x, y = problem.train
    assert x.shape == (20_000, 351)
    assert len(problem.held_out[0]) == 20_000
    assert y.bincount().count_nonzero() == 60
    torch.testing.assert_close(x.mean(0), torch.zeros(351), atol=0.05, rtol=0)
    torch.testing.assert_close(x.std(0), torch.ones(351), atol=0.05, rtol=0)


def test_deltas_are_slopes_within_an_utterance() -> None:
    lengths = np.array([7, 3])
    first, last = speech._ends(lengths)
    assert first.tolist() == [0] * 7 + [7] * 3
    assert last.tolist() == [6] * 7 + [9] * 3
    line = np.concatenate([2.0 * np.arange(7), np.full(3, 50.0)])[:, None].astype(np.float32)
    features = speech._features(line, lengths, first, last)
    assert features.shape == (10, 3)
    np.testing.assert_allclose(features[:7, 0], 2.0 * np.arange(7) - 6)
    np.testing.assert_allclose(features[2:5, 1], 2.0)  # inside: the slope
    np.testing.assert_allclose(features[0, 1], (2 + 2 * 4) / 10)  # at the edge: the first frame repeated
    np.testing.assert_allclose(features[7:], 0)


def test_starcraft_features() -> None:
    # Three types: built at 3600, never, and after the five minutes; times, presence, pairs 01 02 10 12 20 21.
    assert starcraft.features(np.array([[3600, 0, 9000]])).tolist() == [[0.5, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0]]
    assert starcraft.features(np.array([[3600, 1800, 7200]])).tolist() == [[0.5, 0.25, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0]]


def test_no_starcraft_game_is_in_both_sets() -> None:
    problem = loaded("starcraft")
    assert (len(problem.train[0]), len(problem.held_out[0])) == (743, 83)
    rows = torch.cat([problem.train[0], problem.held_out[0]])
    assert len(np.unique(rows.numpy(), axis=0)) == 826
    assert torch.cat([problem.train[1], problem.held_out[1]]).bincount().tolist() == [13, 133, 278, 106, 3, 255, 38]


@pytest.mark.parametrize("length", [50, 100])
def test_adding_asks_for_the_marked_numbers(length: int) -> None:
    x, y = recurrent.adding(500, length, 0)
    for sequence, target in zip(x, y, strict=True):
        i, j = sequence[:, 1].nonzero().flatten().tolist()
        assert 1 <= i < length / 10 <= j < length / 2
        assert float(target) == pytest.approx(float(sequence[i, 0] + sequence[j, 0]) / 2)


@pytest.mark.parametrize("length", [50, 100])
def test_order_asks_for_the_cues(length: int) -> None:
    x, y = recurrent.order(500, length, 0)
    assert torch.equal(x.sum(2), torch.ones(500, length))
    for sequence, target in zip(x.argmax(2), y, strict=True):
        i, j = (sequence >= 4).nonzero().flatten().tolist()
        assert length / 10 <= i < length / 5
        assert length / 2 <= j < 0.6 * length
        assert int(target) == 2 * (sequence[i] - 4) + sequence[j] - 4


def test_the_recurrent_network_is_the_recursion() -> None:
    model = recurrent.LastOfRNN(3, 20, 2, seed=0)
    weight = model.recurrent.weight.detach()
    assert ((weight != 0).sum(1) == 15).all()
    assert float(torch.linalg.eigvals(weight).abs().max()) == pytest.approx(1.1, rel=1e-4)
    plain = nn.RNN(3, 20, batch_first=True, bias=False)
    plain.load_state_dict({"weight_ih_l0": model.input.weight, "weight_hh_l0": weight})
    x = torch.rand(4, 9, 3)
    torch.testing.assert_close(model(x), model.output(plain(x)[0][:, -1]))


def test_pretraining_reconstructs_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    x = curves(400, 0)
    machine = pretraining.Machine(784, 50, torch.Generator().manual_seed(0))
    before = losses.squared_distance(machine.visible(machine.hidden(x)), x).mean()
    for _ in range(7):
        machine.epoch(x, 0.5)
    assert losses.squared_distance(machine.visible(machine.hidden(x)), x).mean() < before / 4
    model = pretraining.classifier((784, 50, 20, 10), 0, inputs=x, epochs=2)
    kinds = [type(layer) for layer in model]
    assert kinds == [nn.Linear, nn.Sigmoid, nn.Linear, nn.Sigmoid, nn.Linear]
    (kept,) = (tmp_path / "krylov-descent").iterdir()
    assert kept.name == "rbm-784-50-20-samples400-epochs2-seed0.pt"
    again = pretraining.classifier((784, 50, 20, 10), 0, inputs=torch.zeros(400, 784), epochs=2)  # not looked at
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    kept.write_bytes(b"half")
    with pytest.raises(ValueError, match=r"cannot be read.*remove the file"):
        pretraining.classifier((784, 50, 20, 10), 0, inputs=x, epochs=2)


def test_pretrained_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    problem = loaded("mnist-pretrained", 200)
    model = problem.make_model(0)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS["mnist-pretrained"]
    assert problem.loss(model(problem.train[0]), problem.train[-1]).isfinite()
