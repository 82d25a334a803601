"""Checks of a device: small trainings on it, each compared with the same training on the CPU.

Each training takes three steps. The largest curvature seen in the first one (of ``GaussNewtonFlow``, the loss after it)
must agree closely. The loss in the end must agree only roughly in float32, where a search amplifies rounding: weights
changed by 2e-7 change it by up to a tenth on a CPU. A fourth step is counted: operators, and reads by the host.
"""

from __future__ import annotations

import io
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from krylov_descent.checking.problem import first_line
from krylov_descent.flow.optimizer import GaussNewtonFlow
from krylov_descent.optimizer import DEEP, KSD, PAPER
from krylov_descent.safety.budget import Storage
from krylov_descent.samples.growing import Growing
from krylov_descent.samples.points import Points
from krylov_descent.samples.subsets import Subsets

_STEPS, _LOSS = 3, 0.5

Device = torch.device


@dataclass(frozen=True)
class Outcome:
    """The result of one training: curvature in its first step, loss in the end, and counts of a further step."""

    curvature: float
    loss: float
    operators: int
    reads: int


@dataclass(frozen=True)
class Check:
    """A training, and the largest relative differences of its curvature and loss from those on the CPU.

    Attributes:
        run: trains on a device.
        curvature, loss: the largest differences.
        reference: trains on the CPU, if not ``run``.
    """

    run: Callable[[Device], Outcome]
    curvature: float = 1e-4
    loss: float = _LOSS
    reference: Callable[[Device], Outcome] | None = None


@dataclass(frozen=True)
class Row:
    """The result of one check.

    Attributes:
        name: the check.
        status: "ok", "FAILED", or "skipped".
        differences: the relative differences of curvature and loss from the CPU's; empty if there are none.
        seconds: on the device and on the CPU.
        counts: operators, and reads by the host, of one step on the device.
        notes: the reason, the values that differ, and warnings.
    """

    name: str
    status: Literal["ok", "FAILED", "skipped"]
    differences: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


class SkippedError(Exception):
    """The device cannot do this."""


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators on a device, and those that bring numbers from it to the host."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type
        self.operators = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._device != "cpu" and self._on_device(args) and not (result is None or self._on_device(result)):
            self.reads += 1
        elif self._on_device(args) or self._on_device(result):
            self.operators += not func.is_view
        return result

    def _on_device(self, values: Any) -> bool:
        return any(isinstance(x, Tensor) and x.device.type == self._device for x in tree_leaves(values))


def _trained(
    model: nn.Module, closure: Callable[..., Any], sets: Any = None, method: type = KSD, **options: Any
) -> Outcome:
    optimizer = method(model.parameters(), **options)
    run = optimizer.run(closure, sets, max_steps=_STEPS)
    reports = list(run)
    if not run.loss < 0.9 * reports[0].loss:
        raise AssertionError(f"the loss went from {reports[0].loss:.4g} to {run.loss:.4g} in {_STEPS} steps")
    with Counts(next(model.parameters()).device) as counts:
        optimizer.step(closure, sets)
    first = reports[0]
    curvature = first.ritz_values[-1] if first.ritz_values else first.search_loss_after
    return Outcome(curvature, run.loss, counts.operators, counts.reads)


