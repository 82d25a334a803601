"""Train an MNIST classifier with Krylov Subspace Descent, on one process or many; the losses are the same.

    python examples/distributed_mnist.py --data DIRECTORY
    torchrun --nproc-per-node 4 examples/distributed_mnist.py --data DIRECTORY
    torchrun --nproc-per-node 4 --max-restarts 3 examples/distributed_mnist.py --data DIRECTORY --checkpoint FILE

The directory holds ``mnist.npz`` with the arrays x_train, y_train, x_test and y_test. With ``--checkpoint``, a run
goes on where the last one ended, whatever the number of ranks of either.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from krylov_descent import KSD, Subsets, checkpoint
from krylov_descent.distributed.launch import init_process_group

VARIABLE = "KRYLOV_DESCENT_DATA"


def read(path: Path, part: str, samples: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[n, 784] images in [0, 1] and [n] digits, of the part "train" or "test"."""
    with np.load(path, allow_pickle=False) as arrays:
        x, y = (torch.from_numpy(arrays[f"{name}_{part}"][:samples]) for name in "xy")
    return x.flatten(1).to(dtype) / 255, y.long()


def options() -> argparse.Namespace:
    """The command line; ends the program with a remedy if there is no data."""
    parser = argparse.ArgumentParser(description="Train an MNIST classifier on one process or many.")
    parser.add_argument("--data", default=os.environ.get(VARIABLE), help=f"directory of mnist.npz (or ${VARIABLE})")
    parser.add_argument("--steps", type=int, default=10, help="in all, those of a checkpoint included (%(default)s)")
    parser.add_argument("--samples", type=int, default=10_000, help="of the training set (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--checkpoint", metavar="FILE", help="save after every step, and go on from it")
    parser.add_argument("--timeout", type=float, default=600, help="seconds until a rank that hangs is an error")
    given = parser.parse_args()
    if not given.data:
        parser.error(f"there is no data: name the directory of mnist.npz by --data, or set {VARIABLE}")
    if not (Path(given.data) / "mnist.npz").is_file():
        parser.error(f"mnist.npz is not in {given.data}: name its directory by --data, or set {VARIABLE}")
    return given


def main() -> None:
    """Train."""
    given = options()
    group = init_process_group(timeout=timedelta(seconds=given.timeout))  # None in a single process
    first = group is None or dist.get_rank() == 0

    # Every rank builds the same model, and sees all of the data: Subsets gives each its share.
    dtype = getattr(torch, given.dtype)
    path = Path(given.data) / "mnist.npz"
    train_set = read(path, "train", given.samples, dtype)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 100), nn.Tanh(), nn.Linear(100, 10)).to(dtype)
    optimizer = KSD(model.parameters(), weight_decay=1e-4, process_group=group)
    sets = Subsets(train_set, batch_size=1000, fraction=0.1, seed=0)

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]), logits

    done = 0
    if given.checkpoint and (extra := checkpoint.load(given.checkpoint, model, optimizer)) is not None:
        done = extra["steps"]
    for step in range(done, given.steps):
        report = optimizer.step(closure, sets)
        if first:
            print(f"{report.iteration:3d}  loss {report.loss:.12g}", flush=True)
        if given.checkpoint:
            checkpoint.save(given.checkpoint, model, optimizer, extra={"steps": step + 1})

    loss = optimizer.settle(closure, sets).loss  # a collective: every rank calls it
    if first:
        images, digits = read(path, "test", None, dtype)
        with torch.no_grad():
            wrong = (model(images).argmax(1) != digits).double().mean().item()
        print(f"end  loss {loss:.12g}  held-out error {wrong:.2%}")
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
