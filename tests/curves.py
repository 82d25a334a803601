"""Generated CURVES images and the deep autoencoder that is trained on them (Hinton & Salakhutdinov 2006)."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


def curves(n: int, seed: int) -> Tensor:
    """[n, 784]: parabolas through three random points at t = 0, ½, 1, blurred, rounded to 8 bits."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    through = torch.stack([2 * (t - 0.5) * (t - 1), -4 * t * (t - 1), 2 * t * (t - 0.5)])
    kept: list[Tensor] = []
    while sum(map(len, kept)) < n:
        points = 5 + 17 * torch.rand(n, 3, 2, dtype=torch.float64, generator=generator)
        paths = torch.einsum("kt,nkd->ntd", through, points)
        inside = ((paths >= 2) & (paths <= 25)).all(2).all(1)
        kept.append(paths[inside])
    paths = torch.cat(kept)[:n]
    axis = torch.arange(28, dtype=torch.float64)
    grid = torch.cartesian_prod(axis, axis)
    images = []
    for part in torch.split(paths, 100):
        distance = torch.cdist(grid.expand(len(part), -1, -1), part).amin(2)
        images.append(torch.round(255 * torch.sigmoid((1 - distance) / 0.426)) / 255)
    return torch.cat(images).float()


def autoencoder(sizes: tuple[int, ...], seed: int) -> nn.Sequential:
    """Sigmoid layers with a linear code, mirrored; 15 incoming N(0,1) weights per unit (Martens 2010)."""
    generator = torch.Generator().manual_seed(seed)
    widths = [*sizes, *reversed(sizes[:-1])]
    layers: list[nn.Module] = []
    for i, (m, n) in enumerate(itertools.pairwise(widths)):
        layer = nn.Linear(m, n)
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.zero_()
            for row in layer.weight:
                chosen = torch.randperm(m, generator=generator)[:15]
                row[chosen] = torch.randn(len(chosen), generator=generator)
        layers.append(layer)
        if i not in (len(sizes) - 2, len(widths) - 2):
            layers.append(nn.Sigmoid())
    return nn.Sequential(*layers)


def cross_entropy(logits: Tensor, x: Tensor) -> Tensor:
    """Summed over pixels, averaged over images."""
    return F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
