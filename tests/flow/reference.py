"""The sketched Gauss–Newton flow, slow and plain: one gradient per residual and dense solves in float64.

Letters: θ [P] parameters, r [n] outputs, f loss, a function of r, and ½Σcθ² for weight decay c [P], S rows that are
drawn with chances π, J [m, P] = π^-½ (∂²f/∂r²)^½ ∂r/∂θ of rows S, ρ [m] with Jᵀρ the gradient that they stand for, λ
damping, φ direction, μ momentum, η length of a step. Outputs have one entry per row, and ∂²f/∂r² is diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

Closure = Callable[[], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Carried:
    """From step to step, by the names of ``flow.step.Adaptation``."""

    flow_damping: float
    step_fraction: float
    momentum_scale: float
    lm_damping: float
    failure_rate: float = 0.0
    rows: float = 0.0


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows S [m] of all outputs, one after the other, and how many times as heavy as in f each is, 1/π [m]."""

    S: Tensor
    weight: Tensor


@dataclass(frozen=True, eq=False)
class Dense:
    """f, g [P], and of all rows r [n], √(∂²f/∂r²) [n], J [n, P] and ρ [n]."""

    f: float
    g: Tensor
    r: Tensor
    root: Tensor
    J: Tensor
    rho: Tensor


class Tried(NamedTuple):
    """A step of length η, f there, the step, and after how many corrections it settled, if it did."""

    eta: float
    f: float
    d: Tensor
    settled: int | None


