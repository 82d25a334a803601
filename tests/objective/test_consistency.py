"""Closures that would make every comparison silently wrong are refused before the first step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from krylov_descent import KSD, Subsets


def data(n: int = 100) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def network(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


def cross_entropy(model: nn.Module, **options: Any) -> Callable[[Any], Any]:
    def closure(batch: Any) -> Any:
        z = model(batch[0])
        return F.cross_entropy(z, batch[1], **options), z

    return closure


def step(model: nn.Module, closure: Callable[[Any], Any]) -> Any:
    return KSD(model.parameters(), krylov_dim=3).step(closure, Subsets(data(), batch_size=50, fraction=0.2, seed=0))


def test_dropout_is_named() -> None:
    model = network(nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"closure is random.*Dropout is active in Dropout: call model.eval\(\)"):
        step(model, cross_entropy(model))
    model.eval()
    step(model, cross_entropy(model))


def test_noise_in_the_closure_is_found() -> None:
    model = network()

    def closure(batch: Any) -> Any:
        z = model(batch[0] + 0.01 * torch.randn_like(batch[0]))
        return F.cross_entropy(z, batch[1]), z

    with pytest.raises(ValueError, match=r"closure is random.*draw noise once"):
        step(model, closure)


def test_batch_norm_moves_buffers_and_they_are_put_back() -> None:
    model = network(nn.BatchNorm1d(8))
    before = {name: b.clone() for name, b in model.named_buffers()}
    with pytest.raises(ValueError, match=r"changes buffers.*BatchNorm1d.running_mean.*model.eval\(\)"):
        step(model, cross_entropy(model))
    for name, b in model.named_buffers():
        assert torch.equal(b, before[name]), name
    model.eval()
    step(model, cross_entropy(model))


def test_batch_norm_without_buffers_is_found_by_halves() -> None:
    model = network(nn.BatchNorm1d(8, track_running_stats=False))
    with pytest.raises(ValueError, match=r"not the weighted mean of its halves.*BatchNorm1d is in train mode"):
        step(model, cross_entropy(model))


def test_sum_is_found_by_halves() -> None:
    model = network()
    with pytest.raises(ValueError, match=re.escape("the loss is a sum (reduction='sum')")):
        step(model, cross_entropy(model, reduction="sum"))


def test_contrastive_loss_is_found_by_halves() -> None:
    model = network()

    def closure(batch: Any) -> Any:
        z = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(z @ z.T, torch.arange(len(z))), z

    with pytest.raises(ValueError, match="samples influence each other's loss"):
        step(model, closure)


def test_masked_mean_needs_its_weight() -> None:
    model = network()
    x, y = data()
    y = torch.where(torch.rand(100, generator=torch.Generator().manual_seed(2)) < 0.4, -100, y)
    sets = Subsets((x, y), batch_size=50, fraction=0.2, seed=0)

    def weighted(batch: Any) -> Any:
        z = model(batch[0])
        return F.cross_entropy(z, batch[1]), z, (batch[1] != -100).sum()

    with pytest.raises(ValueError, match=r"third value: loss, outputs, mask.sum\(\)"):
        KSD(model.parameters(), krylov_dim=3).step(cross_entropy(model), sets)
    KSD(model.parameters(), krylov_dim=3).step(weighted, sets)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("curvature", ["ggn", "hessian", "fisher"])
def test_batches_without_a_target(constant: bool, curvature: Any) -> None:
    """The first samples are masked whole: a loss of 0/0, or a constant without a graph."""
    model = network()
    x, y = data(400)
    y = torch.where(torch.arange(400) < 150, -100, y)
    sets = Subsets((x, y), batch_size=5, fraction=0.3, seed=0)

    def closure(batch: Any) -> Any:
        z = model(batch[0])
        count = (batch[1] != -100).sum()
        if constant and count == 0:
            return torch.zeros(()), z, count
        return F.cross_entropy(z, batch[1]), z, count

    optimizer = KSD(model.parameters(), krylov_dim=3, curvature=curvature)
    reports = [optimizer.step(closure, sets) for _ in range(3)]
    z = model(x[150:])
    assert optimizer.settle(closure, sets).loss == pytest.approx(F.cross_entropy(z, y[150:]).item(), rel=1e-4)
    assert reports[-1].loss < reports[0].loss


def test_class_weights_are_named() -> None:
    model = network()
    with torch.no_grad():
        list(model.parameters())[-2].mul_(10)
    weight = torch.tensor([1.0, 5.0, 0.2])
    with pytest.raises(ValueError, match=r"class_weights\[y\].sum\(\)"):
        step(model, cross_entropy(model, weight=weight))

    def weighted(batch: Any) -> Any:
        z = model(batch[0])
        return F.cross_entropy(z, batch[1], weight=weight), z, weight[batch[1]].sum()

    step(model, weighted)


def test_constant_nan_buffer_is_no_change() -> None:
    model = network()
    model.register_buffer("unknown", torch.tensor([torch.nan]))
    step(model, cross_entropy(model))


def test_loss_near_zero_is_compared_on_its_own_scale() -> None:
    """The halves' losses cancel: their rounding is that of their size, not of their sum."""
    model = network()

    def closure(batch: Any) -> Any:
        z = model(batch[0])
        sign = 1 - 2 * (batch[1] % 2).float()
        return (z.sum(1) * 0 + 1e3 * sign * (1 + 1e-6 * z.sum(1))).mean(), z

    x = data()[0]
    y = torch.arange(100) // 25 % 2  # halves of the probe of 50 have opposite signs
    KSD(model.parameters(), krylov_dim=3).step(closure, Subsets((x, y), batch_size=50, fraction=0.2, seed=0))


