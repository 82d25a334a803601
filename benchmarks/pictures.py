"""The pictures of docs/results/speed.md and docs/results/scale.md, from recorded results. Nothing here measures.

``python -m benchmarks picture`` reads results/benchmarks.json and draws speed.png and scale.png, light and dark.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ranks import RANKS, formula_vectors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NETWORKS = ("MNIST autoencoder", "784-500-500-2000-10", "small conv net", "LSTM", "4-layer transformer")
_STEPS = {"MNIST autoencoder, N = 60,000": "MNIST autoencoder", "CURVES autoencoder, N = 20,000": "CURVES autoencoder"}
# By name: as the picture has it, its colour, marker, and where it is written above the first row.
_OTHERS = {
    "curvlinops": ("curvlinops", "green", "s", (0.48, 0.3)),
    "BackPACK": ("BackPACK", "orange", "D", (0.66, 0.8)),
    "torch.func linearize + vjp": ("linearize", "purple", "^", (0.78, 0.3)),
    "hand-written": ("hand-written", "blue", "o", (1.18, 0.3)),
}
_K = {20: ("K = 20 (default)", "blue", "o"), 5: ("K = 5", "orange", "s")}
_SHOWN = (1, 2, 4, 8, 16, 32, 64)


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw speed.png and scale.png, each with its dark variant; returns the files."""
    from experiments.common import figures

    products, steps, ranks = (results[name]["results"] for name in ("products", "step", "ranks"))
    return [
        *figures.draw(lambda: _speed(products, steps), folder / "speed", dark=True),
        *figures.draw(lambda: _scale(ranks["vectors (formula)"]), folder / "scale", dark=True),
    ]


def _speed(products: Mapping[str, Any], steps: Mapping[str, Any]) -> Figure:
    """Our time ÷ that of each other, median and quartiles, a row for each network."""
    from experiments.common.figures import panels

    from krylov_descent.plot.style import theme

    figure, (axis,) = panels(1, 1, 5.2)
    rows = [(name, products[name]) for name in _NETWORKS]
    rows += [(said, {"hand-written": steps[name]["step ÷ bare passes"]}) for name, said in _STEPS.items()]
    heights = [-float(i) - (i >= len(_NETWORKS)) for i in range(len(rows))]  # a gap before whole steps
    axis.axvline(1, color=theme().text, linewidth=1)
    for name, (said, colour, marker, place) in _OTHERS.items():
        look = {"color": getattr(theme(), colour)}
        axis.text(*place, said, ha="center", va="bottom", fontweight="bold", **look)
        for (_, ratios), y in zip(rows, heights, strict=True):
            if isinstance(ratio := ratios.get(name), dict):
                axis.plot([ratio["low"], ratio["high"]], [y, y], linewidth=2.5, alpha=0.5, **look)
                axis.plot(ratio["median"], y, marker, markersize=10, **look)
    for y, said in ((0.65, "One Gauss–Newton product"), (heights[len(_NETWORKS)] + 0.55, "One step of KSD")):
        axis.text(-0.01, y, said, transform=axis.get_yaxis_transform(), ha="right", va="bottom", fontweight="bold")
    axis.set_yticks(heights, [said for said, _ in rows])
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.set(
        xlim=(0.27, 1.45), ylim=(heights[-1] - 0.6, 1.4), xlabel="our time ÷ their time (left of 1: we are faster)"
    )
    axis.grid(visible=False, axis="y")
    return figure


def _scale(vectors: Mapping[str, str]) -> Figure:
    """Memory of a rank over their number, measured and by the formula."""
    from experiments.common.figures import panels

    from krylov_descent.plot.style import theme

    figure, (axis,) = panels(1, 1, 4.4)
    axis.axhline(6, color=theme().text, linestyle=":", linewidth=1)
    axis.text(1, 5.6, "6 vectors that every rank holds whole", ha="left", va="top")
    for K, (said, colour, marker) in _K.items():
        look = {"color": getattr(theme(), colour)}
        axis.plot(_SHOWN, [formula_vectors(K, R) for R in _SHOWN], "--", linewidth=2, **look)
        measured = [float(vectors[f"K={K}, R={R}"].split()[0]) for R in RANKS]
        axis.plot(RANKS, measured, marker, markersize=10, **look)
        axis.annotate(said, (1, measured[0]), (14, 6), textcoords="offset points", fontweight="bold", **look)
    axis.text(0.98, 0.95, "markers: measured\ndashes: formula", transform=axis.transAxes, ha="right", va="top")
    axis.set_xscale("log", base=2)
    axis.set_xticks(_SHOWN, [str(R) for R in _SHOWN])
    axis.minorticks_off()
    axis.set_yticks([0, 10, 20, 30])
    axis.set(xlabel="number of ranks R", ylabel="memory per rank,\nvectors of P numbers", ylim=(0, 31))
    axis.grid(visible=False, axis="x")
    return figure
