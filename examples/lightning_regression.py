"""Learn where the hand of a robot arm is from the angles of its joints, in PyTorch Lightning.

    python examples/lightning_regression.py --out arm.png

The trainer validates after each step, keeps the best checkpoint and stops early, as with any optimizer. Half way the
run is stopped and resumed from its checkpoint, as after a crash. The picture shows the losses, and a circle that the
hand is to draw as the network sees it, before and after training.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from krylov_descent import KSD, StepReport, Subsets, plot
from krylov_descent.integrations.lightning import KSDModule, StepsLoader

LINKS = torch.tensor([1.0, 0.8, 0.5])  # lengths

# lightning 2.6 uses what torch 2.13 deprecates, and asks for workers that tensors in memory do not need.
warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
warnings.filterwarnings("ignore", message=".*does not have many workers.*")
warnings.filterwarnings("ignore", message="Checkpoint directory .* is not empty")  # that of the run to resume


def hand(angles: Tensor) -> Tensor:
    """[n, 3] angles between the links → [n, 2] position of the hand."""
    directions = angles.cumsum(1)
    return torch.stack([(LINKS * directions.cos()).sum(1), (LINKS * directions.sin()).sum(1)], dim=1)


def poses(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random angles, and where the hand is."""
    angles = (2 * torch.rand(n, 3, generator=torch.Generator().manual_seed(seed)) - 1) * 2.0
    return angles, hand(angles)


def reaching(points: Tensor) -> Tensor:
    """[n, 2] points → [n, 3] angles that reach them, by Gauss–Newton from one point to the next."""
    angles = torch.tensor([[-0.6, 1.2, 0.9]], dtype=torch.float64)
    found = []
    for point in points.double():
        for _ in range(30):
            jacobian = torch.func.jacrev(lambda a: hand(a[None])[0])(angles[0])
            angles = angles + torch.linalg.pinv(jacobian) @ (point - hand(angles)[0])
        found.append(angles)
    return torch.cat(found).float()


class Arm(KSDModule):
    """All that Lightning needs to train with KSD: a loss with the model outputs, and an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
        self.reports: list[StepReport] = []
        self.held_out: list[float] = []

    def loss_and_outputs(self, batch: Any) -> tuple[Tensor, Tensor]:
        """The mean squared error, and the residuals."""
        angles, position = batch
        residual = self.net(angles) - position
        return residual.square().sum(1).mean(), residual

    def configure_optimizers(self) -> KSD:
        """The paper's K, and no other setting."""
        return KSD(self.parameters(), krylov_dim=20)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss on poses that training does not see."""
        loss = self.loss_and_outputs(batch)[0]
        self.log("val_loss", loss, prog_bar=True)
        if not self.trainer.sanity_checking:
            self.held_out.append(float(loss))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep the reports for the picture."""
        self.reports.append(outputs["report"])


def fit(model: Arm, steps: int, directory: str, ckpt_path: str | None = None) -> ModelCheckpoint:
    """Train for so many steps in all, each an epoch; the checkpoints that were kept."""
    kept = ModelCheckpoint(directory, monitor="val_loss", save_last=True)
    stop = EarlyStopping("val_loss", patience=10)
    trainer = Trainer(
        max_epochs=steps,
        callbacks=[kept, stop],
        log_every_n_steps=1,
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    sets = Subsets(poses(4000, seed=0), batch_size=2000, fraction=0.2, seed=0)  # A = everything, B and C 800 each
    held_out = DataLoader(TensorDataset(*poses(1000, seed=1)), batch_size=1000)
    trainer.fit(model, StepsLoader(sets), held_out, ckpt_path=ckpt_path)
    return kept


def draw(model: Arm, before: Arm, resumed_at: int, out: Path) -> None:
    """Losses to the left, the circle to the right."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    plot.convergence(model.reports, left, label="4,000 poses, before each step")
    left.plot(range(1, len(model.held_out) + 1), model.held_out, "k--", linewidth=1, label="1,000 others")
    left.axvline(resumed_at, color="0.5", linestyle=":", linewidth=1.5, label="resumed from a checkpoint")
    left.set_title("Mean squared distance from the hand")
    left.legend(fontsize=8.5)

    turn = torch.linspace(0, 2 * torch.pi, 121)
    circle = torch.tensor([1.2, 0.6]) + 0.5 * torch.stack([turn.cos(), turn.sin()], dim=1)
    angles = reaching(circle)
    links = torch.cat([torch.zeros(1), LINKS])
    directions = torch.cat([torch.zeros(len(angles), 1), angles.cumsum(1)], dim=1)
    joints = torch.stack([(links * directions.cos()).cumsum(1), (links * directions.sin()).cumsum(1)], dim=2)
    for arm in joints[:-1:15]:
        right.plot(*arm.T.tolist(), "-o", color="0.8", markersize=3, linewidth=2)
    with torch.no_grad():
        right.plot(*before.net(angles).T.tolist(), color="#D55E00", label="untrained network")
        right.plot(*circle.T.tolist(), color="0.4", linewidth=5, alpha=0.4, label="the hand")
        right.plot(*model.net(angles).T.tolist(), color="#0072B2", label="trained network")
    right.set_aspect("equal")
    right.set_title("A circle, from the angles of the joints")
    right.legend(fontsize=8.5, loc="upper left")
    figure.savefig(out, dpi=150)


def main() -> None:
    """Train, resume, draw."""
    parser = argparse.ArgumentParser(description="Learn where the hand of a robot arm is, in PyTorch Lightning.")
    parser.add_argument("--out", type=Path, default=Path("lightning_regression.png"))
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()

    seed_everything(0, verbose=False)
    before, model = Arm(), Arm()
    before.load_state_dict(model.state_dict())
    with tempfile.TemporaryDirectory() as directory:
        fit(model, given.steps // 2, directory)
        resumed = Arm()
        resumed.reports, resumed.held_out = model.reports, model.held_out
        kept = fit(resumed, given.steps, directory, str(Path(directory) / "last.ckpt"))
        print(f"{len(resumed.reports)} steps; best held-out loss {float(kept.best_model_score or 0):.3g}")
    draw(resumed, before, given.steps // 2, given.out)
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
