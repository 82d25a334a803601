"""Models of every kind, a few parameters large: [n, 6] → [n, outputs]."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

FEATURES = 6

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "elu": F.elu,
    "sine": torch.sin,
    "identity": lambda x: x,
    "exp": torch.exp,  # overflows
    "sqrt": torch.sqrt,  # NaN below zero, infinitely steep at zero
}


class Layers(nn.Module):
    """Layers by name, and what is done with them: ``forward(self, x)``."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            if isinstance(layer, Tensor) and not isinstance(layer, nn.Parameter):
                self.register_buffer(name, layer)
            else:
                setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        """[n, 6] → [n, outputs]."""
        return self._forward(self, x)


class _Twice(torch.autograd.Function):
    """A sine, as users write functions; it can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return g[0] * x.cos()


class _Once(_Twice):
    """A sine that cannot."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return g[0] * x.cos()


class _Rounded(torch.autograd.Function):
    """A straight-through estimator: its gradient is another function's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        return g[0]


Build = Callable[[int, Callable[[Tensor], Tensor], int], nn.Module]  # width, activation, outputs


def _headed(body: Callable[[Any, Tensor], Tensor], features: int, outputs: int, **layers: Any) -> nn.Module:
    """A head on what a body gives."""
    return Layers(lambda m, x: m.head(body(m, x)), head=nn.Linear(features, outputs), **layers)


def _dense(*more: nn.Module) -> Build:
    def build(w: int, f: Callable[[Tensor], Tensor], out: int) -> nn.Module:
        later = nn.Sequential(*more)
        return Layers(lambda m, x: m.b(later(f(m.a(x)))), a=nn.Linear(6, w), b=nn.Linear(w, out), later=later)

    return build


def _parametrized(change: Callable[[nn.Module], nn.Module]) -> Build:
    return lambda w, f, out: _headed(lambda m, x: f(m.a(x)), 6, out, a=change(nn.Linear(6, 6)))


def _conv1d(**settings: Any) -> Build:
    def body(m: Any, x: Tensor) -> Tensor:
        h = torch.tanh(m.n(m.c(x.reshape(-1, 2, 3))))
        return F.adaptive_avg_pool1d(F.gelu(m.d(h)), 2).flatten(1)

    def build(w: int, f: Callable[[Tensor], Tensor], out: int) -> nn.Module:
        c = nn.Conv1d(2, 4, 3, padding=1, **settings)
        norm = nn.GroupNorm(2, 4) if settings.get("groups") else nn.Identity()
        return _headed(body, 6, out, c=c, n=norm, d=nn.ConvTranspose1d(4, 3, 3, padding=1))

    return build


def _conv2d(w: int, f: Callable[[Tensor], Tensor], out: int) -> nn.Module:
    c: nn.Module = nn.Conv2d(1, w, (1, 2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return _headed(lambda m, x: f(m.c(x.reshape(-1, 1, 2, 3))).flatten(1), 4 * w, out, c=c)


def _recurrent(kind: Callable[..., nn.RNNBase], first: bool = True) -> Build:
    def body(m: Any, x: Tensor) -> Tensor:
        x = x.reshape(-1, 3, 2)
        h: Tensor = m.cells(x if first else x.transpose(0, 1))[0]
        return h[:, -1] if first else h[-1]

    return lambda w, f, out: _headed(body, w, out, cells=kind(2, w, batch_first=first))


def _attention(w: int, f: Callable[[Tensor], Tensor], out: int) -> nn.Module:
    def body(m: Any, x: Tensor) -> Tensor:
        h = m.i(x.reshape(-1, 3, 2))
        mean: Tensor = m.norm(h + m.a(h, h, h, need_weights=False)[0]).mean(1)
        return mean

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    return _headed(body, 4, out, i=nn.Linear(2, 4), a=attention, norm=nn.LayerNorm(4))


def _encoder(w: int, f: Callable[[Tensor], Tensor], out: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return _headed(lambda m, x: m.e(m.i(x.reshape(-1, 3, 2))).mean(1), 4, out, i=nn.Linear(2, 4), e=layer)


def _embedding(table: Callable[[int], nn.Module]) -> Build:
    def body(m: Any, x: Tensor) -> Tensor:
        h: Tensor = m.table((x.abs().nan_to_num(0, 2) * 3).long().clamp(0, 6))
        return torch.tanh(h.mean(1) if h.dim() == 3 else h)

    return lambda w, f, out: _headed(body, w, out, table=table(w))


def _custom(function: type[torch.autograd.Function]) -> Build:
    return lambda w, f, out: _headed(lambda m, x: function.apply(m.a(x)), w, out, a=nn.Linear(6, w))  # type: ignore[no-untyped-call]


def _recomputed(reentrant: bool) -> Build:
    def body(m: Any, x: Tensor) -> Tensor:
        return torch.tanh(checkpoint(m.a, x, use_reentrant=reentrant))

    return lambda w, f, out: _headed(body, w, out, a=nn.Sequential(nn.Linear(6, w), nn.Tanh(), nn.Linear(w, w)))


def _buffered(change: Callable[[Any, Tensor], object], buffer: Tensor | None) -> Build:
    """A model that changes a buffer in passing."""

    def forward(m: Any, x: Tensor) -> Tensor:
        z: Tensor = m.a(x)
        change(m, z)
        return z

    return lambda w, f, out: Layers(forward, a=nn.Linear(6, out), kept=None if buffer is None else buffer.clone())


def _cached(w: int, f: Callable[[Tensor], Tensor], out: int) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        if m.mask is None or len(m.mask) != len(x):
            m.mask = torch.ones(len(x), 1, dtype=x.dtype)
        return m.a(x) * m.mask  # type: ignore[no-any-return]

    model = Layers(forward, a=nn.Linear(6, out))
    model.register_buffer("mask", None, persistent=False)
    return model


def _autocast(w: int, f: Callable[[Tensor], Tensor], out: int) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z: Tensor = m.b(torch.tanh(m.a(x)))
            return z

    return Layers(forward, a=nn.Linear(6, w), b=nn.Linear(w, out))


def _shapes(w: int, f: Callable[[Tensor], Tensor], out: int) -> nn.Module:
    """Parameters without elements, of no dimension, of three, and not contiguous."""

    def forward(m: Any, x: Tensor) -> Tensor:
        z: Tensor = m.k * torch.tanh(x @ m.w) + m.t.sum((0, 1)) + m.z.sum()
        return z

    three = torch.randn(2, out, 2).permute(2, 0, 1) * 0.3
    flat = {"z": torch.zeros(0, 3), "k": torch.tensor(1.3), "w": torch.randn(out, 6).t() * 0.4, "t": three}
    return Layers(forward, **{name: nn.Parameter(value) for name, value in flat.items()})


def _tied(w: int, f: Callable[[Tensor], Tensor], out: int) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.linear(f(m.a(x)), m.a.weight.T, m.bias)[:, :out]

    return Layers(forward, a=nn.Linear(6, w), bias=nn.Parameter(torch.zeros(6)))


def _shared(w: int, f: Callable[[Tensor], Tensor], out: int) -> nn.Module:
    """One layer called three times; its weight is used beside it, too."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(m.a(x))
        return m.o(x) + (x @ m.a.weight)[:, :out] + 0.01 * m.o.weight.sum()  # type: ignore[no-any-return]

    return Layers(forward, a=nn.Linear(6, 6), o=nn.Linear(6, out))


