"""Store a picture in a network: (x, y) → colour, a network of sines fitted to all pixels at once, against tuned Adam.

    python examples/implicit_image.py              # about three minutes on one core; writes image.png

The picture is drawn by this program; the sines are those of SIREN (Sitzmann et al. 2020). Some thousand parameters, and
all pixels in one closure. Every run gets the same CPU seconds of this process (race.py); Adam, on all pixels too, runs
with each of three learning rates, decayed to 0, and the best of them counts.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import copy
import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Circle
from torch import Tensor, nn

from krylov_descent import KSD
from race import RATES, Curve, Stopwatch, tuned_adam

FREQUENCY = 20.0  # of the sines; SIREN's 30 is for larger pictures


def picture(size: int) -> Tensor:
    """[size, size, 3] colours in [0, 1]: a sun over waves, and letters."""
    figure = plt.figure(figsize=(1, 1), dpi=4 * size)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 1), ylim=(0, 1))
    axes.set_axis_off()
    axes.imshow(np.linspace(0, 1, 256)[:, None], extent=(0, 1, 0, 1), cmap="plasma", vmin=-0.05, vmax=1.1)
    axes.add_patch(Circle((0.72, 0.42), 0.17, color="#FFF3C4"))
    x = np.linspace(0, 1, 400)
    for low, colour in ((0.34, "#3C6E8F"), (0.22, "#2A4D69"), (0.1, "#14283A")):
        axes.fill_between(x, low + 0.06 * np.sin(14 * x + 40 * low), color=colour, linewidth=0)
    axes.text(0.06, 0.7, "KSD", fontsize=19, fontweight="bold", color="white")
    figure.canvas.draw()
    pixels = torch.from_numpy(np.array(figure.canvas.buffer_rgba())[..., :3]).float() / 255  # type: ignore[attr-defined]
    plt.close(figure)
    return pixels.view(size, 4, size, 4, 3).mean((1, 3))


class Sine(nn.Module):
    """A dense layer, then sin(FREQUENCY · z)."""

    def __init__(self, inputs: int, outputs: int, first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        bound = 1 / inputs if first else math.sqrt(6 / inputs) / FREQUENCY
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs] → [n, outputs]."""
        return torch.sin(FREQUENCY * self.linear(x))


def main() -> None:
    """Fit, compare, draw."""
    parser = argparse.ArgumentParser(description="A picture in a network: KSD against Adam.")
    parser.add_argument("--seconds", type=float, default=45, help="CPU seconds for each of four runs (%(default)s)")
    parser.add_argument("--max-steps", type=int, help="end KSD after so many steps; Adam gets the seconds it took")
    parser.add_argument("--size", type=int, default=80, help="pixels along a side (%(default)s)")
    parser.add_argument("--width", type=int, default=48, help="of the network (%(default)s)")
    parser.add_argument("--out", default="image.png")
    given = parser.parse_args()
    target = picture(given.size)
    along = torch.linspace(-1, 1, given.size)
    places, colours = torch.cartesian_prod(along, along), target.view(-1, 3)

    torch.manual_seed(0)
    width = given.width
    model = nn.Sequential(Sine(2, width, first=True), Sine(width, width), Sine(width, width), nn.Linear(width, 3))
    start = copy.deepcopy(model.state_dict())

    def closure() -> tuple[Tensor, Tensor]:
        r = model(places) - colours
        return r.square().mean(), r  # the loss, and the model outputs

    def squared_error() -> float:
        with torch.no_grad():
            return closure()[0].item()

    ksd = Stopwatch(squared_error)
    for report in KSD(model.parameters()).run(closure, max_steps=given.max_steps):
        if report.iteration % 10 == 0:
            print(report, flush=True)
        if ksd.mark() >= given.seconds:
            break
    images = {"target": target, "KSD": model(places).detach().view(target.shape)}

    model.load_state_dict(start)
    rate, adam = tuned_adam(model, lambda: closure()[0], squared_error, ksd.seconds)
    images["Adam"] = model(places).detach().view(target.shape)

    draw(given.out, images, {"KSD": ksd.curve, f"Adam, learning rate {rate:g}": adam.curve})
    print(
        f"image of {given.size} × {given.size} pixels in {sum(p.numel() for p in model.parameters())} parameters: "
        f"PSNR {decibels(ksd.last):.1f} dB with KSD, {decibels(adam.last):.1f} dB with Adam (learning rate {rate:g}, "
        f"the best of {len(RATES)}), after {ksd.seconds:.0f} CPU seconds each."
    )


def decibels(squared_error: float) -> float:
    """Peak signal-to-noise ratio; the peak is 1."""
    return -10 * math.log10(squared_error)


def draw(out: str, images: dict[str, Tensor], curves: dict[str, Curve]) -> None:
    """Target, fits and their errors, and PSNR over time."""
    figure, axes = plt.subplots(2, 3, figsize=(10, 6.2), layout="constrained")
    off = {name: (image - images["target"]).abs().mean(2) for name, image in images.items() if name != "target"}
    largest = max(float(error.quantile(0.995)) for error in off.values())
    for axis, (name, image) in zip(axes[0], images.items(), strict=True):
        axis.imshow(image.clamp(0, 1).numpy(), interpolation="nearest")
        axis.set(title=name, xticks=[], yticks=[])
    for axis, (name, error) in zip(axes[1, 1:], off.items(), strict=True):
        shown = axis.imshow(error.numpy(), cmap="magma", vmin=0, vmax=largest, interpolation="nearest")
        axis.set(title=f"{name}: error", xticks=[], yticks=[])
    figure.colorbar(shown, ax=axes[1, 2], label="mean over the three colours")
    for (name, curve), colour, dashes in zip(curves.items(), ("#0072B2", "#D55E00"), ("-", "--"), strict=True):
        seconds, errors = zip(*curve, strict=True)
        axes[1, 0].plot(seconds, [decibels(e) for e in errors], dashes, color=colour, label=name)
    axes[1, 0].set(title="PSNR [dB]", xlabel="CPU seconds")
    axes[1, 0].spines[["top", "right"]].set_visible(False)
    axes[1, 0].legend(frameon=False, loc="lower right")
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
