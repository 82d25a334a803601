"""KSD in Lightning's own loop: the steps of a plain loop, exact resume, callbacks, ranks, and refusals."""

from __future__ import annotations

import doctest
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from krylov_descent import DEEP, KSD, GaussNewtonFlow, Growing, StepReport, Subsets

pytest.importorskip("lightning")

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from krylov_descent.integrations.lightning import KSDModule, StepsLoader

pytestmark = [
    # lightning 2.6 builds torch.utils._pytree.LeafSpec, which torch 2.13 deprecates, whenever it is given a loader.
    pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning"),
    # Lightning counts processors and asks for loader workers.
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    # Resumed runs write their checkpoints elsewhere, or none.
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint"),
]

KRYLOV_DIM = 8


def wave(samples: int = 600) -> tuple[Tensor, Tensor]:
    x = torch.rand(samples, 2, generator=torch.Generator().manual_seed(1))
    return x, torch.sin(3 * x[:, :1]) * x[:, 1:]


def sets(samples: int = 600) -> Subsets:
    return Subsets(wave(samples), batch_size=200, fraction=0.2, seed=0)


class Net(KSDModule):
    def __init__(self, **ksd: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 1))
        self.ksd = {"krylov_dim": KRYLOV_DIM, **ksd}
        self.reports: list[StepReport] = []

    def loss_and_outputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        residual = self.net(x) - y
        return residual.square().mean(), residual

    def configure_optimizers(self) -> Any:
        return KSD(self.parameters(), **self.ksd)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.reports.append(outputs["report"])


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_and_outputs(batch)[0])


