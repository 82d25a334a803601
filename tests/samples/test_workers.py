"""Steps whose samples are loaded by worker processes, which Ctrl-C or the system may end."""

from __future__ import annotations

import multiprocessing
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate

from krylov_descent import KSD, Subsets

STEPS = 4


def built() -> tuple[nn.Module, KSD, Callable[[tuple[Tensor, Tensor]], Any], Subsets]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    x, y = torch.randn(120, 6), torch.randn(120, 3)
    sets = Subsets(TensorDataset(x, y), batch_size=30, fraction=0.3, seed=1, num_workers=2, collate_fn=default_collate)

    def closure(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        r = model(batch[0]) - batch[1]
        return r.square().mean(), r

    return model, KSD(model.parameters(), krylov_dim=3), closure, sets


def kill_workers(others: list[Any]) -> None:
    """Kill the processes that load samples; other tests have ranks among this process's children."""
    for worker in multiprocessing.active_children():
        if worker not in others:
            worker.kill()
            worker.join()


def theta(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.fixture(scope="module")
def undisturbed() -> list[Tensor]:
    model, optimizer, closure, sets = built()
    return [(optimizer.step(closure, sets), theta(model))[1] for _ in range(STEPS)]


@pytest.fixture
def alarm() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


# An interrupt in a destructor or at a fork is swallowed by Python.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_steps_after_an_interrupt_are_those_of_a_run_without(undisturbed: list[Tensor], alarm: None) -> None:
    times, hits = random.Random(0), 0
    model, optimizer, closure, sets = built()
    for expected in undisturbed:
        for _ in range(3):
            before = theta(model)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.003 + 0.05 * times.random())
                optimizer.step(closure, sets)
                signal.setitimer(signal.ITIMER_REAL, 0)
                break
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
                hits += 1
                if not torch.equal(theta(model), before):  # it came when the step was done
                    break
        else:
            optimizer.step(closure, sets)
        assert torch.equal(theta(model), expected)
    assert hits > 2


@pytest.mark.parametrize("at_call", [1, 3, 12])
def test_workers_that_are_lost_are_replaced(undisturbed: list[Tensor], at_call: int) -> None:
    """A terminal sends Ctrl-C to workers, too, which end by it."""
    others = multiprocessing.active_children()
    model, optimizer, closure, sets = built()
    optimizer.step(closure, sets)
    calls = 0

    def interrupted(batch: tuple[Tensor, Tensor]) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call:
            kill_workers(others)
            raise KeyboardInterrupt
        return closure(batch)

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(interrupted, sets)
    assert torch.equal(theta(model), undisturbed[0])
    for expected in undisturbed[1:3]:
        optimizer.step(closure, sets)
        assert torch.equal(theta(model), expected)


def test_a_killed_worker_ends_the_step_in_an_error_and_the_next_one_works(undisturbed: list[Tensor]) -> None:
    others = multiprocessing.active_children()
    model, optimizer, closure, sets = built()
    optimizer.step(closure, sets)

    def kills(batch: tuple[Tensor, Tensor]) -> Any:
        kill_workers(others)
        return closure(batch)

    with pytest.raises(RuntimeError, match="worker"):
        optimizer.step(kills, sets)
    assert torch.equal(theta(model), undisturbed[0])
    optimizer.step(closure, sets)
    assert torch.equal(theta(model), undisturbed[1])
