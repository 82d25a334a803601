"""Convergence at equal cost, in gradients over the data set: `python -m tests.convergence {curves,floors} [budget]`.

``curves``: KSD and its variants against torch's L-BFGS on the deep CURVES autoencoder, float32.
``floors``: the eigenvalue floor of the search on a regression and a PINN in float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent import KSD, PAPER, Fisher, Search, Subsets
from tests.curves import autoencoder, cross_entropy, curves

SIZES = (784, 400, 200, 100, 50, 25, 6)
SEEDS = (0, 1, 2)


def ksd(images: Tensor, seed: int, budget: float, **settings: Any) -> float:
    """Loss on all images after ``budget`` gradients over them."""
    model = autoencoder(SIZES, seed)
    optimizer = KSD(model.parameters(), **settings)
    sets = Subsets((images,), batch_size=1000, seed=seed)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return cross_entropy(logits, batch[0]), logits

    spent, loss = 0.0, float("inf")
    while spent <= budget:
        report = optimizer.step(closure, sets)
        loss = report.loss  # before the step: what ``spent`` had bought
        spent += report.sample_gradients / len(images)
    return loss


def lbfgs(images: Tensor, seed: int, budget: int, history: int) -> float:
    """Lowest loss among ``budget`` evaluations of torch's L-BFGS with its strong-Wolfe search."""
    model = autoencoder(SIZES, seed)
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=budget,
        max_eval=budget,
        history_size=history,
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=0,
    )
    seen: list[float] = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), images)
        loss.backward()  # type: ignore[no-untyped-call]
        seen.append(loss.item())
        return seen[-1]

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return min(seen[:budget])


def float64_problem(name: str, seed: int) -> tuple[nn.Module, Callable[[], tuple[Tensor, Any]]]:
    """A 1-20-20-1 tanh network: sin 6x on 100 points, or u'' = −π² sin πx with its boundary values."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    x = torch.linspace(-1, 1, 100, dtype=torch.float64)[:, None]
    edge = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)

    def regression() -> tuple[Tensor, Any]:
        r = model(x) - torch.sin(6 * x)
        return r.square().mean(), r

    def pinn() -> tuple[Tensor, Any]:
        points = x.detach().requires_grad_(True)
        u = model(points)
        du = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
        d2u = torch.autograd.grad(du.sum(), points, create_graph=True)[0]
        r = d2u + torch.pi**2 * torch.sin(torch.pi * points)
        b = model(edge)
        return r.square().mean() + 10 * b.square().mean(), (r, b)

    return model, {"regression": regression, "pinn": pinn}[name]


def float64_loss(name: str, seed: int, budget: float, **settings: Any) -> float:
    model, closure = float64_problem(name, seed)
    optimizer = KSD(model.parameters(), **settings)
    spent = 0.0
    while spent < budget:
        report = optimizer.step(closure)
        spent += report.sample_gradients / (100 if name == "regression" else 102)
    return report.search_loss_after


def row(name: str, losses: list[float]) -> None:
    sys.stdout.write(f"| {name} | " + " | ".join(f"{x:.4g}" for x in losses) + " |\n")
    sys.stdout.flush()


def main(study: str, budget: int) -> None:
    """Write a table, a row per method and a column per seed."""
    if study == "curves":
        images = curves(2000, seed=0)
        row("L-BFGS, history 10", [lbfgs(images, s, budget, 10) for s in SEEDS])
        row("L-BFGS, history 100", [lbfgs(images, s, budget, 100) for s in SEEDS])
        variants: dict[str, dict[str, Any]] = {
            "KSD": {},
            "KSD, previous=None": {"previous": None},
            "KSD, PAPER": PAPER,
            "KSD, Fisher(floor=1e-4)": {"preconditioner": Fisher(floor=1e-4)},
            "KSD, Fisher(floor=1e-3)": {"preconditioner": Fisher(floor=1e-3)},
            "KSD, Fisher(floor=1e-1)": {"preconditioner": Fisher(floor=1e-1)},
            "KSD, preconditioner=None": {"preconditioner": None},
            "KSD, Search(tolerance=1e-4)": {"search": Search(tolerance=1e-4)},
            "KSD, Search(floor=1e-5)": {"search": Search(floor=1e-5)},
            "KSD, curvature='hessian'": {"curvature": "hessian"},
        }
        for name, settings in variants.items():
            row(name, [ksd(images, s, budget, **settings) for s in SEEDS])
        return
    for problem in ("regression", "pinn"):
        for floor in (1e-4, 1e-6, None, 1e-10):
            losses = [float64_loss(problem, s, budget, search=Search(floor=floor)) for s in SEEDS]
            row(f"{problem}, Search(floor={floor})", losses)
        row(f"{problem}, preconditioner=None", [float64_loss(problem, s, budget, preconditioner=None) for s in SEEDS])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else {"curves": 100, "floors": 2500}[sys.argv[1]])
