"""Reports: used like losses, and the same after they were written."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Settlement, StepReport


@pytest.fixture(scope="module")
def reports() -> list[StepReport]:
    w = nn.Parameter(torch.tensor([3.0, -2.0], dtype=torch.float64))

    def closure() -> tuple[Tensor, Tensor]:
        return (w**4).mean(), w

    optimizer = KSD([w], krylov_dim=1)
    return [optimizer.step(closure) for _ in range(4)]


def test_a_report_is_handled_like_a_loss(reports: list[StepReport]) -> None:
    losses = [report.item() for report in reports]
    assert losses == [report.loss for report in reports]
    assert all(type(loss) is float for loss in losses)
    assert losses[0] == 48.5
    assert math.log(reports[0]) == math.log(48.5)
    assert min(reports) is reports[losses.index(min(losses))]
    assert sorted(reports, reverse=True) == reports  # it falls
    assert sum(reports) / len(reports) == sum(losses) / len(losses)
    total = 0.0
    for report in reports:
        total += report
    assert total == sum(losses)


def test_formats(reports: list[StepReport]) -> None:
    report = reports[0]
    assert f"{report:.3e}|{report:>8.1f}" == "4.850e+01|    48.5"
    assert f"{report}" == str(report)
    assert str(report).startswith("step 0 | loss 48.5")
    assert f"{Settlement(0.25, True):.0%}" == "25%"
    with pytest.raises(ValueError, match="format code 'd'"):
        f"{report:d}"


@pytest.mark.parametrize("other", [2, 0.5, Fraction(1, 2), np.float32(2), Settlement(4.0, True)])
def test_arithmetic_on_both_sides(other: float | Settlement) -> None:
    settled, x = Settlement(0.5, True), float(other)
    assert (settled + other, settled - other, settled * other, settled / other) == (0.5 + x, 0.5 - x, 0.5 * x, 0.5 / x)
    assert (other + settled, other - settled, other * settled, other / settled) == (x + 0.5, x - 0.5, x * 0.5, x / 0.5)
    assert (-settled, abs(Settlement(-3.0, True))) == (-0.5, 3.0)


@pytest.mark.parametrize("x", [0.25, 0.5, 1.0, math.nan])
def test_comparisons(x: float) -> None:
    settled, loss = Settlement(0.5, True), 0.5
    for other in (x, Settlement(x, True)):
        assert (settled < other, settled <= other) == (loss < x, loss <= x)
        assert (settled > other, settled >= other) == (loss > x, loss >= x)
        assert (other < settled, other >= settled) == (x < loss, x >= loss)


def test_what_is_no_number_is_refused(reports: list[StepReport]) -> None:
    with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for \+: 'StepReport' and 'str'"):
        reports[0] + "1"  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'<=' not supported"):
        assert reports[0] <= None  # type: ignore[arg-type]


def test_equality_is_that_of_all_fields(reports: list[StepReport]) -> None:
    report = reports[0]
    assert report == dataclasses.replace(report)
    assert report != dataclasses.replace(report, notes=("other",))
    assert report != report.loss  # type: ignore[comparison-overlap]
    assert Settlement(0.5, True) != Settlement(0.5, False)