def _perceptron(device: Device, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a network, inputs and targets, made on the CPU, so that they are the same everywhere."""
    torch.manual_seed(0)
    x = torch.randn(600, 4)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    return model.to(device, dtype), x.to(device, dtype), torch.sin(x[:, :2] * x[:, 2:]).to(device, dtype)


def _regression(model: nn.Module) -> Callable[[Any], tuple[Tensor, Tensor]]:
    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        r = model(batch[0]) - batch[1]
        return r.square().mean(), r

    return closure


def _full_batch(device: Device, dtype: torch.dtype = torch.float32, **options: Any) -> Outcome:
    model, *batch = _perceptron(device, dtype)
    closure = _regression(model)
    return _trained(model, lambda: closure(batch), **options)


def _float64(device: Device) -> Outcome:
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except TypeError as error:
        raise SkippedError(f"{device} has no float64") from error
    return _full_batch(device, torch.float64)


def _sample_sets(device: Device, kind: type[Subsets] = Subsets, batch_size: int = 100, **options: Any) -> Outcome:
    """Train on sets drawn on the CPU and moved."""
    model, *data = _perceptron(device)
    fraction: dict[str, Any] = {} if kind is Growing else {"fraction": 0.25}
    sets = kind(tuple(x.cpu() for x in data), batch_size=batch_size, device=device, seed=0, **fraction)
    return _trained(model, _regression(model), sets, **options)


def _points(device: Device) -> Outcome:
    """Train on points that the optimizer draws."""
    model, *_ = _perceptron(device)

    def closure(x: Tensor) -> tuple[Tensor, Tensor]:
        r = model(x) - torch.sin(x[:, :2] * x[:, 2:])
        return r.square().mean(), r

    points = Points(lambda n, generator: torch.rand(n, 4, generator=generator).to(device), 300, seed=0)
    return _trained(model, closure, points, GaussNewtonFlow)


def _backward(device: Device) -> Outcome:
    """Train with a closure written for torch.optim.LBFGS."""
    model, x, y = _perceptron(device)

    def closure() -> Tensor:
        model.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return _trained(model, closure)


def _autocast(device: Device) -> Outcome:
    """Train with bfloat16 inside the closure; parameters, sums and the search stay in float32."""
    model, x, y = _perceptron(device)

    def closure() -> tuple[Tensor, Tensor]:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            z = model(x)
        r = z.float() - y
        return r.square().mean(), r

    return _trained(model, closure, preconditioner=None)


def _physics(device: Device, **options: Any) -> Outcome:
    """Train with a closure that differentiates inside."""
    model, x, _ = _perceptron(device)
    x.requires_grad_()

    def closure() -> tuple[Tensor, Tensor]:
        u = model(x).sum(1)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        r = slope.sum(1) + u - torch.cos(x[:, 0].detach())
        return r.square().mean(), r

    return _trained(model, closure, **options)


def _layers(device: Device, make: Callable[[], nn.Module], features: int, *shape: int) -> Outcome:
    """Train a network of other layers, [n, *shape] → [n, features], and a linear one, with random labels."""
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Flatten(), nn.Linear(features, 2)).to(device)
    x, labels = torch.randn(300, *shape).to(device), torch.randint(2, (300,)).to(device)

    def closure() -> tuple[Tensor, Tensor]:
        logits = model(x)
        return nn.functional.cross_entropy(logits, labels), logits

    return _trained(model, closure)


def _convolution(device: Device) -> Outcome:
    """Convolutions have a backward pass of KSD's own."""
    return _layers(device, lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.AvgPool2d(2)), 36, 1, 8, 8)


def _attention(device: Device) -> Outcome:
    """Fused attention kernels cannot be differentiated twice; KSD takes the plain one for products."""
    return _layers(device, lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 48, 6, 8)


class _LastState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        last: Tensor = self.lstm(x)[0][:, -1]
        return last


def _recurrent(device: Device) -> Outcome:
    """cuDNN's LSTM cannot be differentiated twice: it is switched off, as users must."""
    with torch.backends.cudnn.flags(enabled=False) if device.type == "cuda" else nullcontext():
        return _layers(device, _LastState, 8, 5, 3)