def _in_place(w: int, f: Callable[[Tensor], Tensor], out: int) -> nn.Module:
    def body(m: Any, x: Tensor) -> Tensor:
        h: Tensor = m.a(x).relu_().clone()
        h[:, :2] *= 2
        return h

    return _headed(body, 6, out, a=nn.Linear(6, 6))


def _normed(w: int, f: Callable[[Tensor], Tensor], out: int) -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.p(m.n(m.a(x.reshape(-1, 3, 2))).transpose(1, 2)).transpose(1, 2)
        z: Tensor = m.b(h[:, 0], m.r(h[:, 1]))
        return z

    layers = {"a": nn.Linear(2, 4), "n": nn.LayerNorm(4), "p": nn.PReLU(4), "b": nn.Bilinear(4, 4, out)}
    return Layers(forward, **layers, r=nn.RMSNorm(4))


def _mlp(depth: int) -> Build:
    def build(w: int, f: Callable[[Tensor], Tensor], out: int) -> nn.Module:
        def forward(m: Any, x: Tensor) -> Tensor:
            for layer in m.layers[:-1]:
                x = f(layer(x))
            z: Tensor = m.layers[-1](x)
            return z

        widths = [6, *[w] * depth, out]
        return Layers(forward, layers=nn.ModuleList(map(nn.Linear, widths[:-1], widths[1:])))

    return build


def _mixed(w: int, f: Callable[[Tensor], Tensor], out: int) -> nn.Module:
    double = nn.Linear(w, out).double()
    return Layers(lambda m, x: m.b(torch.tanh(m.a(x.float())).double()), a=nn.Linear(6, w), b=double)


def _weight(make: Callable[[int], Tensor], use: Callable[[Tensor, Tensor], Tensor]) -> Build:
    """No layers: one tensor of parameters."""
    return lambda w, f, out: Layers(lambda m, x: use(x, m.w), w=nn.Parameter(make(out)))


def _fourier(x: Tensor, w: Tensor) -> Tensor:
    z = torch.view_as_complex(w.contiguous().float())
    transformed: Tensor = torch.fft.fft(x.to(z.dtype) @ z)
    return transformed.abs().to(w.dtype)


def _dead(w: int, f: Callable[[Tensor], Tensor], out: int) -> nn.Module:
    a = nn.Linear(6, w)
    nn.init.constant_(a.bias, -1e4)
    return _headed(lambda m, x: torch.relu(m.a(x)), w, out, a=a)