def trainer(directory: Path, **settings: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False}
    shown = {"enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(**{"accelerator": "cpu", "default_root_dir": str(directory), **quiet, **shown, **settings})


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(xs: list[Tensor], ys: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def test_the_steps_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    fitted = Net()
    fit = trainer(tmp_path, max_epochs=3)
    fit.fit(fitted, StepsLoader(sets(), steps=2))

    plain = Net().eval()
    optimizer = KSD(plain.parameters(), krylov_dim=KRYLOV_DIM)
    reports = [optimizer.step(plain.loss_and_outputs, sets()) for _ in range(6)]
    settlement = optimizer.settle(plain.loss_and_outputs, sets())

    assert [r.loss for r in fitted.reports] == [r.loss for r in reports]
    assert same(parameters(fitted), parameters(plain))
    assert fitted.settlement == settlement
    assert settlement.loss < 0.02 * reports[0].loss
    assert fit.global_step == 6
    assert fit.current_epoch == 3
    assert all(module.training for module in fitted.modules())  # eval mode was for the steps alone


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = Net()
    trainer(tmp_path, max_steps=7).fit(whole, StepsLoader(sets(), steps=3))

    files = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    broken = Net()
    first = trainer(tmp_path, max_steps=5, callbacks=[files], enable_checkpointing=True)
    first.fit(broken, StepsLoader(sets(), steps=3))
    for step in (4, 3):  # within an epoch, and at its end
        resumed = Net()
        second = trainer(tmp_path, max_steps=7)
        second.fit(resumed, StepsLoader(sets(), steps=3), ckpt_path=str(tmp_path / f"step={step}.ckpt"))
        assert [r.iteration for r in resumed.reports] == list(range(step, 7))
        assert [r.loss for r in resumed.reports] == [r.loss for r in whole.reports[step:]]
        assert same(parameters(resumed), parameters(whole))
        assert second.global_step == 7
    loaded = Net.load_from_checkpoint(tmp_path / "step=4.ckpt").eval()
    assert loaded.loss_and_outputs(wave())[0].item() == pytest.approx(whole.reports[4].loss, rel=1e-5)


def test_a_validated_run_resumes_from_its_last_checkpoint(tmp_path: Path) -> None:
    held_out = DataLoader(TensorDataset(*wave(100)), batch_size=100)

    def fit(model: Net, epochs: int, directory: Path, **resume: Any) -> Net:
        callbacks = [ModelCheckpoint(directory, monitor="val_loss", save_last=True), EarlyStopping("val_loss")]
        made = trainer(tmp_path, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=True)
        made.fit(model, StepsLoader(sets()), held_out, **resume)
        return model

    whole = fit(Validated(), 4, tmp_path / "whole")
    fit(Validated(), 2, tmp_path / "part")
    resumed = fit(Validated(), 4, tmp_path / "rest", ckpt_path=str(tmp_path / "part" / "last.ckpt"))
    assert [r.loss for r in resumed.reports] == [r.loss for r in whole.reports[2:]]
    assert same(parameters(resumed), parameters(whole))


def test_callbacks_and_loggers_see_the_steps(tmp_path: Path) -> None:
    class Seen(Callback):
        losses: list[float] = []  # noqa: RUF012

        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
            self.losses.append(float(outputs["loss"]))

    model = Validated()
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss")
    stop = EarlyStopping("train_loss", stopping_threshold=1e-3, patience=100, check_on_train_epoch_end=True)
    fit = trainer(
        tmp_path,
        max_epochs=40,
        log_every_n_steps=1,
        logger=CSVLogger(tmp_path, name="log", version=0),
        callbacks=[Seen(), best, stop],
        enable_checkpointing=True,
    )
    fit.fit(model, StepsLoader(sets()), DataLoader(TensorDataset(*wave(100)), batch_size=100))
    assert fit.global_step < 40
    assert Seen.losses[-1] <= 1e-3 < Seen.losses[-2]
    assert best.best_model_score is not None
    assert float(best.best_model_score) < 2e-3

    rows = (tmp_path / "log" / "version_0" / "metrics.csv").read_text().splitlines()
    names = rows[0].split(",")
    expected = {
        "train_loss",
        "val_loss",
        *(f"ksd/{n}" for n in ("grad_norm", "search_loss", "evaluations", "accepted")),
    }
    assert expected <= set(names)
    logged = [row.split(",")[names.index("train_loss")] for row in rows[1:]]
    assert [float(x) for x in logged if x] == pytest.approx(Seen.losses, rel=1e-6)


def test_full_batch_in_float64(tmp_path: Path) -> None:
    model = Net(krylov_dim=20)
    fit = trainer(tmp_path, max_steps=20, precision="64-true")
    fit.fit(model, DataLoader(TensorDataset(*wave(100)), batch_size=100))  # float32, which the trainer converts
    assert model.reports[0].set_sizes == {}
    assert model.reports[-1].loss < 1e-4 * model.reports[0].loss
    assert model.settlement is None


class Flow(Net):
    def configure_optimizers(self) -> Any:
        return GaussNewtonFlow(self.parameters())


def test_the_flow_goes_as_in_a_plain_loop(tmp_path: Path) -> None:
    fitted, plain = Flow(), Flow().double().eval()
    fit = trainer(tmp_path, max_steps=6, precision="64-true")
    fit.fit(fitted, DataLoader(TensorDataset(*wave(100)), batch_size=100))
    optimizer, batch = GaussNewtonFlow(plain.parameters()), tuple(x.double() for x in wave(100))
    reports = [optimizer.step(lambda: plain.loss_and_outputs(batch)) for _ in range(6)]
    assert [r.loss for r in fitted.reports] == [r.loss for r in reports]
    assert reports[-1].loss < 0.3 * reports[0].loss


def test_sets_in_float64(tmp_path: Path) -> None:
    model = Net()
    trainer(tmp_path, max_steps=2, precision="64-true").fit(model, StepsLoader(sets()))
    assert next(model.parameters()).dtype == torch.float64
    assert model.reports[1].loss < model.reports[0].loss


def test_small_batches_are_warned_of(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(*wave(200)), batch_size=100)
    with pytest.warns(UserWarning, match="has 2 batches, and each step of KSD fits one of them alone"):
        trainer(tmp_path, max_steps=2).fit(Net(), loader)


class Adam(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = KSD(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (Net, {"gradient_clip_val": 0.5}, r"gradient_clip_val=0\.5.*no gradient to clip"),
        (Net, {"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2.*micro-batches"),
        (Net, {"precision": "bf16-mixed"}, r"precision='bf16-mixed'.*torch\.autocast around it inside"),
        (Adam, {}, r"returned Adam; KSDModule needs one KSD\(...\) or GaussNewtonFlow"),
        (Scheduled, {}, r"returned a scheduler; KSD has no learning rate"),
    ],
)
def test_refusals(tmp_path: Path, model: type[Net], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, max_steps=2, **settings).fit(model(), StepsLoader(sets()))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    class Empty(KSDModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 1)

    with pytest.raises(NotImplementedError, match="Empty has no loss_and_outputs"):
        trainer(tmp_path, max_steps=1).fit(Empty(), StepsLoader(sets()))
    with pytest.raises(ValueError, match="sets is a list"):
        StepsLoader([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="steps=0"):
        StepsLoader(sets(), steps=0)


class OnRanks(Net):
    def configure_optimizers(self) -> Any:
        return KSD(self.parameters(), krylov_dim=4, process_group=self.process_group)

    def on_train_end(self) -> None:
        super().on_train_end()
        if self.global_rank == 0:
            torch.save([r.loss for r in self.reports], Path(self.trainer.default_root_dir) / "losses.pt")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_ranks_step_together_and_resume(tmp_path: Path) -> None:
    ranks: dict[str, Any] = {"strategy": "ddp_fork", "devices": 2}

    def losses(directory: Path, steps: int, ckpt: Path | None = None, **settings: Any) -> list[float]:
        model = OnRanks()
        fit = trainer(directory, max_steps=steps, enable_checkpointing="callbacks" in settings, **settings)
        fit.fit(model, StepsLoader(sets(200)), ckpt_path=None if ckpt is None else str(ckpt))
        found: list[float] = torch.load(directory / "losses.pt")
        return found

    files = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = losses(tmp_path, 4, callbacks=[files], **ranks)
    assert len(whole) == 4
    assert whole[-1] < 0.2 * whole[0]
    assert losses(tmp_path, 4, tmp_path / "step=2.ckpt", **ranks) == whole[2:]
    # On one process sums are taken in another order.
    assert losses(tmp_path, 3, tmp_path / "step=2.ckpt") == pytest.approx(whole[2:3], rel=1e-5)
    with pytest.raises(Exception, match="2 processes, and KSD steps with 1"):
        trainer(tmp_path, max_steps=1, **ranks).fit(Net(), StepsLoader(sets(200)))


class DeepOnRanks(OnRanks):
    def configure_optimizers(self) -> Any:
        return KSD(self.parameters(), **DEEP, process_group=self.process_group)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_preconditioner_that_remembers_resumes_on_ranks(tmp_path: Path) -> None:
    def losses(directory: Path, ckpt: Path | None = None, **settings: Any) -> list[float]:
        fit = trainer(
            directory, max_steps=12, enable_checkpointing=ckpt is None, strategy="ddp_fork", devices=2, **settings
        )
        growing = Growing(wave(200), batch_size=20, start=60, seed=0)
        fit.fit(DeepOnRanks(), StepsLoader(growing), ckpt_path=None if ckpt is None else str(ckpt))
        found: list[float] = torch.load(directory / "losses.pt")
        return found

    files = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = losses(tmp_path, callbacks=[files])
    assert len(whole) == 12
    saved = torch.load(tmp_path / "step=9.ckpt")["krylov_descent"][2]
    assert any(name.endswith("_inverse") for name in saved)  # of whichever rank made it
    for step in (8, 9):  # one of them is followed by a step with the inverses that there are
        assert losses(tmp_path, tmp_path / f"step={step}.ckpt") == whole[step:]


def test_docstrings_run() -> None:
    from krylov_descent.integrations import lightning as integration

    assert doctest.testmod(integration, extraglobs={"torch": torch}).failed == 0
