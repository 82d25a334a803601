"""Data and losses of random problems: well scaled or not, smooth or not, bounded or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from reliability.networks import FEATURES, SHAPES
from reliability.recipe import Problem


def data_of(problem: Problem) -> tuple[Tensor, Tensor]:
    """Inputs and targets, from the global generator."""
    n, dtype = problem.samples, getattr(torch, problem.dtype.split()[0])
    shape = SHAPES.get(problem.network, FEATURES)
    x = torch.randn(n, *shape, dtype=torch.float64)
    if problem.condition_exponent:
        x = (x.flatten(1) @ _conditioned(math.prod(shape), problem.condition_exponent)).view_as(x)
    if problem.inputs == "constant":
        x = x[:1].expand(x.shape).clone()
    elif problem.inputs == "zeros":
        x.zero_()
    elif problem.inputs == "equal columns":
        x = x.flatten(1)[:, :1].expand(n, math.prod(shape)).reshape(x.shape).clone()
    elif problem.inputs == "all nan":
        x.fill_(math.nan)
    elif problem.inputs in ("nan", "inf"):
        x.view(-1)[-1] = float(problem.inputs)
    return (x * 10.0**problem.input_exponent).to(dtype), _targets(problem, dtype)


def _conditioned(size: int, exponent: int) -> Tensor:
    """A matrix with singular values from 1 down to 10^-exponent."""
    Q, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))
    conditioned: Tensor = Q * torch.logspace(0, -exponent, size, dtype=torch.float64) @ Q.T
    return conditioned


def _targets(problem: Problem, dtype: torch.dtype) -> Tensor:
    n, outputs, kind = problem.samples, problem.outputs, problem.targets
    if problem.loss == "cross entropy":
        labels = torch.randint(0, outputs, (n,))
        if kind in ("constant", "zeros"):
            labels.zero_()
        elif kind.startswith("labels"):
            labels[-1] = outputs if kind == "labels too large" else -1
        return labels
    y = torch.randn(n, outputs, dtype=torch.float64)
    if problem.loss == "bce":
        y = (y > 0).double()
        if kind.startswith("labels"):
            y.view(-1)[-1] = 2.0 if kind == "labels too large" else -1.0
    if kind == "constant":
        y = y[:1].expand(y.shape).clone()
    elif kind == "zeros":
        y.zero_()
    elif kind in ("nan", "inf"):
        y.view(-1)[-1] = float(kind)
    scale = 1.0 if problem.loss == "bce" else 10.0**problem.target_exponent
    return (y * scale).to(dtype)


_PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared": lambda z, y: (z - y).square().mean(),
    "cross entropy": F.cross_entropy,
    "bce": F.binary_cross_entropy_with_logits,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "log cosh": lambda z, y: torch.log(torch.cosh(z - y)).mean(),  # overflows
    "poisson": lambda z, y: (torch.exp(z) - y * z).mean(),
    "quartic": lambda z, y: (z - y).pow(4).mean(),
    "log": lambda z, y: (z - torch.log(z)).mean(),  # NaN below zero
    "root": lambda z, y: (z - y).abs().sqrt().mean(),  # infinitely steep where it is best
    "linear": lambda z, y: z.mean(),  # no minimum
    "concave": lambda z, y: -z.square().mean(),
    "constant": lambda z, y: (0 * z).mean() + 1,
    "coupled": lambda z, y: (z - z.mean(0) - y).square().mean(),
    "sum": lambda z, y: (z - y).square().sum(),
}


def evaluate(problem: Problem, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> tuple[Any, ...]:
    """What a right closure returns."""
    z = model(x)
    if problem.dtype == "bfloat16":  # the loss of a network in half precision is best computed in float32
        z, y = z.float(), y.float() if y.is_floating_point() else y
    if problem.loss == "masked":
        mask = (y > 0).to(z.dtype)
        return ((z - y).square() * mask).sum() / mask.sum(), z, mask.sum()
    if problem.loss == "two outputs":
        first, second = z - y, torch.sin(z)
        return first.square().mean() + 0.5 * second.square().mean(), {"data": first, "wave": second}
    return _PLAIN[problem.loss](z, y), z
