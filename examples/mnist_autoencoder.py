"""Squeeze digits through 30 numbers: an autoencoder in float32, trained with KSD on sample sets, against tuned Adam.

    python examples/mnist_autoencoder.py --data DIRECTORY    # of mnist.npz: x_train, x_test; or KRYLOV_DESCENT_DATA
    python examples/mnist_autoencoder.py                     # without either: strokes drawn here, and labelled so

Writes autoencoder.png: reconstructions soon after the start and at the end, and the held-out error over time. Every run
gets the same CPU seconds of this process (race.py); Adam runs with each of three learning rates, decayed to 0, and the
best of them counts. Adam is ahead here, as it is where networks are deep or data plenty and seconds few.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Subsets
from race import RATES, Curve, Stopwatch, minibatches, tuned_adam

VARIABLE = "KRYLOV_DESCENT_DATA"


def digits(file: Path, part: str, n: int) -> Tensor:
    """[n, 784] images in [0, 1]."""
    with np.load(file, allow_pickle=False) as arrays:
        return torch.from_numpy(arrays[f"x_{part}"][:n]).flatten(1).float() / 255


def strokes(n: int, seed: int) -> Tensor:
    """[n, 784] parabolas between random points, drawn with a soft pen."""
    a, b, c = torch.rand(3, n, 1, 2, generator=torch.Generator().manual_seed(seed)) * 0.8 + 0.1
    along = torch.linspace(0, 1, 25)[:, None]
    paths = (1 - along) ** 2 * a + 2 * along * (1 - along) * b + along**2 * c  # [n, 25, 2]
    pixels = torch.cartesian_prod(torch.linspace(0, 1, 28), torch.linspace(0, 1, 28))
    distance = torch.stack([torch.cdist(path, pixels).amin(0) for path in paths])
    return torch.exp(-((distance / 0.045) ** 2)).mul(255).round() / 255  # without tiny numbers, which are slow


def main() -> None:
    """Train, compare, draw."""
    parser = argparse.ArgumentParser(description="An autoencoder: KSD against Adam.")
    parser.add_argument("--data", default=os.environ.get(VARIABLE), help=f"directory of mnist.npz (or ${VARIABLE})")
    parser.add_argument("--seconds", type=float, default=45, help="CPU seconds for each of four runs (%(default)s)")
    parser.add_argument("--max-steps", type=int, help="end KSD after so many steps; Adam gets the seconds it took")
    parser.add_argument("--samples", type=int, default=10_000, help="to train with (%(default)s)")
    parser.add_argument("--out", default="autoencoder.png")
    given = parser.parse_args()
    if given.data and not (file := Path(given.data) / "mnist.npz").is_file():
        parser.error(f"mnist.npz is not in {given.data}: name its directory by --data or {VARIABLE}, or give neither.")
    if given.data:
        of, train, held_out = "MNIST", digits(file, "train", given.samples), digits(file, "test", 2000)
    else:
        of, train, held_out = "drawn strokes (no MNIST given)", strokes(given.samples, 0), strokes(2000, 1)

    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(784, 128), nn.Softplus(), nn.Linear(128, 30))
    decoder = nn.Sequential(nn.Linear(30, 128), nn.Softplus(), nn.Linear(128, 784))
    model = nn.Sequential(encoder, decoder)
    start = copy.deepcopy(model.state_dict())

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        (images,) = batch
        logits = model(images)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, images, reduction="sum") / len(images)
        return loss, logits  # a mean over images, and the model outputs

    def reconstructed() -> Tensor:
        with torch.no_grad():
            return torch.sigmoid(model(held_out))

    def error() -> float:
        """Squared, summed over the pixels of a held-out image; the mean over images."""
        return float((reconstructed() - held_out).square().sum(1).mean())

    optimizer = KSD(model.parameters())
    sets = Subsets((train,), batch_size=1000, seed=0)  # the gradient on all of train, curvature and search on 1/20 each
    ksd, early = Stopwatch(error), (0.0, reconstructed())
    for report in optimizer.run(closure, sets, max_steps=given.max_steps):
        if report.iteration % 5 == 0:
            print(report, flush=True)
        if ksd.mark() >= given.seconds:
            break
        if ksd.seconds < given.seconds / 8:
            early = ksd.seconds, reconstructed()
    ksd.mark()
    rows = {"input": held_out, f"KSD, {early[0]:.1f} s": early[1], f"KSD, {ksd.seconds:.1f} s": reconstructed()}

    model.load_state_dict(start)
    stream = minibatches((train,), 100)
    rate, adam = tuned_adam(model, lambda: closure(next(stream))[0], error, ksd.seconds)
    rows[f"Adam, {adam.seconds:.1f} s"] = reconstructed()

    curves = {"KSD": ksd.curve, f"Adam, learning rate {rate:g}": adam.curve}
    draw(given.out, of, rows, curves, principal_components_error(train, held_out))
    print(
        f"autoencoder of {of}: held-out squared error {ksd.last:.2f} with KSD, {adam.last:.2f} with Adam "
        f"(learning rate {rate:g}, the best of {len(RATES)}), after {ksd.seconds:.0f} CPU seconds each."
    )


def principal_components_error(train: Tensor, held_out: Tensor) -> float:
    """What the best linear code of 30 numbers leaves."""
    mean = train.mean(0)
    _, vectors = torch.linalg.eigh((train - mean).T @ (train - mean))
    rest = (held_out - mean) @ vectors[:, :-30]
    return float(rest.square().sum(1).mean())


def draw(out: str, of: str, rows: dict[str, Tensor], curves: dict[str, Curve], linear: float) -> None:
    """Reconstructions, and the held-out error over time."""
    figure, (pictures, axis) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(1.7, 1), layout="constrained")
    strips = [images[:10].view(10, 28, 28).transpose(0, 1).reshape(28, 280) for images in rows.values()]
    pictures.imshow(torch.cat(strips).numpy(), cmap="gray_r", vmin=0, vmax=1)
    pictures.set(title=f"{of}: held-out images", xticks=[], yticks=range(14, 28 * len(rows), 28), yticklabels=rows)
    pictures.tick_params(length=0)
    for (name, curve), look in zip(curves.items(), ("-", "--"), strict=True):
        axis.plot(*zip(*curve, strict=True), look, color="#0072B2" if name == "KSD" else "#D55E00", label=name)
    axis.axhline(linear, color="0.6", linestyle=":", label="30 principal components")
    axis.set(yscale="log", xlabel="CPU seconds", title="squared error of a held-out image")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
