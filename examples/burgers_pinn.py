"""Solve Burgers' equation with a physics-informed network: Adam first, then KSD or L-BFGS for the same seconds.

    python examples/burgers_pinn.py                # about two minutes on one core; writes burgers.png

u_t + u u_x = (0.01/π) u_xx for |x| < 1, 0 < t < 1, with u(x, 0) = −sin πx and u(±1, t) = 0: a shock forms at x = 0.
Everything is evaluated in one closure, in float64. The network is multiplied by t (1 − x²), so that initial and
boundary values hold exactly and the residual of the equation is the only loss. Seconds are CPU seconds of this process,
since other programs on the machine would change the wall clock.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import copy
import math

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn

from krylov_descent import KSD
from race import Stopwatch

VISCOSITY = 0.01 / math.pi
LOOKS = {"KSD": {"color": "#0072B2"}, "L-BFGS": {"color": "#D55E00", "linestyle": "--"}}


def exact(x: Tensor, t: Tensor) -> Tensor:
    """The solution at points [n, 1]: the formula of Cole and Hopf, by Gauss–Hermite quadrature, to 1e-8."""
    nodes, weights = (torch.from_numpy(each) for each in np.polynomial.hermite.hermgauss(100))
    y = x - torch.sqrt(4 * VISCOSITY * t) * nodes  # [n, 100]
    mass = weights * torch.exp(-torch.cos(math.pi * y) / (2 * math.pi * VISCOSITY))
    return -(torch.sin(math.pi * y) * mass).sum(1, keepdim=True) / mass.sum(1, keepdim=True)


def solution(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    """u at points [n, 1], with initial and boundary values built in."""
    u: Tensor = -torch.sin(math.pi * x) + t * (1 - x**2) * net(torch.cat([x, t], 1))
    return u


def residual(net: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    """What the equation leaves at points [n, 1] that require a gradient."""
    u = solution(net, x, t)
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    return u_t + u * u_x - VISCOSITY * u_xx


def main() -> None:
    """Train, compare, draw."""
    parser = argparse.ArgumentParser(description="Burgers' equation: KSD against L-BFGS, both after Adam.")
    parser.add_argument("--seconds", type=float, default=60, help="CPU seconds for each of the two (%(default)s)")
    parser.add_argument("--max-steps", type=int, help="end KSD after so many steps; L-BFGS gets the seconds it took")
    parser.add_argument("--adam-steps", type=int, default=300, help="before either (%(default)s)")
    parser.add_argument("--points", type=int, default=2048, help="where the equation is to hold (%(default)s)")
    parser.add_argument("--krylov-dim", type=int, default=50, help="%(default)s: more than KSD's 20 pays here")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="burgers.png")
    given = parser.parse_args()

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(given.seed)
    inner = [layer for _ in range(2) for layer in (nn.Linear(20, 20), nn.Tanh())]
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), *inner, nn.Linear(20, 1))
    x, t = torch.rand(2, given.points, 1)
    x = 2 * x - 1
    x[::2] **= 3  # every other point crowds around x = 0, where the shock will be
    x.requires_grad_(), t.requires_grad_()

    def closure() -> tuple[Tensor, Tensor]:
        r = residual(net, x, t)
        return r.square().mean(), r  # the loss, and the residuals

    def backward_closure() -> Tensor:  # for torch's own optimizers
        net.zero_grad()
        loss, _ = closure()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    # The handover: some hundred cheap steps of Adam, then KSD from where they end. Only the parameters pass over.
    adam = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(given.adam_steps):
        adam.step(backward_closure)
    optimizer = KSD(net.parameters(), krylov_dim=given.krylov_dim)

    after_adam = copy.deepcopy(net.state_dict())
    times, places = torch.linspace(0, 1, 101), torch.linspace(-1, 1, 257)
    grid_t, grid_x = torch.cartesian_prod(times, places)[:, :, None].unbind(1)
    fields, watches = {"exact": exact(grid_x, grid_t)}, {}

    watches["KSD"] = Stopwatch(lambda: closure()[0].item())
    for report in optimizer.run(closure, max_steps=given.max_steps):
        if report.iteration % 5 == 0:
            print(report, flush=True)
        if watches["KSD"].mark() >= given.seconds:
            break
    fields["KSD"] = solution(net, grid_x, grid_t).detach()

    net.load_state_dict(after_adam)
    lbfgs = torch.optim.LBFGS(
        net.parameters(), history_size=100, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
    )
    watches["L-BFGS"] = Stopwatch(lambda: closure()[0].item())
    while watches["L-BFGS"].mark() < watches["KSD"].seconds:
        lbfgs.step(backward_closure)  # type: ignore[no-untyped-call]
    fields["L-BFGS"] = solution(net, grid_x, grid_t).detach()

    errors = {name: float((fields[name] - fields["exact"]).norm() / fields["exact"].norm()) for name in watches}
    draw(given.out, times, places, {k: u.view(len(times), -1) for k, u in fields.items()}, watches, errors)
    reached = (f"{name} {errors[name]:.1e} (loss {watch.last:.1e})" for name, watch in watches.items())
    print(f"burgers: relative L2 error {', '.join(reached)}, after {watches['KSD'].seconds:.0f} CPU seconds each.")


def draw(
    out: str, t: Tensor, x: Tensor, u: dict[str, Tensor], watches: dict[str, Stopwatch], errors: dict[str, float]
) -> None:
    """The field, the loss over time, and slices against the exact solution."""
    figure, axes = plt.subplots(2, 3, figsize=(11, 6.4), layout="constrained")
    field, loss, error = axes[0]
    shown = field.pcolormesh(t.numpy(), x.numpy(), u["KSD"].T.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, rasterized=True)
    figure.colorbar(shown, ax=field)
    field.set(title="u found with KSD", xlabel="t", ylabel="x")
    for name, watch in watches.items():
        loss.semilogy(*zip(*watch.curve, strict=True), **LOOKS[name], label=name)
        at_times = (u[name] - u["exact"]).norm(dim=1) / u["exact"].norm(dim=1)
        error.semilogy(t[1:], at_times[1:], **LOOKS[name], label=f"{name}, in all {errors[name]:.1e}")
    loss.set(title="mean squared residual", xlabel="CPU seconds after Adam")
    error.set(title="relative L2 error of u at time t", xlabel="t")
    for axis, row in zip(axes[1], (25, 50, 75), strict=True):
        axis.plot(x, u["exact"][row], color="0.75", linewidth=5, label="exact")
        for name, look in LOOKS.items():
            axis.plot(x, u[name][row], **look, label=name)
        axis.set(title=f"t = {t[row]:.2f}", xlabel="x", ylim=(-1.15, 1.15))
    for axis in (loss, error, axes[1, 0]):
        axis.legend(frameon=False)
    for axis in (loss, error, *axes[1]):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