MODELS: dict[str, Build] = {
    "mlp": _mlp(1),
    "deep mlp": _mlp(3),
    "linear": _mlp(0),
    "vector": _weight(lambda out: torch.randn(FEATURES, out), lambda x, w: x @ w),
    "conv1d": _conv1d(),
    "grouped convolution": _conv1d(groups=2),
    "strided convolution": _conv1d(stride=2),
    "circular convolution": _conv1d(padding_mode="circular"),
    "conv2d": _conv2d,
    "rnn, time first": _recurrent(nn.RNN, first=False),
    "lstm": _recurrent(nn.LSTM),
    "gru": _recurrent(nn.GRU),
    "attention": _attention,
    "encoder": _encoder,
    "embedding": _embedding(lambda w: nn.Embedding(7, w)),
    "sparse embedding": _embedding(lambda w: nn.Embedding(7, w, sparse=True)),
    "embedding with max_norm": _embedding(lambda w: nn.Embedding(7, w, max_norm=0.5)),
    "padded embedding": _embedding(lambda w: nn.Embedding(7, w, padding_idx=0)),
    "embedding bag": _embedding(lambda w: nn.EmbeddingBag(7, w)),
    "tied": _tied,
    "shared": _shared,
    "shapes": _shapes,
    "custom function": _custom(_Twice),
    "function once differentiable": _custom(_Once),
    "straight-through": _custom(_Rounded),
    "recomputed": _recomputed(reentrant=False),
    "recomputed, reentrant": _recomputed(reentrant=True),
    "in place": _in_place,
    "norms": _normed,
    "weight norm": _parametrized(parametrizations.weight_norm),
    "orthogonal": _parametrized(parametrizations.orthogonal),
    "spectral norm": _parametrized(parametrizations.spectral_norm),
    "batch norm": lambda w, f, out: _dense(nn.BatchNorm1d(w))(w, f, out),
    "batch norm in eval": lambda w, f, out: _dense(nn.BatchNorm1d(w).eval())(w, f, out).eval(),
    "dropout": _dense(nn.Dropout(0.3)),
    "counter": _buffered(lambda m, z: m.kept.add_(1), torch.zeros(())),
    "buffer of the last output": _buffered(lambda m, z: m.kept.copy_(z.detach().square().mean()), torch.zeros(())),
    "average in a hook": _buffered(lambda m, z: setattr(m, "kept", float(z.detach().mean())), None),
    "cached mask": _cached,
    "complex": _weight(
        lambda out: torch.randn(6, out, dtype=torch.complex64), lambda x, w: (x.to(w.dtype) @ w).abs().to(x.dtype)
    ),
    "complex inside": _weight(lambda out: torch.randn(6, out, 2) * 0.3, _fourier),
    "mixed dtypes": _mixed,
    "expanded": _weight(lambda out: torch.zeros(6, 1).expand(6, out), lambda x, w: x @ w),
    "autocast": _autocast,
    "dead relu": _dead,
}
#: Models whose calls change a buffer, as their users want them to.
CHANGING = ("counter", "buffer of the last output", "cached mask", "batch norm", "spectral norm")
#: What is odd about the parameters.
ODDITIES = (
    *("frozen", "all frozen", "unused", "unused nan", "zero-size", "only zero-size", "0-d"),
    *("transposed", "nan weight", "zero weights"),
)


def _odd(inner: nn.Module, oddity: str) -> nn.Module:
    """A model with something added to its parameters or in its way."""
    if oddity in ("unused", "unused nan"):
        unused = nn.Parameter(torch.full((3,), math.nan if oddity == "unused nan" else 0.5))
        return Layers(lambda m, x: m.inner(x), inner=inner, unused=unused)
    if oddity in ("zero-size", "only zero-size"):
        return Layers(lambda m, x: m.inner(x) + m.empty.sum(), inner=inner, empty=nn.Parameter(torch.zeros(0, 3)))
    if oddity == "0-d":
        return Layers(lambda m, x: m.inner(x) * m.scale, inner=inner, scale=nn.Parameter(torch.tensor(1.25)))
    return inner


def build(name: str, width: int, activation: str, outputs: int, oddity: str = "none", scale: float = 1.0) -> nn.Module:
    """A model, from the global generator."""
    inner = MODELS[name](width, ACTIVATIONS[activation], outputs)
    parameters = list(inner.parameters())
    model = _odd(inner, oddity)
    with torch.no_grad():
        for p in parameters if name != "expanded" else []:
            p.mul_(0.0 if oddity == "zero weights" else scale)
        if oddity == "nan weight" and name != "expanded":
            parameters[0].view(-1)[:1] = math.nan
        if oddity == "transposed":
            for p in parameters:
                p.data = p.data.T.contiguous().T if p.ndim == 2 else p.data
    if oddity == "frozen":
        parameters[0].requires_grad_(False)
    if oddity in ("all frozen", "only zero-size"):
        for p in parameters:
            p.requires_grad_(False)
    return model