def test_terms_that_bypass_the_outputs_are_warned_of() -> None:
    model = network()

    def closure(batch: Any) -> Any:
        z = model(batch[0])
        return F.cross_entropy(z, batch[1]) + 0.1 * sum(p.square().sum() for p in model.parameters()), z

    with pytest.warns(UserWarning, match=r"\d+% of the gradient.*weight_decay"):
        step(model, closure)
    sets = Subsets(data(), batch_size=50, fraction=0.2, seed=0)
    KSD(model.parameters(), krylov_dim=3, curvature="hessian").step(closure, sets)


def test_full_batch_is_checked_without_halves() -> None:
    model = network(nn.BatchNorm1d(8, track_running_stats=False))
    x, y = data()
    # One batch is all there is, so that batch statistics are part of the function.
    KSD(model.parameters(), krylov_dim=3).step(lambda: cross_entropy(model)((x, y)))
    dropout = network(nn.Dropout(0.5))
    with pytest.raises(ValueError, match="closure is random"):
        KSD(dropout.parameters()).step(lambda: cross_entropy(dropout)((x, y)))


def test_only_the_first_step_is_probed() -> None:
    model = network()
    calls = []
    optimizer = KSD(model.parameters(), krylov_dim=3)
    sets = Subsets(data(), batch_size=50, fraction=0.2, seed=0)

    def closure(batch: Any) -> Any:
        calls.append(len(batch[0]))
        return cross_entropy(model)(batch)

    optimizer.step(closure, sets)
    assert calls[:4] == [50, 50, 25, 25]
    calls.clear()
    optimizer.step(closure, sets)
    assert 25 not in calls


def test_transformer_in_eval_mode_takes_one_path() -> None:
    """The inference-only kernel of nn.TransformerEncoder would run in forward-only passes, with other rounding."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Flatten(), nn.Linear(12, 3))
    model.eval()
    x = torch.randn(60, 3, 4)
    y = torch.randint(0, 3, (60,))
    sets = Subsets((x, y), batch_size=60, fraction=0.2, seed=0)
    optimizer = KSD(model.parameters(), krylov_dim=3)
    for _ in range(2):
        report = optimizer.step(cross_entropy(model), sets)
    assert optimizer.settle(cross_entropy(model), sets).loss <= report.loss * (1 + 1e-6)
    assert torch.backends.mha.get_fastpath_enabled()