def _resumed(device: Device) -> Outcome:
    """Stop, save, load on this device and continue: the same as without a stop."""
    model, *batch = _perceptron(device)
    optimizer = KSD(model.parameters())
    for _ in range(_STEPS):
        optimizer.step(lambda: _regression(model)(batch))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    unstopped = [optimizer.step(lambda: _regression(model)(batch)).loss for _ in range(_STEPS)]
    weights, state = torch.load(file, map_location=device, weights_only=True)
    loaded, *_ = _perceptron(device)
    loaded.load_state_dict(weights)
    optimizer = KSD(loaded.parameters())
    optimizer.load_state_dict(state)
    continued = [optimizer.step(lambda: _regression(loaded)(batch)).loss for _ in range(_STEPS)]
    if not math.isclose(continued[-1], unstopped[-1], rel_tol=1e-5):
        raise AssertionError(f"resumed: {continued[-1]!r}, not stopped: {unstopped[-1]!r}")
    return _full_batch(device)


def _tf32(device: Device) -> Outcome:
    """Matrix products in TF32, which has 10 bits: for information, since it is not advised."""
    if device.type != "cuda":
        raise SkippedError("cuda only")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return _full_batch(device)
    finally:
        torch.set_float32_matmul_precision(before)


#: The checks by name.
CHECKS: Mapping[str, Check] = {
    "full-batch": Check(_full_batch),
    "float64": Check(_float64, 1e-10, 1e-6),
    "paper": Check(partial(_full_batch, **PAPER)),
    "hessian": Check(partial(_full_batch, curvature="hessian")),
    "fisher": Check(partial(_full_batch, curvature="fisher")),
    "basis-on-cpu": Check(partial(_full_batch, storage=Storage(device="cpu"))),
    "basis-bfloat16": Check(partial(_full_batch, storage=Storage(dtype=torch.bfloat16)), 1e-2),
    "sets": Check(_sample_sets),
    "deep": Check(partial(_sample_sets, kind=Growing, batch_size=600, **DEEP), 1e-2),
    "backward": Check(_backward),
    "physics": Check(_physics),
    "flow": Check(partial(_full_batch, method=GaussNewtonFlow), 1e-3),
    "flow-sets": Check(partial(_sample_sets, method=GaussNewtonFlow), 1e-3),
    "flow-points": Check(_points, 1e-3),
    "flow-physics": Check(partial(_physics, method=GaussNewtonFlow), 1e-3),
    "convolution": Check(_convolution),
    "attention": Check(_attention),
    "lstm": Check(_recurrent),
    "autocast": Check(_autocast, 2e-2),
    "resume": Check(_resumed),
    "tf32": Check(_tf32, math.inf, math.inf, reference=_full_batch),
}


def diagnosed(device: Device, skip: Collection[str] = ()) -> Iterator[Row]:
    """Run the checks on a device, and yield the result of each.

    Example:
        >>> row = next(diagnosed(torch.device("cpu")))
        >>> row.name, row.status, row.differences
        ('full-batch', 'ok', (0.0, 0.0))
    """
    for name, check in CHECKS.items():
        if name not in skip:
            yield _result(name, check, device)


def _result(name: str, check: Check, device: Device) -> Row:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            begin = time.perf_counter()
            there = check.run(device)
            middle = time.perf_counter()
            here = (check.reference or check.run)(Device("cpu"))
        except SkippedError as why:
            return Row(name, "skipped", notes=(str(why),))
        except Exception as error:  # one check must not keep the others from running
            return Row(name, "FAILED", notes=(first_line(error),))
        seconds = middle - begin, time.perf_counter() - middle
    pairs = (there.curvature, here.curvature, check.curvature), (there.loss, here.loss, check.loss)
    differences = tuple(abs(a - b) / abs(b) for a, b, _ in pairs)
    failed = not all(d <= allowed for d, (_, _, allowed) in zip(differences, pairs, strict=True))
    notes = [
        f"{what} {a!r}, the CPU's {b!r}, allowed {allowed:.0e}"
        for what, (a, b, allowed) in zip(("curvature", "loss"), pairs, strict=True)
        if failed
    ]
    notes += dict.fromkeys(f"{w.category.__name__}: {str(w.message).splitlines()[0]}" for w in warned)
    counts = there.operators, there.reads
    return Row(name, "FAILED" if failed else "ok", differences, seconds, counts, tuple(notes))
