"""Data and losses of random problems: well scaled or not, smooth or not, bounded or not, defined everywhere or not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from reliability.models import FEATURES

if TYPE_CHECKING:
    from reliability.recipe import Problem


def data_of(problem: Problem) -> tuple[Tensor, Tensor]:
    """Inputs and targets, from the global generator."""
    n, dtype = problem.samples, getattr(torch, problem.dtype.split()[0])
    x = torch.randn(n, FEATURES, dtype=torch.float64)
    if problem.condition_exponent:
        x = x @ _conditioned(FEATURES, problem.condition_exponent)
    if problem.inputs == "constant":
        x = x[:1].expand(x.shape).clone()
    elif problem.inputs == "zeros":
        x.zero_()
    elif problem.inputs == "equal columns":
        x = x[:, :1].expand(x.shape).clone()
    elif problem.inputs == "whole numbers":
        x = x.round()
    elif problem.inputs == "all nan":
        x.fill_(math.nan)
    elif problem.inputs in ("nan", "inf"):
        x.view(-1)[-1] = float(problem.inputs)
    return (x * 10.0**problem.input_exponent).to(dtype), _targets(problem, x, dtype)


def _conditioned(size: int, exponent: int) -> Tensor:
    """A matrix with singular values from 1 down to 10^-exponent."""
    Q, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))
    conditioned: Tensor = Q * torch.logspace(0, -exponent, size, dtype=torch.float64) @ Q.T
    return conditioned


def _targets(problem: Problem, x: Tensor, dtype: torch.dtype) -> Tensor:
    n, outputs, kind = problem.samples, problem.outputs, problem.targets
    if problem.loss in _LABELLED:
        labels = torch.randint(0, outputs, (n,))
        if kind in ("constant", "zeros"):
            labels.zero_()
        elif kind in ("too large", "negative"):
            labels[-1] = outputs if kind == "too large" else -1
        if problem.loss == "ignored labels":
            labels[::4] = -100
        return labels
    y = torch.randn(n, outputs, dtype=torch.float64)
    if problem.loss == "bce":
        y = (y > 0).double()
        if kind in ("too large", "negative"):
            y.view(-1)[-1] = 2.0 if kind == "too large" else -1.0
    if kind == "reachable":  # a linear model finds them exactly
        y = x @ torch.tensor([[1.0], [-2.0], [3.0], [0.0], [1.0], [-1.0]], dtype=torch.float64).expand(-1, outputs)
    elif kind == "constant":
        y = y[:1].expand(y.shape).clone()
    elif kind == "zeros":
        y.zero_()
    elif kind in ("nan", "inf"):
        y.view(-1)[-1] = float(kind)
    scale = 1.0 if problem.loss == "bce" else 10.0**problem.target_exponent
    return (y * scale).to(dtype)


_LABELLED = ("cross entropy", "smoothed labels", "ignored labels")


def _norms(z: Tensor, y: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(z - y, dim=1)
    return norms.mean()


_PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squared": lambda z, y: (z - y).square().mean(),
    "cross entropy": F.cross_entropy,
    "smoothed labels": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "bce": F.binary_cross_entropy_with_logits,
    "kl": lambda z, y: F.kl_div(F.log_softmax(z, 1), y.softmax(1), reduction="batchmean"),
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "log cosh": lambda z, y: torch.log(torch.cosh(z - y)).mean(),  # overflows
    "poisson": lambda z, y: (torch.exp(z) - y * z).mean(),
    "gaussian nll": lambda z, y: F.gaussian_nll_loss(z[:, :1], y[:, :1], z[:, -1:].exp() + 1e-3),
    "quartic": lambda z, y: (z - y).pow(4).mean(),
    "linear": lambda z, y: z.mean(),  # no minimum
    "concave": lambda z, y: -z.square().mean(),
    "waves": lambda z, y: torch.sin(3 * z).mean() + 0.1 * z.square().mean(),
    "constant": lambda z, y: (0 * z).mean() + 1,
    "coupled": lambda z, y: (z - z.mean(0) - y).square().mean(),
    "contrastive": lambda z, y: F.cross_entropy(z @ z.T, torch.arange(len(z))),
    "sum": lambda z, y: (z - y).square().sum(),
}
#: Losses that are not finite everywhere, or infinitely steep where they are best.
_PARTIAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "log": lambda z, y: (z - torch.log(z)).mean(),  # NaN below zero
    "log of a norm": lambda z, y: torch.log(z.abs().sum(1)).mean(),  # −∞ at zero
    "root": lambda z, y: (z - y).abs().sqrt().mean(),
    "rmse": lambda z, y: (z - y).square().mean().sqrt(),
    "norms": _norms,
    "root of a difference": lambda z, y: torch.sqrt(z - y.min() + 1).mean() + 0.1 * z.square().mean(),
    "wall": lambda z, y: (z - y).square().mean() / (z.abs().max() < 1.5),  # infinite beyond it
    "NaN beyond": lambda z, y: (z - y).square().mean() + 0 * torch.sqrt(2 - z).sum(),
    "arcsine": lambda z, y: torch.asin(z / 4).square().mean() + (z - y).square().mean(),
    "entropy": lambda z, y: (z * torch.log(z) - y * z).mean(),
    "barrier": lambda z, y: (z - y).square().mean() - 0.01 * torch.log(1 + z).mean(),
}
LOSSES = (*_PLAIN, *_PARTIAL, "masked", "masked NaN", "ignored labels", "two outputs")
LANDSCAPES = tuple(_PARTIAL)


def evaluate(problem: Problem, model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> tuple[Any, ...]:
    """What a right closure returns."""
    z = model(x)
    if problem.dtype == "bfloat16":  # the loss of a network in half precision is best computed in float32
        z, y = z.float(), y.float() if y.is_floating_point() else y
    if problem.loss == "masked":
        mask = (y > 0).to(z.dtype)
        return ((z - y).square() * mask).sum() / mask.sum(), z, mask.sum()
    if problem.loss == "masked NaN":
        known = ~y.isnan()
        r = torch.where(known, z - y.nan_to_num(), 0)
        return r.square().sum() / known.sum().clamp(min=1), z, known.sum()
    if problem.loss == "ignored labels":
        return F.cross_entropy(z, y), z, (y != -100).sum()
    if problem.loss == "two outputs":
        first, second = z - y, torch.sin(z)
        return first.square().mean() + 0.5 * second.square().mean(), {"data": first, "wave": second}
    return (_PLAIN | _PARTIAL)[problem.loss](z, y), z
