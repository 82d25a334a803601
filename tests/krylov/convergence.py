"""Convergence at equal cost, counted in gradients over the data: `python -m tests.krylov.convergence {curves,floors}`.

``curves``: KSD and its variants against torch's L-BFGS and Adam on the deep CURVES autoencoder, float32.
``floors``: the floors of the search and of D on a regression and a PINN in float64, L-BFGS beside them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from experiments.supervised.curves import curves
from experiments.supervised.losses import cross_entropy
from experiments.supervised.networks import autoencoder
from torch import Tensor, nn

from krylov_descent import KSD, PAPER, Fisher, Search, Storage, Subsets

SIZES = (784, 400, 200, 100, 50, 25, 6)
SEEDS = (0, 1, 2)


def ksd(images: Tensor, seed: int, *, budget: float, **settings: Any) -> float:
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


def lbfgs(images: Tensor, seed: int, *, budget: int, history: int) -> float:
    """Lowest loss among ``budget`` evaluations of torch's L-BFGS with its strong-Wolfe search."""
    model = autoencoder(SIZES, seed)
    return lbfgs_loss(model, lambda: cross_entropy(model(images), images), budget, history)


def adam(images: Tensor, seed: int, *, budget: int, batch_size: int, lr: float) -> float:
    """Loss on all images after ``budget`` epochs of fused Adam with a cosine schedule that ends there."""
    model = autoencoder(SIZES, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, budget * len(images) // batch_size)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(budget):
        for chosen in torch.split(torch.randperm(len(images), generator=generator), batch_size):
            optimizer.zero_grad()
            cross_entropy(model(images[chosen]), images[chosen]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
    with torch.no_grad():
        return cross_entropy(model(images), images).item()


def lbfgs_loss(model: nn.Module, loss_of: Callable[[], Tensor], budget: int, history: int) -> float:
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
        loss = loss_of()
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


def float64_loss(name: str, seed: int, *, budget: float, **settings: Any) -> float:
    model, closure = float64_problem(name, seed)
    optimizer = KSD(model.parameters(), **settings)
    spent = 0.0
    while spent < budget:
        report = optimizer.step(closure)
        spent += report.sample_gradients / (100 if name == "regression" else 102)
    return report.search_loss_after


def float64_lbfgs(name: str, seed: int, *, budget: int, history: int) -> float:
    model, closure = float64_problem(name, seed)
    return lbfgs_loss(model, lambda: closure()[0], budget, history)


def curves_rows(images: Tensor, budget: int) -> dict[str, Callable[[int], float]]:
    """Name → seed → loss."""
    variants: dict[str, dict[str, Any]] = {
        "KSD": {},
        "KSD(previous=None)": {"previous": None},
        "KSD(**PAPER)": PAPER,
        "KSD(preconditioner=Fisher(floor=1e-4))": {"preconditioner": Fisher(floor=1e-4)},
        "KSD(preconditioner=Fisher(floor=1e-3))": {"preconditioner": Fisher(floor=1e-3)},
        "KSD(preconditioner=Fisher(floor=1e-1))": {"preconditioner": Fisher(floor=1e-1)},
        "KSD(preconditioner=None)": {"preconditioner": None},
        "KSD(search=Search(tolerance=1e-4))": {"search": Search(tolerance=1e-4)},
        "KSD(search=Search(floor=1e-5))": {"search": Search(floor=1e-5)},
        "KSD(storage=Storage(dtype=torch.bfloat16))": {"storage": Storage(dtype=torch.bfloat16)},
        "KSD(curvature='hessian')": {"curvature": "hessian"},
        "KSD(curvature='fisher')": {"curvature": "fisher"},
    }
    rows: dict[str, Callable[[int], float]] = {
        name: functools.partial(ksd, images, budget=budget, **settings) for name, settings in variants.items()
    }
    for history in (10, 100):
        rows[f"L-BFGS, history {history}"] = functools.partial(lbfgs, images, budget=budget, history=history)
    for batch_size, lr in itertools.product((50, 200), (3e-4, 1e-3, 3e-3)):
        rows[f"Adam, batch {batch_size}, lr {lr:g}"] = functools.partial(
            adam, images, budget=budget, batch_size=batch_size, lr=lr
        )
    return rows


def floors_rows(budget: int) -> dict[str, Callable[[int], float]]:
    """Name → seed → loss."""
    rows: dict[str, Callable[[int], float]] = {}
    for name in ("regression", "pinn"):
        rows[f"{name}, KSD"] = functools.partial(float64_loss, name, budget=budget)
        for floor in (1e-4, 1e-6, 1e-10):
            rows[f"{name}, KSD(search=Search(floor={floor:g}))"] = functools.partial(
                float64_loss, name, budget=budget, search=Search(floor=floor)
            )
        for label, preconditioner in (("Fisher(floor=1e-4)", Fisher(floor=1e-4)), ("None", None)):
            rows[f"{name}, KSD(preconditioner={label})"] = functools.partial(
                float64_loss, name, budget=budget, preconditioner=preconditioner
            )
        for history in (10, 100):
            rows[f"{name}, L-BFGS, history {history}"] = functools.partial(
                float64_lbfgs, name, budget=budget, history=history
            )
    return rows


def main() -> None:
    """Write a table, a row per method and a column per seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", choices=("curves", "floors"))
    parser.add_argument("--budget", type=int, help="gradients over the data set (curves: 100, floors: 2500)")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--rows", default="", help="only rows whose name matches this expression")
    arguments = parser.parse_args()
    if arguments.study == "curves":
        rows = curves_rows(curves(2000, seed=0), arguments.budget or 100)
    else:
        rows = floors_rows(arguments.budget or 2500)
    for name, run in rows.items():
        if re.search(arguments.rows, name):
            sys.stdout.write(f"| `{name}` | " + " | ".join(f"{run(s):.4g}" for s in range(arguments.seeds)) + " |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
