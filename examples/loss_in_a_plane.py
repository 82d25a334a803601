"""Look at the loss around a step, in the plane in which the step moved furthest.

    python examples/loss_in_a_plane.py             # some seconds on one core; writes plane.png

A small network learns a sine. After the first, the third and the last step, the loss is evaluated on a grid in a plane
through the point where that step ended. The plane is spanned by the two basis vectors along which the step moved
furthest: rows of ``optimizer.basis()`` [m, P], with lengths in ``report.coefficients`` [m]. Axes count from the step's
start, whose projection is at (0, 0).

The search minimises the loss over the whole subspace, 20 dimensions and more, so no point of the plane should be much
lower than the end of the step.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from torch import Tensor, nn

from krylov_descent import KSD, StepReport

BLUE, ORANGE = "#0072B2", "#D55E00"
Closure = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Plane:
    """The loss [points, points] over two axes [points], of which the second gives the rows."""

    axes: tuple[Tensor, Tensor]
    names: tuple[str, str]
    end: tuple[float, float]
    loss: Tensor
    title: str


def plane(optimizer: KSD, closure: Closure, report: StepReport, points: int = 31, reach: float = 1.5) -> Plane:
    """The loss around the end of the step that was just taken; the parameters are put back bit for bit.

    Args:
        optimizer: whose last step is looked at, without sets and weight decay.
        closure: that of the step.
        report: of the step.
        points: along each axis; odd, so that the end of the step is one of them.
        reach: of the picture from the end of the step, in lengths of the step along each axis.

    Raises:
        ValueError: the step did not move, or the report is not that of the last step.
    """
    c, V = report.coefficients, optimizer.basis()
    if not any(c) or len(c) != len(V):
        raise ValueError(
            f"Step {report.iteration} did not move ({report.stop_reason.value}), or was not the last one. Look at a "
            "step that moved, before the next is taken: --max-steps makes the run shorter."
        )
    first, second = sorted(range(len(c)), key=lambda k: -abs(c[k]))[:2]
    # The narrower axis shows at least a fiftieth of the wider one.
    widths = [reach * max(abs(c[k]), 0.02 * abs(c[first])) for k in (first, second)]
    x, y = (width * torch.linspace(-1, 1, points, dtype=V.dtype) for width in widths)
    params = optimizer.trained()
    theta = torch.cat([p.detach().reshape(-1) for p in params])
    loss = torch.full((points, points), math.nan, dtype=V.dtype)
    try:
        for j in range(points):
            for i in range(points):
                move(params, theta + x[i] * V[first] + y[j] * V[second])
                loss[j, i] = closure()[0].detach()
    finally:
        move(params, theta)
    share = math.hypot(c[first], c[second]) / math.hypot(*c)
    return Plane(
        (c[first] + x, c[second] + y),
        (name(first, report), name(second, report)),
        (c[first], c[second]),
        loss,
        f"step {report.iteration}: the plane holds {share:.0%} of its length",
    )


def move(params: list[Tensor], theta: Tensor) -> None:
    """The parameters ← a vector [P] of all of them."""
    with torch.no_grad():
        for p, part in zip(params, torch.split(theta, [p.numel() for p in params]), strict=True):
            p.copy_(part.view_as(p))


def name(k: int, report: StepReport) -> str:
    """Basis vector k: the Krylov vectors come first, then the previous step."""
    return f"along Krylov vector {k + 1}" if k < report.krylov_dim else "along the previous step"


def draw(ax: Axes, found: Plane) -> None:
    """Contours on a logarithmic scale, the step's start and its end."""
    finite = found.loss[found.loss.isfinite()]
    low, high = float(finite.min()), float(finite.max())
    levels = [low, *(low * (high / low) ** (i / 24) for i in range(1, 24)), high]
    filled = ax.contourf(*found.axes, found.loss, levels=levels, norm=LogNorm(low, high))
    bar = ax.figure.colorbar(filled, ax=ax, label="loss")
    bar.set_ticks(levels[::6], labels=[f"{level:.2g}" for level in levels[::6]])
    bar.minorticks_off()
    ax.plot([0, found.end[0]], [0, found.end[1]], color="white")
    ax.plot(0, 0, "o", color=BLUE, markeredgecolor="white", markersize=9, label="start (projected)", linestyle="none")
    ax.plot(*found.end, "*", color=ORANGE, markeredgecolor="white", markersize=15, label="end", linestyle="none")
    ax.set_title(found.title, fontsize=10)
    ax.set(xlabel=found.names[0], ylabel=found.names[1])
    ax.legend(loc="best")


def main() -> None:
    """Train, look, draw."""
    parser = argparse.ArgumentParser(description="The loss in a plane around three steps of KSD.")
    parser.add_argument("--max-steps", type=int, default=30, help="how many steps to take (%(default)s)")
    parser.add_argument("--points", type=int, default=41, help="along each axis, an odd number (%(default)s)")
    parser.add_argument("--out", default="plane.png")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    x = torch.linspace(-1, 1, 100, dtype=torch.float64)[:, None]

    def closure() -> tuple[Tensor, Tensor]:
        r = model(x) - torch.sin(4 * x)
        return r.square().mean(), r  # the loss, and the residuals it was computed from

    optimizer = KSD(model.parameters())
    planes = []
    for step in range(given.max_steps):
        report = optimizer.step(closure)
        print(report, flush=True)
        if step in (0, 2, given.max_steps - 1):
            planes.append(plane(optimizer, closure, report, given.points))

    figure, panels = plt.subplots(1, len(planes), figsize=(4.6 * len(planes), 3.8), layout="constrained", squeeze=False)
    for ax, found in zip(panels[0], planes, strict=True):
        draw(ax, found)
    figure.savefig(given.out, dpi=120)
    lowest, end = float(planes[-1].loss.min()), report.search_loss_after
    print(
        f"loss in a plane: step {report.iteration} ended at {end:.3g}, and the lowest of {given.points}² points around "
        f"it has {lowest:.3g}, {1 - lowest / end:.1%} less."
    )


if __name__ == "__main__":
    main()
