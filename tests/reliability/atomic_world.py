"""A training with all that a step could spoil, and what it is bit for bit: for the tests that spoil it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from krylov_descent import KSD, GaussNewtonFlow, Search, Subsets


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """A data set that tells of every sample."""

    def __init__(self, x: Tensor, y: Tensor, event: Callable[[], None]) -> None:
        self._x, self._y, self._event = x, y, event

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self._event()
        return self._x[i], self._y[i]


class World:
    """A training with all that a step could spoil: buffers, gradients of others, frozen parameters, generators."""

    def __init__(self, method: str, kind: str) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2), nn.Linear(2, 2))
        self.model = nn.Sequential(*layers).double()
        x = torch.randn(60, 3, dtype=torch.float64)
        y = torch.stack([x[:, 0] * x[:, 1], x.sin().sum(1)], 1) + 0.3 * torch.randn(60, 2, dtype=torch.float64)
        self.model(x)  # the statistics of the norm are its own
        self.model.eval()
        layers[-1].requires_grad_(False)
        weight = next(iter(self.model.parameters()))
        weight.grad = torch.ones_like(weight)  # left by a first phase with another optimizer
        self.calls = self.samples = self.seed = 0
        self.spoil: Callable[[int, Any], Any] = lambda call, returned: returned
        self.event: Callable[[int], None] = lambda sample: None
        self.optimizer: KSD | GaussNewtonFlow = GaussNewtonFlow(self.model.parameters(), rows=20, weight_decay=1e-4)
        if method == "ksd":
            small = {"krylov_dim": 3, "search": Search(iterations=3)}
            self.optimizer = KSD(self.model.parameters(), weight_decay=1e-4, **small)  # type: ignore[arg-type]
        self.data = x, y
        self.sets = None if kind == "full batch" else Subsets(self._source(kind), batch_size=20, fraction=0.1, seed=4)

    def _source(self, kind: str) -> Any:
        return Samples(*self.data, self._tell) if kind == "data set" else self.data

    def _tell(self) -> None:
        self.samples += 1
        self.event(self.samples)

    def closure(self, batch: Any = None) -> Any:
        self.calls += 1
        torch.manual_seed(self.seed)  # as closures do that draw the same noise at every call
        x, y = self.data if self.sets is None else batch
        r = self.model(x) - y
        return self.spoil(self.calls, (r.square().mean(), r))

    def step(self) -> Any:
        self.calls = self.samples = 0
        self.seed = len(self.optimizer.state) and int(next(iter(self.optimizer.state.values()))["numbers"]["iteration"])
        if self.sets is None:
            return self.optimizer.step(lambda: self.closure())
        return self.optimizer.step(lambda batch: self.closure(batch), self.sets)

    def snapshot(self) -> dict[str, Any]:
        """Everything, by value."""
        parameters = list(self.model.parameters())
        return {
            "model": copy.deepcopy(self.model.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "generator": torch.get_rng_state(),
            "flags": [p.requires_grad for p in parameters],
            "gradients": [None if p.grad is None else p.grad.clone() for p in parameters],
            "modes": [module.training for module in self.model.modules()],
            "grad mode": torch.is_grad_enabled(),
            "fast path": torch.backends.mha.get_fastpath_enabled(),
        }

    def put(self, snapshot: dict[str, Any]) -> None:
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(copy.deepcopy(snapshot["optimizer"]))
        torch.set_rng_state(snapshot["generator"])


def difference(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two snapshots differ, bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        return [] if same else [path]
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [line for key in a for line in difference(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [line for i, (x, y) in enumerate(zip(a, b, strict=True)) for line in difference(x, y, f"{path}/{i}")]
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r} ≠ {b!r}"]


KINDS = ("full batch", "sets", "data set")


def ready(method: str, kind: str, when: str) -> tuple[World, dict[str, Any], dict[str, Any], float]:
    """A world before its first step, a later one or one that undoes its predecessor.

    Returns:
        With its snapshot, that of the step to come if nothing fails, and how long that step takes.
    """
    world = World(method, kind)
    for number in range(30):
        before = world.snapshot()
        report = world.step()
        if (when == "first", number == 2, not report.accepted)[("first", "later", "undoing").index(when)]:
            after = world.snapshot()
            world.put(before)
            assert difference(before, world.snapshot()) == []
            return world, before, after, sum(report.seconds.values())
    raise AssertionError("no step was undone")
