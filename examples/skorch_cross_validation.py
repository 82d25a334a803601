"""Cross-validate a digit classifier trained by KSD in skorch: a grid search over the weight decay, beside Adam.

    python examples/skorch_cross_validation.py --out accuracy.png

The data (1,797 digits of 8 × 8 pixels) comes with scikit-learn. The network is small and a fold has 1,198 samples, so
that each step is over all of them. Needs ``pip install 'krylov-descent[skorch,plot]'``.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import time
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from skorch import NeuralNetClassifier
from torch import nn

from krylov_descent import plot
from krylov_descent.integrations.skorch import KSDClassifier

DECAYS = (1e-4, 1e-3, 1e-2)
LEARNING_RATES = (3e-3, 1e-2, 3e-2)


class Digits(nn.Module):
    """64 → 32 → 10, tanh."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same start in every fold
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [n, 10]."""
        logits: torch.Tensor = self.layers(x)
        return logits


def searched(net: Any, grid: dict[str, Any], X: Any, y: Any) -> tuple[GridSearchCV, float]:
    """A grid search over three folds, refitted on everything, and its seconds."""
    start = time.perf_counter()
    folds = StratifiedKFold(3, shuffle=True, random_state=0)
    return GridSearchCV(net, grid, cv=folds, error_score="raise").fit(X, y), time.perf_counter() - start


def fold_scores(search: GridSearchCV) -> Any:
    """[settings, folds]."""
    return np.stack([search.cv_results_[f"split{k}_test_score"] for k in range(3)], 1)


def main() -> None:
    """Search, print and draw."""
    parser = argparse.ArgumentParser(description="Cross-validate a digit classifier trained by KSD.")
    parser.add_argument("--out", default="skorch_cross_validation.png", help="the picture (%(default)s)")
    parser.add_argument("--epochs", type=int, default=10, help="steps of KSD (%(default)s); Adam has 6 times as many")
    given = parser.parse_args()

    X, y = load_digits(return_X_y=True)
    X, y = (X / 16).astype(np.float32), y.astype(np.int64)
    common: dict[str, Any] = {"verbose": 0, "train_split": None}
    ksd, ksd_seconds = searched(
        KSDClassifier(Digits, max_epochs=given.epochs, **common), {"optimizer__weight_decay": DECAYS}, X, y
    )
    adam, adam_seconds = searched(
        NeuralNetClassifier(
            Digits,
            criterion=nn.CrossEntropyLoss,
            optimizer=torch.optim.Adam,
            max_epochs=6 * given.epochs,
            batch_size=128,
            **common,
        ),
        {"optimizer__lr": LEARNING_RATES},
        X,
        y,
    )

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    rows = [(f"KSD, decay {decay:g}", scores) for decay, scores in zip(DECAYS, fold_scores(ksd), strict=True)]
    rows += [(f"Adam, lr {lr:g}", scores) for lr, scores in zip(LEARNING_RATES, fold_scores(adam), strict=True)]
    for place, (name, scores) in enumerate(rows):
        colour = "tab:blue" if name.startswith("KSD") else "tab:gray"
        left.plot(100 * scores, [place] * 3, "o", color=colour, alpha=0.5)
        left.plot(100 * scores.mean(), place, "|", color=colour, markersize=22, markeredgewidth=3)
        print(f"{name:18s} {100 * scores.mean():.2f} % (folds {', '.join(f'{100 * s:.2f}' for s in scores)})")
    print(f"seconds: KSD {ksd_seconds:.1f}, Adam {adam_seconds:.1f}")
    left.set_yticks(range(len(rows)), [name for name, _ in rows])
    left.set_ylim(len(rows) - 0.5, -0.5)
    left.set_xlabel("accuracy on the fold left out, % (bar: mean of three)")
    left.set_title(f"{ksd_seconds:.0f} s of KSD, {adam_seconds:.0f} s of Adam")
    left.grid(axis="x", alpha=0.3)
    plot.convergence(ksd.best_estimator_.reports_, right)
    figure.savefig(given.out, dpi=130)
    print(f"picture: {given.out}")


if __name__ == "__main__":
    main()
