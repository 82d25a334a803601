"""Solve PINA's Poisson problem on the unit square with GaussNewtonFlow or KSD in PINA's Trainer.

    python examples/pina_poisson.py --seconds 25 --out poisson.png

Δu = f with u = 0 on the boundary; the exact solution is -sin(πx) sin(πy). Needs
``pip install 'krylov-descent[pina,plot]'``.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import time

import matplotlib.pyplot as plt
import torch
from pina import LabelTensor, Trainer
from pina.model import FeedForward
from pina.optim import TorchOptimizer
from pina.problem.zoo import Poisson2DSquareProblem
from pina.weighting import ScalarWeighting

from krylov_descent import KSD, GaussNewtonFlow, StepReport, plot
from krylov_descent.integrations.pina import KSDPINN


def main() -> None:
    """Train, print and draw."""
    parser = argparse.ArgumentParser(description="PINA's Poisson problem with GaussNewtonFlow or KSD.")
    parser.add_argument("--out", default="pina_poisson.png", help="the picture (%(default)s)")
    parser.add_argument("--seconds", type=float, default=14, help="of the CPU (%(default)s)")
    parser.add_argument("--epochs", type=int, default=10_000, help="steps, at most (%(default)s)")
    parser.add_argument("--method", choices=["ksd", "flow"], default="flow", help="(%(default)s)")
    parser.add_argument("--krylov-dim", type=int, default=50, help="K of --method ksd (%(default)s)")
    parser.add_argument("--precision", choices=["float32", "float64"], default="float64", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of points and start (%(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)  # more do not make so small a network faster, and CPU time is then that of one core
    torch.set_default_dtype(getattr(torch, given.precision))
    torch.manual_seed(given.seed)

    problem = Poisson2DSquareProblem()
    problem.discretise_domain(20, "grid", domains="D")  # a side
    problem.discretise_domain(80, "random", domains="boundary")
    model = FeedForward(2, 1, inner_size=24, n_layers=2, func=torch.nn.Tanh)
    optimizer = TorchOptimizer(GaussNewtonFlow)
    if given.method == "ksd":
        optimizer = TorchOptimizer(KSD, krylov_dim=given.krylov_dim)
    solver = KSDPINN(problem, model, optimizer=optimizer, weighting=ScalarWeighting({"D": 1.0, "boundary": 100.0}))
    trainer = Trainer(
        solver,
        max_epochs=given.epochs,
        accelerator="cpu",
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
    )
    reports: list[StepReport] = []

    def note(report: StepReport) -> None:
        reports.append(report)
        trainer.should_stop = time.process_time() - start > given.seconds

    solver.on_report = note
    start = time.process_time()
    trainer.train()
    seconds = time.process_time() - start

    side = torch.linspace(0, 1, 81)
    points = LabelTensor(torch.cartesian_prod(side, side), ["x", "y"])
    with torch.no_grad():
        u, exact = (v.as_subclass(torch.Tensor).reshape(81, 81).T for v in (solver(points), problem.solution(points)))
    size = float((u - exact).norm() / exact.norm())
    reached = f"loss {reports[-1].search_loss_after:.2e}   relative L2 error {size:.2e}"
    print(f"{seconds:.1f} s   {len(reports)} steps   {reached}")

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for ax, values, title in (
        (axes[0], u, f"u by {optimizer.optimizer_class.__name__}"),
        (axes[1], u - exact, f"u − exact: {size:.1e} in L2"),
    ):
        top = float(values.abs().max())
        image = ax.imshow(values, origin="lower", extent=(0, 1, 0, 1), cmap="RdBu_r", vmin=-top, vmax=top)
        figure.colorbar(image, ax=ax)
        ax.set_title(title)
    plot.convergence(reports, axes[2])
    figure.savefig(given.out, dpi=130)
    print(f"picture: {given.out}")


if __name__ == "__main__":
    main()
