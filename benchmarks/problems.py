"""The networks that are measured. Times do not depend on the data, so inputs are drawn at random."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent.distributed import SingleProcess
from krylov_descent.objective.objective import Objective
from krylov_descent.samples.subsets import Microbatch
from krylov_descent.vectors.parameters import ParameterVector


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A model, a loss that averages over samples, and one batch."""

    name: str
    model: nn.Module
    loss: nn.Module
    x: Tensor
    y: Tensor

    def closure(self, batch: Any) -> tuple[Tensor, Tensor]:
        """What KSD is given."""
        x, y = batch
        z = self.model(x)
        return self.loss(z, y), z

    @property
    def microbatch(self) -> Microbatch:
        """The whole batch."""
        return Microbatch((self.x, self.y), len(self.x))

    def microbatches(self, count: int) -> list[Microbatch]:
        """The batch in equal parts."""
        parts = zip(self.x.chunk(count), self.y.chunk(count), strict=True)
        return [Microbatch((x, y), len(x)) for x, y in parts]

    def objective(self) -> Objective:
        """The closure as KSD sees it."""
        parameters = ParameterVector([{"params": list(self.model.parameters()), "weight_decay": 0.0}])
        return Objective(self.closure, parameters, SingleProcess())


def dense(widths: tuple[int, ...], linear: tuple[int, ...] = ()) -> nn.Sequential:
    """Sigmoid layers; those of the indices in ``linear`` and the last are without."""
    layers: list[nn.Module] = []
    for i, (m, n) in enumerate(itertools.pairwise(widths)):
        layers.append(nn.Linear(m, n))
        if i not in linear and i < len(widths) - 2:
            layers.append(nn.Sigmoid())
    return nn.Sequential(*layers)


AUTOENCODER = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
CURVES = (784, 400, 200, 100, 50, 25, 6, 25, 50, 100, 200, 400, 784)
CLASSIFIER = (784, 500, 500, 2000, 10)


def autoencoder(name: str, widths: tuple[int, ...], n: int) -> Problem:
    """A deep autoencoder with a linear code, on pixels in [0, 1]."""
    x = torch.rand(n, widths[0])
    return Problem(name, dense(widths, linear=(len(widths) // 2 - 1,)), nn.BCEWithLogitsLoss(), x, x)


def classifier(n: int) -> Problem:
    """The paper's MNIST classifier."""
    return Problem(
        "784-500-500-2000-10", dense(CLASSIFIER), nn.CrossEntropyLoss(), torch.rand(n, 784), torch.randint(10, (n,))
    )


def convolutional(n: int) -> Problem:
    """A LeNet-like network on 28 × 28 images."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip
    return Problem("small conv net", model, nn.CrossEntropyLoss(), torch.rand(n, 1, 28, 28), torch.randint(10, (n,)))


class LastOfLSTM(nn.Module):
    """Classifies a sequence by the last state of one LSTM layer."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[n, T, inputs] → [n, classes]."""
        z: Tensor = self.head(self.lstm(x)[0][:, -1])
        return z


def lstm(n: int) -> Problem:
    """An LSTM that reads 28 rows of 28 pixels."""
    return Problem(
        "LSTM", LastOfLSTM(28, 128, 10), nn.CrossEntropyLoss(), torch.rand(n, 28, 28), torch.randint(10, (n,))
    )


class Transformer(nn.Module):
    """Next-token logits from four pre-norm encoder layers with a causal mask."""

    def __init__(self, tokens: int, length: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, x: Tensor) -> Tensor:
        """[n, T] → [n, tokens, T]."""
        h = self.encoder(self.embedding(x) + self.position, mask=self.mask, is_causal=True)
        z: Tensor = self.head(h)
        return z.transpose(1, 2)


def transformer(n: int) -> Problem:
    """Four layers of width 128 on 64 tokens of 64 kinds."""
    x = torch.randint(64, (n, 65))
    return Problem("4-layer transformer", Transformer(64, 64, 128), nn.CrossEntropyLoss(), x[:, :-1], x[:, 1:])
