"""What is minimised (means over cases) and what is reported (one figure per case)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

ANSWERED = 0.04  # largest error of a correct answer to the adding problem: Hochreiter & Schmidhuber 1997


def cross_entropy(logits: Tensor, x: Tensor) -> Tensor:
    """Of pixels in [0, 1]: summed over pixels, averaged over images."""
    return F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()


def class_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Of class numbers: averaged over cases."""
    return F.cross_entropy(logits, y)


def mean_square(z: Tensor, y: Tensor) -> Tensor:
    """Summed over outputs, averaged over cases, no ½."""
    return (z - y).square().sum(1).mean()


def squared_distance(images: Tensor, x: Tensor) -> Tensor:
    """Σ (image − x)² over pixels, no ½: the error that Hinton & Salakhutdinov and all after them report."""
    return (images - x).square().sum(1)


def squared_error(logits: Tensor, x: Tensor) -> Tensor:
    """The same, of an autoencoder that puts logits out."""
    return squared_distance(torch.sigmoid(logits), x)


def misclassified(logits: Tensor, y: Tensor) -> Tensor:
    """100 where the largest logit is not the class: the mean is in per cent."""
    return 100.0 * (logits.argmax(1) != y).float()


def next_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Of the characters that follow, in nats: averaged over places and sequences."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def mistaken(logits: Tensor, y: Tensor) -> Tensor:
    """Share of the places of a sequence where the likeliest character is not the one that follows, in per cent."""
    return 100.0 * (logits.argmax(2) != y).float().mean(1)


def missed(z: Tensor, y: Tensor) -> Tensor:
    """100 where the answer is more than 0.04 off, or not a number: the mean is in per cent."""
    return 100.0 * (~((z - y).abs() <= ANSWERED).all(1)).float()


def pca_error(train: Tensor, test: Tensor, components: int) -> float:
    """Squared error per test image that is left by PCA of the training images: a yardstick, 13.87 for MNIST at 30.

    The covariance is in float64: its smallest eigenvalues are 1e-12 of the largest, its cost nothing.
    """
    mean = train.double().mean(0)
    covariance = sum((part.double() - mean).T @ (part.double() - mean) for part in torch.split(train, 5000))
    assert isinstance(covariance, Tensor)
    basis = torch.linalg.eigh(covariance).eigenvectors[:, -components:]
    centred = test.double() - mean
    return float(squared_distance(mean + centred @ basis @ basis.T, test.double()).mean())
