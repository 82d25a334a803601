"""What the tests ask of ranks; in a module of its own, which the processes import."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from reliability.training import WIDTHS, data_of, dense
from torch import Tensor, nn

from krylov_descent import KSD, Growing, StepReport, Subsets
from krylov_descent.base import CurvatureOptimizer
from krylov_descent.distributed import Ranks
from krylov_descent.distributed.process_group import GroupComm


def model_of(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    if kind in ("lstm", "cube"):
        return (Recurrent() if kind == "lstm" else Cube()).to(dtype)
    return dense({"mlp": WIDTHS, "tiny": (1, 1)}[kind], dtype)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(7, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(x[:, None, :].expand(-1, 3, -1))
        out: Tensor = self.head(h[:, -1])
        return out


class Cube(nn.Module):
    """So flat where it begins that Gauss–Newton's step goes beyond all measure."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.1, 0.2]))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.w**3).sum()


def training(
    group: Any,
    *,
    kind: str = "mlp",
    n: int = 103,
    dtype: torch.dtype = torch.float64,
    fraction: float | None = 0.2,
    gradient_fraction: float = 1.0,
    batch_size: int = 16,
    wire: torch.dtype | None = None,
    full_batch: bool = False,
    growing: int = 0,
    method: type[CurvatureOptimizer] = KSD,
    **settings: Any,
) -> tuple[nn.Module, CurvatureOptimizer, Callable[[], StepReport]]:
    """A model, its optimizer, and what takes a step."""
    model = model_of(kind, dtype)
    first = next(model.parameters())
    inputs, outputs = {"mlp": (7, 3), "lstm": (7, 3), "tiny": (1, 1), "cube": (1, 1)}[kind]
    data = data_of(n, inputs, outputs, first.dtype)
    sets = Subsets(data, batch_size=batch_size, fraction=fraction, gradient_fraction=gradient_fraction, seed=3)
    if growing:
        sets = Growing(data, batch_size=batch_size, start=growing, seed=3)
    if method is KSD:
        settings = {"krylov_dim": 5, **settings}
    optimizer = method(model.parameters(), **settings, process_group=Ranks(group, wire=wire))  # type: ignore[call-arg]

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch[0])
        return F.mse_loss(z, batch[1]), z

    if full_batch:
        rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
        own = tuple(x[rank * n // ranks : (rank + 1) * n // ranks] for x in data)
        return model, optimizer, lambda: optimizer.step(lambda: closure(own))
    return model, optimizer, lambda: optimizer.step(closure, sets)


def train(
    group: Any, *, steps: int = 5, warns: bool = False, from_the_start: bool = False, **settings: Any
) -> dict[str, Any]:
    """Some steps, each from the first weights if so; what came out, the same on every rank."""
    if warns:
        warnings.simplefilter("ignore")
    model, _, step = training(group, **settings)
    start = copy.deepcopy(model.state_dict())
    reports = []
    for _ in range(steps):
        if from_the_start:
            model.load_state_dict(start)
        reports.append(step())
    return outcome(model, reports)


def broken_off(group: Any) -> tuple[float, float, float]:
    """The loss of a run that is left by break, that of its last report, and that of settling by hand."""
    model = model_of("mlp", torch.float64)
    optimizer = KSD(model.parameters(), krylov_dim=5, process_group=group)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch[0])
        return F.mse_loss(z, batch[1]), z

    sets = Subsets(data_of(103, 7, 3, torch.float64), batch_size=16, fraction=0.2, seed=3)
    run = optimizer.run(closure, sets)
    for report in run:
        if report.iteration == 2:
            break
    return run.loss, report.loss, optimizer.settle(closure, sets).loss


def flat(model: nn.Module) -> Tensor:
    """θ."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def scattered(group: Any) -> list[float]:
    """How far the sum of thirds over ranks is off on a narrow wire: as gradients go, and as factors do."""
    comm = GroupComm(group, torch.bfloat16)
    x = torch.full((10,), 1 / 3, dtype=torch.float64)
    sums = [comm.all_gather(comm.reduce_scatter(x, exact=exact), 10) for exact in (False, True)]
    return [float((y - comm.ranks / 3).abs().max()) for y in sums]


def uneven(group: Any) -> list[float]:
    """This rank's part of a sum over ranks, where rank r has 3r numbers."""
    comm = GroupComm(group)
    sizes = [3 * r for r in range(comm.ranks)]
    x = torch.arange(float(sum(sizes))) * (comm.rank + 1)
    return comm.reduce_scatter(x, sizes=sizes).tolist()


def added_up(group: Any) -> float:
    """256 of rank 0 and 1 of each other rank, which bfloat16 has, added over a bfloat16 wire."""
    comm = GroupComm(group, torch.bfloat16)
    x = torch.full((10,), 256.0 if comm.rank == 0 else 1.0)
    return float(comm.reduce_scatter(x).max())


def wrapped(group: Any) -> None:
    """A model wrapped as one does for other optimizers."""
    model = nn.parallel.DistributedDataParallel(model_of("mlp", torch.float64), process_group=group)
    x, y = data_of(20, 7, 3, torch.float64)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        z = model(batch[0])
        return F.mse_loss(z, batch[1]), z

    KSD(model.parameters(), process_group=group).step(closure, Subsets((x, y), batch_size=5, fraction=0.5, seed=0))


def outcome(model: nn.Module, reports: list[StepReport]) -> dict[str, Any]:
    theta = flat(model)
    return {
        "theta": theta,
        "hash": hashlib.sha256(theta.numpy().tobytes()).hexdigest(),
        "losses": [report.loss for report in reports],
        "after": [report.search_loss_after for report in reports],
        "ritz": [report.ritz_values for report in reports],
        "evaluations": [report.inner_evaluations for report in reports],
        "iterations": [report.inner_iterations for report in reports],
        "accepted": [report.accepted for report in reports],
        "cost": [report.sample_gradients for report in reports],
        "sent": [report.bytes_sent for report in reports],
        "B": [report.set_sizes.get("B") for report in reports],
        "rows": [len(report.ritz_values) for report in reports],
    }
