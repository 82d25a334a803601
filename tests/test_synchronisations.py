"""How often a step waits for its device, and how much it launches, on a device without hardware.

``python -m tests.test_synchronisations`` prints the counts by phase, and the synchronisations by line.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import DEEP, KSD, PAPER, GaussNewtonFlow, Growing, StepReport, Subsets
from tests.emulated_device import DEVICE, Count, OnDevice, counted, on_device

pytestmark = pytest.mark.filterwarnings("ignore:at..frobenius_norm")  # norm() asks for devices that torch knows

K = 20


class Configuration(NamedTuple):
    """An optimizer and its sets; the step of this number is counted, which verifies no rule and undoes no step."""

    make: Callable[[Any], Any]
    sets: Callable[[Any], Any]
    dtype: torch.dtype
    step: int


CONFIGURATIONS = {
    "default": Configuration(KSD, lambda data: Subsets(data, batch_size=640, seed=0), torch.float32, 3),
    "default, one batch": Configuration(KSD, lambda data: None, torch.float32, 3),
    "PAPER": Configuration(
        lambda params: KSD(params, **PAPER), lambda data: Subsets(data, batch_size=640, seed=0), torch.float32, 3
    ),
    "DEEP": Configuration(
        lambda params: KSD(params, **DEEP), lambda data: Growing(data, start=100, seed=0), torch.float32, 11
    ),
    "flow": Configuration(lambda params: GaussNewtonFlow(params, rows=100), lambda data: None, torch.float64, 11),
}


@functools.cache
def trained(name: str, *, on_cpu: bool = False) -> tuple[list[StepReport], Count]:
    """Return the reports, and the count of the last step."""
    make, sets_of, dtype, steps = CONFIGURATIONS[name]
    place: Callable[[Any], Any] = (lambda x: x) if on_cpu else on_device
    torch.manual_seed(0)
    layers = nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
    model = place(nn.Sequential(*layers).to(dtype))
    x = torch.randn(640, 6, dtype=dtype)
    data = place(x), place(torch.sin(x[:, :2] * x[:, 2:4] + x[:, 4:]))
    optimizer, sets = make(model.parameters()), sets_of(data)

    def closure(batch: Any = data) -> tuple[Tensor, Tensor]:
        r = model(batch[0]) - batch[1]
        return r.square().mean(), r

    def step() -> StepReport:
        report: StepReport = optimizer.step(closure) if sets is None else optimizer.step(closure, sets)
        return report

    with counted():
        reports = [step() for _ in range(steps)]
    with counted() as count:
        reports.append(step())
    return reports, count


def budget(name: str, report: StepReport) -> int:
    """Return the most synchronisations that a step may have.

    A basis vector is decided on by one, an evaluation by one, and the end of a line needs its gradient. The others are
    few: whether the user moved the parameters; the loss and the gradient's length; the scale of D; H̄ of the last rows.
    """
    if name == "DEEP":
        return 18 + report.inner_evaluations
    if name == "flow":
        return 9 + 3 * report.inner_evaluations  # loss, what is left of the residuals, the length of the correction
    return K + report.inner_evaluations + report.inner_iterations + 12


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_steps_keep_to_their_budget_of_synchronisations(name: str) -> None:
    reports, count = trained(name)
    assert reports[-1].accepted
    assert sum(count.waits.values()) <= budget(name, reports[-1]), "\n".join(count.by_line())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_device_computes_what_the_cpu_computes(name: str) -> None:
    losses = [[report.loss for report in trained(name, on_cpu=on_cpu)[0]] for on_cpu in (False, True)]
    assert losses[0] == losses[1]


def test_launches_do_not_grow_with_the_number_of_parameters() -> None:
    """Beside the closure's own operations and their derivatives."""
    reports, count = trained("default")
    evaluations, rows = reports[-1].inner_evaluations, K + 1
    own = [n for (phase, line), n in count.launches.items() if not line.startswith(("objective", "curvature"))]
    assert sum(own) <= 16 * rows + 10 * evaluations + 220


def test_the_counter_counts_reads_and_refuses_mixed_devices() -> None:
    x = on_device(torch.arange(6.0))
    with counted() as count:
        y = x * 2 + 1
        assert y.device == DEVICE
        assert isinstance(y, OnDevice)
        assert float(y[0]) == 1
        assert y.tolist() == [1, 3, 5, 7, 9, 11]
        assert bool((y > 0).all())
        assert len(y[y > 4]) == 4
        assert y.cpu().device.type == "cpu"
        torch.ones(2).to(DEVICE, non_blocking=True)
        assert torch.ones(2).to(DEVICE).device == DEVICE
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(6)
    kinds = sorted(kind for _, kind, _ in count.waits.elements())
    assert kinds == ["_local_scalar_dense"] * 2 + ["device to host"] * 2 + ["host to device", "index of truth values"]
    assert sum(count.launches.values()) >= 5


if __name__ == "__main__":
    for configuration in CONFIGURATIONS:
        of_steps, counts = trained(configuration)
        last = of_steps[-1]
        sys.stdout.write(f"{configuration}: {last.inner_evaluations} evaluations, {last.inner_iterations} iterations\n")
        for phase, (waits, launches) in counts.phases().items():
            sys.stdout.write(f"  {phase}: {waits} synchronisations, {launches} launches\n")
        sys.stdout.writelines(f"  {line}\n" for line in counts.by_line())
