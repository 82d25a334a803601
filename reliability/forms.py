"""The forms in which a run is kept, and runs under random options to keep in them.

The file of ``krylov_descent.checkpoint``, which ``krylov-descent train`` writes, too; and
``optimizer.state_dict()`` beside the model's, in files of ``torch.save``.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from krylov_descent import KSD, Fisher, GaussNewtonFlow, Search, Storage, Subsets, checkpoint

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
NAME = "run.safetensors"
_N = 40


@dataclass(frozen=True)
class Options:
    """Of a run: the method, what it is given, and what it is given it for."""

    method: type[KSD] | type[GaussNewtonFlow]

    dtype: str
    sets: dict[str, Any] | None
    settings: tuple[tuple[str, Any], ...]
    frozen: bool
    groups: bool

    @classmethod
    def drawn(cls, randomly: random.Random) -> Options:
        """Random ones."""
        flow = randomly.choice([None, {}, {"rows": 5, "momentum": 0.5}])
        sets = randomly.choice(
            [
                None,
                {"batch_size": 7},
                {"batch_size": 16, "fraction": 0.05},
                {"batch_size": 5, "fraction": 0.3, "gradient_fraction": 0.5},
            ]
        )
        of_ksd = {
            "krylov_dim": randomly.choice([1, 3, 8]),
            "curvature": randomly.choice(["ggn", "hessian", "fisher"]),
            "preconditioner": randomly.choice(["fisher", Fisher(floor=1e-4), None]),
            "previous": randomly.choice(["step", "e1", None]),
            "search": randomly.choice([Search(), Search(iterations=3), Search(negative="floor", floor=1e-4)]),
            "memory_budget": randomly.choice([None, 1 << 14]),
            "storage": randomly.choice([Storage(), Storage(dtype=torch.bfloat16)]),
        }
        settings = {
            **(of_ksd if flow is None else flow),
            "weight_decay": randomly.choice([0.0, 1e-3]),
            "rollback": randomly.choice([True, False]),
            "seed": randomly.randrange(1 << 40),
        }
        dtype, method = randomly.choice([*DTYPES]), KSD if flow is None else GaussNewtonFlow
        return cls(method, dtype, sets, tuple(settings.items()), randomly.random() < 0.3, randomly.random() < 0.3)

    def __str__(self) -> str:
        told = ", ".join(f"{key}={value}" for key, value in self.settings)
        told = f"{self.method.__name__}, {self.dtype}, sets={self.sets}, {told}"
        return f"{told}, frozen={self.frozen}, groups={self.groups}"


class Run:
    """A small network, its data and its optimizer.

    Args:
        options: of the run.
        width: of its hidden layer; another one is another model.
        start: seed of its first parameters.
    """

    def __init__(self, options: Options, width: int = 4, start: int = 0) -> None:
        generator = torch.Generator().manual_seed(1)
        dtype = DTYPES[options.dtype]
        x = torch.randn(_N, 3, generator=generator).to(dtype)
        self._data = (x, torch.tanh(x @ torch.randn(3, 2, generator=generator).to(dtype)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(start)
            layers = [nn.Linear(3, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 2)]
            self.model = nn.Sequential(*layers).to(dtype).eval()
        if options.frozen:
            layers[0].requires_grad_(False)
        settings = dict(options.settings)
        parameters: Any = self.model.parameters()
        if options.groups:
            parameters = [
                {"params": layers[0].parameters(), "weight_decay": 0.25},
                {"params": [*self.model[1:].parameters()]},
            ]
        self.optimizer = options.method(parameters, **settings)
        self._sets = None if options.sets is None else Subsets(self._data, seed=2, **options.sets)

    def steps(self, count: int) -> None:
        """Take some."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # KSD says what a small memory_budget costs
            for _ in range(count):
                if self._sets is None:
                    self.optimizer.step(lambda: self._closure(self._data))
                else:
                    self.optimizer.step(self._closure, self._sets)

    def _closure(self, batch: Any) -> tuple[Tensor, Tensor]:
        z = self.model(batch[0])
        return F.mse_loss(z, batch[1]), z


@dataclass(frozen=True)
class Form:
    """One way to keep a run in a directory.

    Attributes:
        name: for a table.
        save: keeps a run.
        load: brings it back.
        ours: whether the whole file is read by this package, so that every refusal must name it.
    """

    name: str
    save: Callable[[Path, Run], object]
    load: Callable[[Path, Run], object]
    ours: bool = True


def _save_file(root: Path, run: Run) -> None:
    checkpoint.save(root / NAME, run.model, run.optimizer, extra={"kept": True})


def _load_file(root: Path, run: Run) -> None:
    if checkpoint.load(root / NAME, run.model, run.optimizer) != {"kept": True}:
        raise AssertionError("extra did not come back")


def _save_states(root: Path, run: Run) -> None:
    torch.save(run.optimizer.state_dict(), root / "optimizer.pt")
    torch.save(run.model.state_dict(), root / "model.pt")


def _load_states(root: Path, run: Run) -> None:
    state = torch.load(root / "optimizer.pt", weights_only=True)
    run.optimizer.load_state_dict(state)
    run.model.load_state_dict(torch.load(root / "model.pt", weights_only=True))


FILE = Form("file", _save_file, _load_file)
STATES = Form("state_dict", _save_states, _load_states, ours=False)
FORMS = (FILE, STATES)
