"""The bare engine: gradient, Fisher diagonal and Algorithm 1 of a dense network, written with matrix products.

Letters: layer l maps a_l [n, in] to y_l = a_l W_lᵀ + b_l and a_{l+1} = σ(y_l), or y_l where it is linear;
δ_l = ∂loss/∂y_l, R the derivative of what follows along v. These are the fastest forms known to us: no autograd, no
copy that a matrix product does not need, cached activations for products.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.problems import Problem

WRITTEN = ("MNIST autoencoder", "CURVES autoencoder", "784-500-500-2000-10")


class HandWritten:
    """Passes over one batch of a network made by ``problems.dense``."""

    def __init__(self, problem: Problem) -> None:
        assert isinstance(problem.model, nn.Sequential)
        modules = list(problem.model)
        self.linears = [m for m in modules if isinstance(m, nn.Linear)]
        self.sigmoid = [
            i + 1 < len(modules) and isinstance(modules[i + 1], nn.Sigmoid)
            for i, m in enumerate(modules)
            if isinstance(m, nn.Linear)
        ]
        self.classes = isinstance(problem.loss, nn.CrossEntropyLoss)
        self.sizes = [p.numel() for p in problem.model.parameters()]
        self.shapes = [p.shape for p in problem.model.parameters()]

    def views(self, v: Tensor) -> list[Tensor]:
        """[P] → weights and biases in turn."""
        return [part.view(shape) for part, shape in zip(torch.split(v, self.sizes), self.shapes, strict=True)]

    @torch.no_grad()
    def forward(self, x: Tensor) -> list[Tensor]:
        """a_0 … a_L; the last are the logits."""
        a = [x]
        for layer, squashed in zip(self.linears, self.sigmoid, strict=True):
            y = torch.addmm(layer.bias, a[-1], layer.weight.T)
            a.append(y.sigmoid_() if squashed else y)
        return a

    @torch.no_grad()
    def loss_and_delta(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss and δ of the last layer."""
        if self.classes:
            logs = z.log_softmax(1)
            loss = nn.functional.nll_loss(logs, y)
            delta = logs.exp_()
            delta[torch.arange(len(z)), y] -= 1
            return loss, delta.div_(len(z))
        loss = nn.functional.binary_cross_entropy_with_logits(z, y)
        return loss, z.sigmoid().sub_(y).div_(z.numel())

    @torch.no_grad()
    def gradient(self, x: Tensor, y: Tensor, squares: Tensor | None = None) -> tuple[float, Tensor]:
        """f and its gradient; adds Σᵢ gᵢ∘gᵢ to ``squares``."""
        a = self.forward(x)
        loss, delta = self.loss_and_delta(a[-1], y)
        g = torch.empty(sum(self.sizes))
        parts = self.views(g)
        into = None if squares is None else self.views(squares)
        for i in reversed(range(len(self.linears))):
            if i < len(self.linears) - 1 and self.sigmoid[i]:
                delta = torch.ops.aten.sigmoid_backward(delta, a[i + 1])
            torch.mm(delta.T, a[i], out=parts[2 * i])
            torch.sum(delta, 0, out=parts[2 * i + 1])
            if into is not None:
                delta2 = delta * delta
                into[2 * i].addmm_(delta2.T, a[i] * a[i])
                into[2 * i + 1].add_(delta2.sum(0))
            if i:
                delta = delta @ self.linears[i].weight
        return float(loss), g

    @torch.no_grad()
    def cache(self, x: Tensor) -> Cached:
        """Everything that products on this batch have in common."""
        a = self.forward(x)
        slopes = [h * (1 - h) if squashed else None for h, squashed in zip(a[1:], self.sigmoid, strict=True)]
        p = a[-1].softmax(1) if self.classes else a[-1].sigmoid()
        return Cached(self, a, slopes, p)


class Cached:
    """Algorithm 1 on cached activations: v → Jᵀ H_L J v."""

    def __init__(self, net: HandWritten, a: list[Tensor], slopes: list[Tensor | None], p: Tensor) -> None:
        self.net, self.a, self.slopes, self.p = net, a, slopes, p
        self.curvature = None if net.classes else p * (1 - p) / p.numel()

    @torch.no_grad()
    def __call__(self, v: Tensor) -> Tensor:
        """One product."""
        parts, R = self.net.views(v), None
        for i, layer in enumerate(self.net.linears):
            r = torch.addmm(parts[2 * i + 1], self.a[i], parts[2 * i].T)
            if R is not None:
                r.addmm_(R, layer.weight.T)
            slope = self.slopes[i]
            R = r if slope is None else r.mul_(slope)
        assert R is not None
        if self.curvature is not None:
            delta = R.mul_(self.curvature)
        else:
            pR = self.p * R
            delta = pR.addcmul_(self.p, pR.sum(1, keepdim=True), value=-1).div_(len(R))
        out = torch.empty_like(v)
        into = self.net.views(out)
        for i in reversed(range(len(self.net.linears))):
            slope = self.slopes[i]
            if slope is not None:
                delta = delta * slope
            torch.mm(delta.T, self.a[i], out=into[2 * i])
            torch.sum(delta, 0, out=into[2 * i + 1])
            if i:
                delta = delta @ self.net.linears[i].weight
        return out
