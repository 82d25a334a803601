"""A step is atomic: whatever fails inside, all that it touches is as before the step, or as after it, to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Subsets
from tests.reliability.atomic_world import difference, ready


class MishapError(Exception):
    """A user's own."""


EXPECTED: dict[str, type[BaseException]] = {
    "own exception": MishapError,
    "interrupt": KeyboardInterrupt,
    "device memory": torch.OutOfMemoryError,
    "host memory": RuntimeError,
}
MESSAGES = {"own exception": "the user's", "host memory": "DefaultCPUAllocator: can't allocate memory"}


def _raising(error: BaseException) -> Callable[[Any], Any]:
    def spoil(returned: Any) -> Any:
        raise error

    return spoil


SPOILERS: dict[str, Callable[[Any], Any]] = {
    "own exception": _raising(MishapError(MESSAGES["own exception"])),
    "interrupt": _raising(KeyboardInterrupt()),
    "device memory": _raising(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")),
    "host memory": _raising(RuntimeError(MESSAGES["host memory"])),
    "nan loss": lambda returned: (returned[0] * math.nan, returned[1]),
    "inf loss": lambda returned: (returned[0] + math.inf, returned[1]),
    "nan outputs": lambda returned: ((z := returned[1] * math.nan).square().mean(), z),
    "inf outputs": lambda returned: ((z := returned[1] / 0.0).square().mean(), z),
}


@pytest.mark.parametrize(
    ("kind", "when"), [("full batch", "first"), ("full batch", "later"), ("sets", "first"), ("sets", "undoing")]
)
@pytest.mark.parametrize("method", ["ksd", "flow"])
def test_a_fault_in_any_call_of_the_closure(method: str, kind: str, when: str) -> None:
    world, before, after, _ = ready(method, kind, when)
    calls = world.calls
    assert calls > 4
    for name, spoil in SPOILERS.items():
        for k in range(1, calls + 1):
            world.spoil = lambda call, returned, k=k, spoil=spoil: spoil(returned) if call == k else returned  # type: ignore[misc]
            where = f"{name} at call {k} of {calls}"
            raised = None
            try:
                world.step()
            except BaseException as error:
                raised = error
            if raised is not None:
                assert isinstance(raised, EXPECTED.get(name, ValueError)), where
                assert name not in MESSAGES or str(raised) == MESSAGES[name], where
                assert difference(before, world.snapshot()) == [], where
            else:  # a trial that is not finite is a step too far, and another is taken
                now = world.snapshot()
                if "loss" not in name and "outputs" not in name:
                    assert world.calls < k, where  # what is known of a closure spares a call
                    assert difference(after, now) == [], where
                assert all(bool(x.isfinite().all()) for x in now["model"].values()), where
                for untouched in ("flags", "gradients", "modes", "grad mode", "fast path"):
                    assert difference(before[untouched], now[untouched]) == [], where
                for key in ("1.running_mean", "1.running_var", "1.num_batches_tracked", "5.weight"):
                    assert difference(before["model"][key], now["model"][key]) == [], where
                world.put(before)
    world.spoil = lambda call, returned: returned
    world.step()
    # Against one that met no fault.
    assert difference(after, world.snapshot()) == []


@pytest.mark.parametrize("method", ["ksd", "flow"])
@pytest.mark.parametrize("when", ["first", "undoing"])
def test_a_fault_in_any_sample_that_is_loaded(method: str, when: str) -> None:
    world, before, after, _ = ready(method, "data set", when)
    total = world.samples
    error = OSError("the file is gone")
    for k in range(1, total + 1, 9):

        def event(sample: int, k: int = k) -> None:
            if sample == k:
                raise error

        world.event = event
        raised: OSError | None = None
        try:
            world.step()
        except OSError as caught:
            raised = caught
        assert raised is error or world.samples < k  # what is known of a closure spares a look at B
        assert difference(before if raised else after, world.snapshot()) == [], f"sample {k} of {total}"
        world.put(before)
    world.event = lambda sample: None
    world.step()
    assert difference(after, world.snapshot()) == []


# What a user switches on between two steps


def switched(switch: Callable[[nn.Module], object], *layers: nn.Module) -> tuple[nn.Module, Callable[[], Any]]:
    """A model after a good step; the switch is then thrown, and what takes the next step is returned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), *layers, nn.Tanh(), nn.Linear(8, 1)).eval()
    data = torch.randn(90, 3), torch.randn(90, 1)
    sets = Subsets(data, batch_size=30, fraction=0.3, seed=0)
    optimizer = KSD(model.parameters(), krylov_dim=3)

    def closure(batch: Any) -> Any:
        r = model(batch[0]) - batch[1]
        return r.square().mean(), r

    optimizer.step(closure, sets)
    switch(model)
    return model, lambda: optimizer.step(closure, sets)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(8), r"changes buffers.*BatchNorm1d\.num_batches_tracked.*model\.eval\(\)"),
        (nn.Dropout(0.2), r"The closure is random.*Dropout is active in Dropout: call model\.eval\(\)"),
    ],
)
def test_train_mode_after_the_first_step_is_refused_and_leaves_no_trace(layer: nn.Module, message: str) -> None:
    model, step = switched(nn.Module.train, layer)
    before = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            step()
        assert difference(before, (dict(model.state_dict()), torch.get_rng_state())) == []
        assert all(module.training for module in model.modules())
    model.eval()
    assert math.isfinite(step().loss)


class Cache(nn.Module):
    """Keeps what it computed, in a buffer, as rotary embeddings do."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < len(x):
            self.table = torch.ones(len(x), 1)
        out: Tensor = x * self.table[: len(x)]
        return out


def test_a_cache_is_no_train_mode() -> None:
    cache = Cache()
    cache.table = torch.ones(64, 1)

    def forget(model: nn.Module) -> None:
        cache.table = torch.zeros(0)

    _, step = switched(forget, cache)
    assert math.isfinite(step().loss)


@pytest.mark.parametrize("by_function", [False, True])
def test_a_closure_that_calls_backward_leaves_grads_alone(by_function: bool) -> None:
    model = nn.Linear(3, 1)
    x = torch.ones(4, 3)
    kept = model.weight.grad = torch.full((1, 3), 7.0)

    def closure() -> Any:
        loss = model(x).square().mean()
        torch.autograd.backward(loss) if by_function else loss.backward()
        return loss

    optimizer = KSD(model.parameters())
    if by_function:
        with pytest.raises(ValueError, match=r"The closure wrote \.grad"):
            optimizer.step(closure)
    else:
        optimizer.step(closure)
    assert model.weight.grad is kept
    assert torch.equal(kept, torch.full((1, 3), 7.0))
    assert model.bias.grad is None


class Noisy(torch.utils.data.Dataset[Any]):
    """With random augmentation."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        return torch.full((3,), float(i)) + 0.1 * torch.randn(3), {"y": torch.zeros(1), "name": str(i)}


def test_random_augmentation_is_told() -> None:
    model = nn.Linear(3, 1)

    def closure(batch: Any) -> Any:
        r = model(batch[0]) - batch[1]["y"]
        return r.square().mean(), r

    with pytest.warns(UserWarning, match=r"The data set is random.*manual_seed\(index\)") as said:
        KSD(model.parameters(), krylov_dim=2).step(closure, Subsets(Noisy(), batch_size=20, seed=0))
    assert said[0].filename == __file__
