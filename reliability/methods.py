"""The methods of the matrix, and a small training of each, which disturbances from outside are tried on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import Dataset

from krylov_descent import DEEP, KSD, PAPER, GaussNewtonFlow, Growing, StepReport, Subsets
from krylov_descent.base import CurvatureOptimizer

Optimizer = KSD | GaussNewtonFlow

#: Settings of KSD by the name of a method; None for the flow.
METHODS: dict[str, dict[str, Any] | None] = {"PAPER": PAPER, "default": {}, "DEEP + Growing": DEEP, "flow": None}


def optimizer_of(method: str, parameters: Iterable[Any], **settings: Any) -> Optimizer:
    """The optimizer of a method; ``settings`` come before its own."""
    own = METHODS[method]
    if own is None:
        return GaussNewtonFlow(parameters, **settings)
    return KSD(parameters, **{**own, **settings})


def sets_of(method: str, data: Any, seed: int, *, batch_size: int, fraction: float | None, workers: int = 0) -> Subsets:
    """The sample sets that a method is used with; growing ones begin with ``fraction`` of the samples in A."""
    if method == "DEEP + Growing":
        n = len(data[0]) if isinstance(data, tuple) else len(data)
        start = max(1, round((0.5 if fraction is None else fraction) * n))
        return Growing(data, batch_size=batch_size, start=start, seed=seed, num_workers=workers)
    return Subsets(data, batch_size=batch_size, fraction=fraction, seed=seed, num_workers=workers)


def digest(model: nn.Module, optimizer: CurvatureOptimizer) -> str:
    """sha256 of the model, and on rank 0 of all that the optimizer remembers; a collective."""
    vectors, numbers, tensors = optimizer.whole_state()
    total = hashlib.sha256(repr(sorted(numbers.items())).encode())
    for name, x in sorted({**vectors, **tensors}.items()):
        total.update(name.encode() + _bytes(x))
    for name, tensor in model.state_dict().items():
        total.update(name.encode() + _bytes(tensor))
    settings = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    total.update(repr(settings).encode())
    return total.hexdigest()


def _bytes(x: Tensor) -> bytes:
    return bytes(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """A data set that is loaded sample by sample."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self._x[i], self._y[i]


#: Kinds of data of a training.
KINDS = ("full batch", "sets", "data set", "workers")


class Training:
    """A training with all that a step could spoil: buffers, gradients of others, a frozen layer.

    Args:
        method: its name in ``METHODS``.
        seed: of parameters and data.
        kind: of data, one of ``KINDS``; DEEP + Growing has sets in place of the full batch.
        width: of the hidden layer.
        start: seed of the parameters, if it is another.

    Attributes:
        on_call: called with the number of the closure's call in a step; may raise.
        calls: of the closure, in this step so far.
    """

    def __init__(self, method: str, seed: int, kind: str = "sets", width: int = 6, start: int | None = None) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed if start is None else start)
            layers = (nn.Linear(3, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 2), nn.Linear(2, 2))
            self.model = nn.Sequential(*layers).double()
            torch.manual_seed(seed)
            x = torch.randn(150, 3, dtype=torch.float64)
            y = torch.stack([x[:, 0] * x[:, 1], x.sin().sum(1)], 1) + 0.3 * torch.randn(150, 2, dtype=torch.float64)
            self.model(x)  # the statistics of the norm are its own
        self.model.eval()
        layers[-1].requires_grad_(False)
        weight = layers[0].weight
        weight.grad = torch.ones_like(weight)  # left by another optimizer
        small = {} if METHODS[method] is None or method == "DEEP + Growing" else {"krylov_dim": 5}
        self.optimizer = optimizer_of(method, self.model.parameters(), weight_decay=1e-4, **small)
        if kind == "full batch" and method == "DEEP + Growing":
            kind = "sets"
        data = Samples(x, y) if kind in ("data set", "workers") else (x, y)
        workers = 2 if kind == "workers" else 0
        self.sets = (
            None if kind == "full batch" else sets_of(method, data, 4, batch_size=40, fraction=0.2, workers=workers)
        )
        self._data = x, y
        self.on_call: Callable[[int], object] = lambda call: None
        self.calls = 0

    def closure(self, batch: Any = None) -> tuple[Tensor, Tensor]:
        """The mean square of residuals."""
        self.calls += 1
        self.on_call(self.calls)
        x, y = self._data if batch is None else batch
        z = self.model(x)
        return F.mse_loss(z, y), z

    def step(self) -> StepReport:
        """Take one."""
        self.calls = 0
        if self.sets is None:
            return self.optimizer.step(lambda: self.closure())
        return self.optimizer.step(self.closure, self.sets)

    def digest(self) -> str:
        """Of model and optimizer."""
        return digest(self.model, self.optimizer)

    def trajectory(self, steps: int) -> list[str]:
        """The digests after each of so many steps."""
        found = []
        for _ in range(steps):
            self.step()
            found.append(self.digest())
        return found