class DenseFlow:
    """The flow from where the parameters of a closure are; moves them.

    Args:
        params: θ.
        closure: → f without decay, and r.
        rows: m that is asked for.
        momentum: μ.
        decay: c of each parameter.
        corrected: the most corrections of a step.

    Attributes:
        kinds: of all steps: "flow" or "damped".
        settled: after how many corrections each step settled; None if it did not.
        carried: to the next step.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        closure: Closure,
        rows: int = 400,
        momentum: float = 0.9,
        decay: Sequence[float] | None = None,
        corrected: int = 5,
    ) -> None:
        self.params, self.closure, self.momentum, self.corrected = list(params), closure, momentum, corrected
        each = [0.0] * len(self.params) if decay is None else decay
        self.c = torch.cat([p.new_full((p.numel(),), c) for p, c in zip(self.params, each, strict=True)])
        self.first_rows, self.most_rows = rows, max(rows, min(4 * rows, len(self.c)))
        self.last: Tensor | None = None  # the last step
        self.carried: Carried | None = None
        self.kinds: list[str] = []
        self.settled: list[int | None] = []

    @property
    def theta(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.params])

    def move(self, theta: Tensor) -> None:
        with torch.no_grad():
            at = 0
            for p in self.params:
                p.copy_(theta[at : at + p.numel()].reshape(p.shape))
                at += p.numel()

    def outputs(self) -> tuple[Tensor, list[Tensor]]:
        loss, z = self.closure()
        return loss, list(z) if isinstance(z, tuple) else [z]

    def loss(self, theta: Tensor) -> float:
        """f there; infinite where it is not finite."""
        here = self.theta
        self.move(theta)
        f = float(self.outputs()[0].detach()) + float((self.c * theta.square()).sum()) / 2
        self.move(here)
        return f if math.isfinite(f) else math.inf

    def read(self, theta: Tensor) -> Tensor:
        """r there."""
        here = self.theta
        self.move(theta)
        r = torch.cat([z.detach().reshape(-1) for z in self.outputs()[1]])
        self.move(here)
        return r

    def gradient(self, y: Tensor) -> Tensor:
        found = torch.autograd.grad(y, self.params, retain_graph=True, allow_unused=True, materialize_grads=True)
        return torch.cat([x.reshape(-1) for x in found])

    def dense(self) -> Dense:
        loss, outputs = self.outputs()
        slopes, roots = [], []
        for z, dz in zip(outputs, torch.autograd.grad(loss, outputs, create_graph=True), strict=True):
            for i, d in enumerate(dz.reshape(-1)):
                slopes.append(d.detach())
                roots.append(torch.autograd.grad(d, z, retain_graph=True)[0].reshape(-1)[i].sqrt())
        slope, root = torch.stack(slopes), torch.stack(roots)
        J = torch.stack([self.gradient(e) for z in outputs for e in z.reshape(-1)])
        r = torch.cat([z.detach().reshape(-1) for z in outputs])
        g = self.gradient(loss) + self.c * self.theta
        return Dense(self.loss(self.theta), g, r, root, root[:, None] * J, slope / root)

    def rows_wanted(self) -> int:
        """m of the next step."""
        return max(self.first_rows, int(self.carried.rows) if self.carried else 0)

    def step(self, draw: Callable[[Dense], Rows] | None = None) -> None:
        """One step with the rows that ``draw`` gives; None for all of them."""
        here, at = self.theta, self.dense()
        drawn = Rows(torch.arange(len(at.r)), torch.ones_like(at.r)) if draw is None else draw(at)
        S, heavy = drawn.S, drawn.weight.sqrt()
        J, rho, u = heavy[:, None] * at.J[S], heavy * at.rho[S], heavy * at.root[S]
        whole = len(S) == len(at.r)
        now, longest = self.begin(whole, float(J.square().sum()))

        carried = torch.zeros_like(here) if self.last is None else self.momentum * now.momentum_scale * self.last
        if float(carried.norm()) > float(here.norm()):
            carried *= here.norm() / carried.norm()
        phi = self.minimum(J, rho, carried, here, now.flow_damping)
        far = float(phi.norm()) > float(here.norm())
        h = now.step_fraction

        def tried(eta: float, near: Tried | None = None) -> Tried:
            d = eta * phi
            if near is not None:  # what corrects a step grows with its square
                d = d + (near.d - near.eta * phi) * (eta / near.eta) ** 2
            seen, off = [(self.loss(here + d), d)], [math.inf]
            while True:
                e = u * (self.read(here + d) - at.r)[S] - eta * (J @ phi)
                off.append(float(e.norm()))
                if off[-1] < 0.1 * max(float((rho + eta * (J @ phi)).norm()), 0.1 * float(rho.norm())):
                    return Tried(eta, *min(seen, key=lambda x: x[0]), len(seen) - 1)
                if len(seen) == self.corrected + 1 or not off[-1] <= 0.7 * off[-2]:
                    break
                d = d + self.minimum(J, e, torch.zeros_like(here), torch.zeros_like(here), now.flow_damping)
                if not float((d - eta * phi).norm()) <= float((eta * phi).norm()):
                    break
                seen.append((self.loss(here + d), d))
            return Tried(eta, *min(seen, key=lambda x: x[0]), None)

        lengths = [h * 2.0**k for k in range(5, -6, -1) if 2.0**-14 <= h * 2.0**k <= longest]
        step = self.best(tried, lengths, h, at.f)
        self.settled.append(step.settled)
        if step.f < at.f:
            eta = step.eta
            share = -float(rho @ J @ phi / (rho @ rho))
            wanted = (2.0**-6, 2.0**-4) if share >= 0.9 else (2.0**-8, 0.0)
            factor = 2.0 if eta < wanted[0] else 0.5 if eta > wanted[1] else 1.0
            left = rho + eta * (J @ phi)
            promised = 1 - float(left @ left / (rho @ rho))
            confirmed = (at.f - step.f) / (promised * at.f) if promised > 0 else 1.0
            if confirmed < 0.25:
                factor = 2.0
            if far and eta < 0.5:
                factor = 4.0
            after = replace(
                now,
                flow_damping=factor * now.flow_damping,
                step_fraction=eta,
                momentum_scale=max(0.0, 1 / eta - 1),
                failure_rate=0.9 * now.failure_rate + 0.1 * (confirmed < 0.25),
            )
            return self.end("flow", here, step.d, after)
        dampings = [now.lm_damping * 3.0**k for k in range(-4, 5)]
        identity = torch.eye(len(here), dtype=here.dtype)
        steps = [-torch.linalg.solve(J.T @ J + lam * identity, at.g) for lam in dampings]
        i, lowest = self.lowest(here, steps, 4)
        if not lowest < at.f:
            raise AssertionError("no damped step is better than staying")
        after = replace(
            now,
            step_fraction=max(h / 2, 2.0**-14),
            momentum_scale=0.0,
            failure_rate=0.9 * now.failure_rate + 0.1,
            lm_damping=dampings[i],
        )
        return self.end("damped", here, steps[i], after)

    def best(self, tried: Callable[..., Tried], lengths: Sequence[float], h: float, f: float) -> Tried:
        """From h: longer steps as long as they are lower and settle quickly, or else shorter ones, or else twice h."""
        first = best = tried(h)
        if first.settled is not None and first.settled <= 3:
            for eta in sorted(x for x in lengths if x > h):
                longer = tried(eta, best)
                if longer.f >= best.f:
                    return best
                best = longer
                if best.settled is None or best.settled > 3:
                    return best
            return best
        if first.settled is not None and first.f < f:
            return first
        for eta in sorted((x for x in lengths if x < h), reverse=True):
            shorter = tried(eta, best if math.isfinite(best.f) else None)
            if math.isfinite(best.f) and shorter.f >= best.f:
                break
            best = shorter
        if best is first and 2 * h in lengths:
            longer = tried(2 * h, best)
            best = longer if longer.f < best.f else best
        return best

    def minimum(self, J: Tensor, rho: Tensor, carried: Tensor, pulled: Tensor, lam: float) -> Tensor:
        """argmin over φ of ‖Jφ + ρ‖² + λ‖φ − carried‖² + Σc(φ + pulled)², of its rows one under the other."""
        identity, c = torch.eye(len(carried), dtype=carried.dtype), self.c.sqrt()
        A = torch.cat([J, lam**0.5 * identity, c[:, None] * identity])
        b = torch.cat([-rho, lam**0.5 * carried, -c * pulled])
        found: Tensor = torch.linalg.lstsq(A, b[:, None], driver="gels").solution[:, 0]
        return found

    def lowest(self, here: Tensor, steps: Sequence[Tensor], first: int) -> tuple[int, float]:
        """Which step is the lowest, and f there: shorter ones than the first as long as f falls, or else longer ones.

        Shorter ones, too, as long as f is infinite.
        """
        f = [self.loss(here + d) for d in steps]
        i = first
        while i + 1 < len(f) and (f[i + 1] < f[i] or math.isinf(f[i])):
            i += 1
        if i == first:
            while i > 0 and f[i - 1] < f[i]:
                i -= 1
        return i, f[i]

    def begin(self, whole: bool, trace: float) -> tuple[Carried, float]:
        """What is carried to this step within its bounds, and the longest η."""
        longest = 2.0 if whole else 0.5
        least = 1e-14 if whole else 1e-18
        now = self.carried
        if now is None:
            now = Carried(1e-6 * trace, 0.5, 0.0, 1e-3 * trace)
        else:
            length = now.step_fraction
            while length > longest:
                length /= 2
            damping = min(max(now.flow_damping, least * trace), 1e-2 * trace)
            now = replace(
                now,
                flow_damping=damping,
                lm_damping=min(max(now.lm_damping, 1e-12 * trace), 100 * trace),
                step_fraction=length,
            )
        if not whole and now.failure_rate > 0.25 and self.rows_wanted() < self.most_rows:
            now = replace(now, failure_rate=0.0, rows=min(round(1.5 * self.rows_wanted()), self.most_rows))
        return now, longest

    def end(self, kind: str, here: Tensor, d: Tensor, after: Carried) -> None:
        self.kinds.append(kind)
        self.carried, self.last = after, d
        self.move(here + d)


def chances(size: Tensor, s: int) -> Tensor:
    """π [n] of s rows, by how much of f hangs on each: s/n, or more of those far above the mean; at most 1.

    What rows would have beyond 1 is for the others, in proportion to what they have.
    """
    share = [max(1 / len(size), float(x) / (4 * float(size.sum()))) for x in size]
    sure: set[int] = set()
    while True:
        others = sum(x for i, x in enumerate(share) if i not in sure)
        pi = [1.0 if i in sure else x * (s - len(sure)) / others for i, x in enumerate(share)]
        if max(pi) <= 1:
            return torch.tensor(pi, dtype=size.dtype)
        sure |= {i for i, x in enumerate(pi) if x > 1}
