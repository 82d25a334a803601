"""Networks of every kind, built from plain values, a few parameters large."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from reliability.recipe import Problem

#: The shape of one sample for each kind of network.
SHAPES: dict[str, tuple[int, ...]] = {
    "conv1d": (2, 6),
    "conv2d": (1, 4, 5),
    "rnn": (3, 2),
    "lstm": (3, 2),
    "gru": (3, 2),
    "attention": (3, 4),
}
FEATURES = (4,)  # of all other kinds

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": nn.functional.gelu,
    "softplus": nn.functional.softplus,
    "sigmoid": torch.sigmoid,
    "elu": nn.functional.elu,
    "sine": torch.sin,
    "identity": lambda x: x,
    "exp": torch.exp,  # overflows
    "sqrt": torch.sqrt,  # NaN below zero, infinitely steep at zero
}


class Activation(nn.Module):
    """A function by its name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._function = _ACTIVATIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        """Elementwise."""
        return self._function(x)


class Recurrent(nn.Module):
    """A recurrent network whose last state is read out."""

    def __init__(self, kind: str, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        kinds: dict[str, type[nn.RNNBase]] = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
        self.cells = kinds[kind](2, width, max(1, min(depth, 2)), batch_first=True)  # type: ignore[arg-type]
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[n, t, 2] → [n, outputs]."""
        h, _ = self.cells(x)
        z: Tensor = self.head(h[:, -1])
        return z


class Attention(nn.Module):
    """Self-attention over a short sequence."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[n, t, 4] → [n, outputs]."""
        h, _ = self.attention(x, x, x, need_weights=False)
        z: Tensor = self.head(self.norm(x + h).mean(1))
        return z


class Tied(nn.Module):
    """Decoder weights that are the encoder's, transposed."""

    def __init__(self, width: int, activation: str, outputs: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(FEATURES[0], width)
        self.bias = nn.Parameter(torch.zeros(FEATURES[0]))
        self.activation = Activation(activation)
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        """[n, 4] → [n, outputs]."""
        h = self.activation(self.encoder(x))
        return nn.functional.linear(h, self.encoder.weight.T, self.bias)[:, : self.outputs]


class Twice(nn.Module):
    """One layer, applied twice."""

    def __init__(self, activation: str, outputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES[0], FEATURES[0])
        self.activation = Activation(activation)
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        """[n, 4] → [n, outputs]."""
        z: Tensor = self.layer(self.activation(self.layer(x)))
        return z[:, : self.outputs]


class Embedded(nn.Module):
    """A table that is looked up by the signs of the inputs: some rows may never be used."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.table = nn.Embedding(16, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 4] → [n, outputs]."""
        bits = (x > 0).long() * torch.tensor([1, 2, 4, 8])
        z: Tensor = self.head(torch.tanh(self.table(bits.sum(1))))
        return z


class Vector(nn.Module):
    """No layers: linear in one vector of parameters, which is as ill-conditioned as the inputs."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(FEATURES[0], outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[n, 4] → [n, outputs]."""
        return x @ self.w


class Odd(nn.Module):
    """A network with something added to its parameters or in its way."""

    def __init__(self, inner: nn.Module, oddity: str) -> None:
        super().__init__()
        self.inner = inner
        self.oddity = oddity
        if oddity in ("unused", "unused nan"):
            self.unused = nn.Parameter(torch.full((3,), math.nan if oddity == "unused nan" else 0.5))
        elif oddity in ("zero-size", "only zero-size"):
            self.empty = nn.Parameter(torch.zeros(0, 3))
        elif oddity == "0-d":
            self.scale = nn.Parameter(torch.tensor(1.25))
        elif oddity == "batch norm":
            self.norm = nn.BatchNorm1d(1)
        elif oddity == "dropout":
            self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        """As the network, changed."""
        z: Tensor = self.inner(x)
        if self.oddity in ("zero-size", "only zero-size"):
            return z + self.empty.sum()
        if self.oddity == "0-d":
            return z * self.scale
        if self.oddity == "batch norm":
            return self.norm(z.reshape(-1, 1)).view_as(z)  # type: ignore[no-any-return]
        return self.drop(z) if self.oddity == "dropout" else z


def build(problem: Problem) -> nn.Module:
    """The network of a problem, from the global generator, in its dtype and at its scale."""
    model = Odd(_plain(problem), problem.oddity)
    parameters = list(model.inner.parameters())
    with torch.no_grad():
        for p in parameters:
            p.mul_(10.0**problem.weight_exponent)
            if problem.oddity == "zero weights":
                p.zero_()
        if problem.oddity == "nan weight":
            parameters[0].view(-1)[0] = math.nan
        if problem.oddity == "transposed":
            for p in parameters:
                p.data = p.data.T.contiguous().T if p.ndim == 2 else p.data
    if problem.oddity == "frozen":
        parameters[0].requires_grad_(False)
    if problem.oddity in ("all frozen", "only zero-size"):
        for p in parameters:
            p.requires_grad_(False)
    return model.to(getattr(torch, problem.dtype.split()[0]))


def _plain(problem: Problem) -> nn.Module:
    name, width, activation, outputs = problem.network, problem.width, problem.activation, problem.outputs
    if name in ("rnn", "lstm", "gru"):
        return Recurrent(name, width, problem.depth, outputs)
    if name == "attention":
        return Attention(outputs)
    if name == "tied":
        return Tied(width, activation, outputs)
    if name == "twice":
        return Twice(activation, outputs)
    if name == "embedding":
        return Embedded(width, outputs)
    if name == "vector":
        return Vector(outputs)
    if name == "conv1d":
        return _headed(nn.Conv1d(2, width, 3, padding=1), width * 6, problem)
    if name == "conv2d":
        return _headed(nn.Conv2d(1, width, 3, stride=2, padding=1), width * 6, problem)
    sizes = [FEATURES[0], *[width] * problem.depth]
    layers: list[nn.Module] = []
    for i in range(problem.depth):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), Activation(activation)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def _headed(convolution: nn.Module, features: int, problem: Problem) -> nn.Module:
    return nn.Sequential(
        convolution, Activation(problem.activation), nn.Flatten(1), nn.Linear(features, problem.outputs)
    )
