"""Solve a Poisson problem on the unit square with DeepXDE: GaussNewtonFlow or KSD, and L-BFGS for as long.

    python examples/deepxde_poisson.py --out poisson.png

-Δu = f with the exact solution sin(πx) sin(2πy). Needs ``pip install 'krylov-descent[deepxde,plot]'``.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("DDE_BACKEND", "pytorch")

import deepxde as dde
import matplotlib.pyplot as plt
import numpy as np
import torch
from deepxde.optimizers.config import LBFGS_options

from krylov_descent import KSD, GaussNewtonFlow, StepReport, plot
from krylov_descent.integrations.deepxde import compile_ksd

PI = np.pi


def solution(x: Any) -> Any:
    """u at [n, 2] points."""
    return np.sin(PI * x[:, :1]) * np.sin(2 * PI * x[:, 1:])


def pde(x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Δu + f."""
    laplacian = dde.grad.hessian(u, x, i=0, j=0) + dde.grad.hessian(u, x, i=1, j=1)
    residual: torch.Tensor = laplacian + 5 * PI**2 * torch.sin(PI * x[:, :1]) * torch.sin(2 * PI * x[:, 1:])
    return residual


def problem(seed: int) -> dde.Model:
    """The same points and the same start for both."""
    dde.config.set_random_seed(seed)
    square = dde.geometry.Rectangle([0, 0], [1, 1])
    zero = dde.icbc.DirichletBC(square, lambda x: 0, lambda x, on_boundary: on_boundary)
    data = dde.data.PDE(square, pde, zero, num_domain=400, num_boundary=80)
    return dde.Model(data, dde.nn.FNN([2, 24, 24, 1], "tanh", "Glorot uniform"))


class Clock(dde.callbacks.Callback):  # type: ignore[misc]
    """Ends training when the CPU time is used up, and notes the loss after each call of the optimizer."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.noted = seconds, [(0.0, 0.0)]

    def on_train_begin(self) -> None:
        """Begin to count."""
        self.start = time.process_time()
        self.noted = [(0.0, sum(self.model.train_state.loss_train))]

    def on_epoch_end(self) -> None:
        """Note, and end."""
        elapsed = time.process_time() - self.start
        self.noted.append((elapsed, sum(self.model.train_state.loss_train)))
        if elapsed > self.seconds:
            self.model.stop_training = True


def main() -> None:
    """Train twice, print and draw."""
    parser = argparse.ArgumentParser(description="A Poisson problem with DeepXDE, beside L-BFGS in equal seconds.")
    parser.add_argument("--out", default="deepxde_poisson.png", help="the picture (%(default)s)")
    parser.add_argument("--seconds", type=float, default=14, help="for each of the two (%(default)s)")
    parser.add_argument("--krylov-dim", type=int, default=50, help="K of --method ksd (%(default)s)")
    parser.add_argument("--method", choices=["ksd", "flow"], default="flow", help="(%(default)s)")
    parser.add_argument("--precision", choices=["float32", "float64"], default="float64", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of points and start (%(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)  # more do not make so small a network faster, and CPU time is then that of one core
    dde.config.set_default_float(given.precision)

    model, reports, clock = problem(given.seed), list[StepReport](), Clock(given.seconds)
    method: dict[str, Any] = {"method": GaussNewtonFlow}
    if given.method == "ksd":
        method = {"method": KSD, "krylov_dim": given.krylov_dim}
    name = method["method"].__name__
    compile_ksd(model, loss_weights=[1, 100], on_report=reports.append, verbose=0, **method)
    model.train(iterations=10_000, display_every=1, callbacks=[clock], verbose=0)

    other, lbfgs = problem(given.seed), Clock(given.seconds)
    LBFGS_options.update(maxiter=1_000_000, iter_per_step=20, fun_per_step=25)  # short calls, to look at the clock
    other.compile("L-BFGS", loss_weights=[1, 100], verbose=0)
    other.train(callbacks=[lbfgs], verbose=0)

    side = np.linspace(0, 1, 81)
    x = np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)
    exact = solution(x)
    errors = [trained.predict(x) - exact for trained in (model, other)]
    sizes = [np.linalg.norm(e) / np.linalg.norm(exact) for e in errors]
    for whose, noted, size in ((name, clock.noted, sizes[0]), ("L-BFGS", lbfgs.noted, sizes[1])):
        seconds, loss = noted[-1]
        print(f"{whose:16s} {seconds:5.1f} s   loss {loss:.2e}   relative L2 error {size:.2e}")

    figure, axes = plt.subplots(2, 2, figsize=(11, 8.4), layout="constrained")
    for ax, values, title in (
        (axes[0, 0], model.predict(x), f"u by {name}"),
        (axes[1, 0], errors[0], f"u by {name} − exact: {sizes[0]:.1e} in L2"),
        (axes[1, 1], errors[1], f"u by L-BFGS − exact: {sizes[1]:.1e} in L2"),
    ):
        top = np.abs(values).max()
        image = ax.imshow(
            values.reshape(81, 81), origin="lower", extent=(0, 1, 0, 1), cmap="RdBu_r", vmin=-top, vmax=top
        )
        figure.colorbar(image, ax=ax)
        ax.set_title(title)
    ax = plot.convergence(reports, axes[0, 1], by="seconds", label=name)
    ax.plot(*zip(*lbfgs.noted, strict=True), color="tab:gray", label="L-BFGS of DeepXDE")
    ax.set(title=f"Training loss in {given.seconds:g} seconds each", xlabel="seconds")
    ax.legend()
    figure.savefig(given.out, dpi=130)
    print(f"picture: {given.out}")


if __name__ == "__main__":
    main()
