"""Small float64 models with closures over batches, one per kind of network that must work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True)
class Problem:
    model: nn.Module
    data: tuple[Tensor, ...]
    closure: Callable[[Any], tuple[Tensor, Any]]

    @property
    def params(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(2, 3, batch_first=True)  # type: ignore[call-arg, arg-type]
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(x)
        out: Tensor = self.head(h[:, -1])
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True, activation="gelu")
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embed(x)).mean(1))
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(5, 3)
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.sigmoid(self.encoder(x)), self.encoder.weight.t(), self.bias)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.sigmoid_(self.first(x)))
        return out


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _classifier(model: nn.Module, x: Tensor, classes: int) -> Problem:
    y = torch.randint(0, classes, (len(x),), generator=_generator(1))
    model = model.double()

    def closure(batch: Any) -> tuple[Tensor, Any]:
        logits = model(batch[0])
        return F.cross_entropy(logits, batch[1]), logits

    return Problem(model, (x, y), closure)


def mlp(n: int = 7) -> Problem:
    torch.manual_seed(0)
    x = torch.randn(n, 4, dtype=torch.float64, generator=_generator(2))
    return _classifier(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), x, 3)


def sequence_mlp(n: int = 6) -> Problem:
    torch.manual_seed(0)
    x = torch.randn(n, 3, 4, dtype=torch.float64, generator=_generator(2))
    return _classifier(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Flatten(), nn.Linear(15, 3)), x, 3)


def conv(n: int = 6) -> Problem:
    torch.manual_seed(0)
    x = torch.randn(n, 2, 7, 6, dtype=torch.float64, generator=_generator(2))
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, dilation=(1, 2)),
        nn.ELU(),
        nn.Conv2d(4, 4, 2, groups=2, padding_mode="circular", padding=1),
        nn.Softplus(),
        nn.Flatten(1),
        nn.LazyLinear(3),
    ).double()
    model(x)
    return _classifier(model, x, 3)


def conv1d3d(n: int = 5) -> Problem:
    torch.manual_seed(0)
    x = torch.randn(n, 1, 4, 4, 4, dtype=torch.float64, generator=_generator(2))
    model = nn.Sequential(
        nn.Conv3d(1, 2, 3, padding="same"),
        nn.Tanh(),
        nn.Flatten(2),
        nn.Conv1d(2, 2, 5, stride=3),
        nn.Tanh(),
        nn.Flatten(1),
    )
    return _classifier(nn.Sequential(model, nn.Linear(40, 2)), x, 2)


def recurrent(kind: type[nn.RNNBase], n: int = 6) -> Problem:
    torch.manual_seed(0)
    x = torch.randn(n, 4, 2, dtype=torch.float64, generator=_generator(2))
    return _classifier(Recurrent(kind), x, 2)


def rnn() -> Problem:
    return recurrent(nn.RNN)


def lstm() -> Problem:
    return recurrent(nn.LSTM)


def gru() -> Problem:
    return recurrent(nn.GRU)


def transformer(n: int = 5) -> Problem:
    torch.manual_seed(0)
    x = torch.randn(n, 3, 2, dtype=torch.float64, generator=_generator(2))
    return _classifier(Transformer(), x, 3)


def tied(n: int = 6) -> Problem:
    torch.manual_seed(0)
    x = torch.rand(n, 5, dtype=torch.float64, generator=_generator(2))
    model = Tied().double()

    def closure(batch: Any) -> tuple[Tensor, Any]:
        r = model(batch[0]) - batch[0]
        return r.square().sum(1).mean(), r

    return Problem(model, (x,), closure)


def in_place(n: int = 6) -> Problem:
    torch.manual_seed(0)
    x = torch.randn(n, 5, dtype=torch.float64, generator=_generator(2))
    return _classifier(InPlace(), x, 3)


def pinn(n: int = 7) -> Problem:
    """u'' + u = sin 3x: the closure differentiates the network twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    x = torch.linspace(-1, 1, n, dtype=torch.float64)[:, None]

    def closure(batch: Any) -> tuple[Tensor, Any]:
        points = batch[0].detach().requires_grad_(True)
        u = model(points)
        du = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
        d2u = torch.autograd.grad(du.sum(), points, create_graph=True)[0]
        r = d2u + u - torch.sin(3 * points)
        return r.square().mean(), r

    return Problem(model, (x,), closure)


def two_terms(n: int = 6) -> Problem:
    """A classification and a regression head, each with its own loss; outputs in a dict."""
    torch.manual_seed(0)
    body, head, tail = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)
    model = nn.ModuleList([body, head, tail]).double()
    x = torch.randn(n, 4, dtype=torch.float64, generator=_generator(2))
    y = torch.randint(0, 3, (n,), generator=_generator(1))
    t = torch.randn(n, 2, dtype=torch.float64, generator=_generator(3))

    def closure(batch: Any) -> tuple[Tensor, Any]:
        h = torch.tanh(body(batch[0]))
        logits, values = head(h), tail(h)
        loss = F.cross_entropy(logits, batch[1]) + 0.3 * (values - batch[2]).square().sum(1).mean()
        return loss, {"logits": logits, "values": values}

    return Problem(model, (x, y, t), closure)


ALL: dict[str, Callable[[], Problem]] = {
    "mlp": mlp,
    "sequence_mlp": sequence_mlp,
    "conv": conv,
    "conv1d3d": conv1d3d,
    "rnn": rnn,
    "lstm": lstm,
    "gru": gru,
    "transformer": transformer,
    "tied": tied,
    "in_place": in_place,
    "pinn": pinn,
    "two_terms": two_terms,
}
