"""What every strategy promises, whoever wrote it: exact resume, the same step on two ranks, and atomic steps."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Subsets, checkpoint
from krylov_descent.samples.interface import SamplePolicy
from tests.distributed.pool import Pool

F64 = torch.float64
Closure = Callable[[Any], tuple[Tensor, Tensor]]
Make = Callable[[Any], tuple[nn.Module, KSD, SamplePolicy]]
"""process group → model, optimizer and sets; a function of a module, which ranks import."""


def data() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(96, 4, generator=g, dtype=F64)
    return x, torch.sin(x @ torch.randn(4, 2, generator=g, dtype=F64))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def quarter() -> Subsets:
    return Subsets(data(), batch_size=20, fraction=0.25, seed=3)


def closure_of(model: nn.Module) -> Closure:
    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        r = model(batch[0]) - batch[1]
        return r.square().mean(), r

    return closure


def theta(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])


def steps(model: nn.Module, optimizer: KSD, sets: SamplePolicy, count: int) -> list[float]:
    return [optimizer.step(closure_of(model), sets).loss for _ in range(count)]


def resumes_exactly(make: Make, folder: Path) -> None:
    """Six steps are three and three, by a state_dict and by a checkpoint file; and the state is more than nothing."""
    model, optimizer, sets = make(None)
    steps(model, optimizer, sets, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    path = checkpoint.save(folder / "run.safetensors", model, optimizer)
    expected = steps(model, optimizer, sets, 3)
    assert len(set(expected)) == 3, "nothing is trained"

    again, other, sets = make(None)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert steps(again, other, sets, 3) == expected
    assert torch.equal(theta(again), theta(model))

    again, other, sets = make(None)
    assert checkpoint.load(path, again, other) == {}
    assert steps(again, other, sets, 3) == expected
    assert torch.equal(theta(again), theta(model))


def is_atomic(make: Make) -> None:
    """Wherever the closure raises, a step leaves everything as before it; the next one is what it would have been."""
    model, optimizer, sets = make(None)
    steps(model, optimizer, sets, 2)
    calls = _calls_in_a_step(make)
    before, state = theta(model), optimizer.state_dict()
    for fatal in sorted({1, 2, calls // 3, calls // 2, calls - 1, calls}):
        with pytest.raises(OSError, match="the disk is gone"):
            optimizer.step(_raising(model, fatal), sets)
        assert torch.equal(theta(model), before), fatal
        assert optimizer.state_dict()["krylov_descent"] == state["krylov_descent"], fatal  # a checksum of all of it
    undisturbed, other, own = make(None)
    assert steps(undisturbed, other, own, 3)[-1:] == steps(model, optimizer, sets, 1)
    assert torch.equal(theta(undisturbed), theta(model))


def agrees_on_two_ranks(make: Make, pool: Pool) -> None:
    """Two steps of two processes are those of one, to rounding, and the ranks have the same bits."""
    model, optimizer, sets = make(None)
    steps(model, optimizer, sets, 2)
    one, other = pool.run(2, theta_on_a_rank, make)
    assert torch.equal(one, other)
    torch.testing.assert_close(one, theta(model), rtol=1e-9, atol=1e-10)


def theta_on_a_rank(group: Any, make: Make) -> Tensor:
    """θ of one of several ranks after two steps."""
    model, optimizer, sets = make(group)
    steps(model, optimizer, sets, 2)
    return theta(model)


def _calls_in_a_step(make: Make) -> int:
    """How often the third step calls the closure."""
    model, optimizer, sets = make(None)
    steps(model, optimizer, sets, 2)
    counting = _raising(model, 10**9)
    optimizer.step(counting, sets)
    return int(counting.calls)


class _raising:  # noqa: N801 — used as a function
    def __init__(self, model: nn.Module, fatal: int) -> None:
        self._closure, self._fatal, self.calls = closure_of(model), fatal, 0
        self.__code__ = self._closure.__code__  # the same closure, to what is remembered about it

    def __call__(self, batch: Any) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if self.calls == self._fatal:
            raise OSError("the disk is gone")
        return self._closure(batch)
