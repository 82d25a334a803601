"""From a row's source to tensors: inputs and targets of the training and the held-out set."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from experiments.supervised import recurrent
from experiments.supervised.curves import curves
from experiments.supervised.data import FASHION_MNIST, MNIST, Source, read
from experiments.supervised.speech import spoken_digits
from experiments.supervised.starcraft import starcraft
from experiments.supervised.text import characters

Sets: TypeAlias = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
_TRAIN, _HELD_OUT = 0, 1  # seeds of generated sets
_IMAGES = {"mnist": MNIST, "fashion": FASHION_MNIST}


def load(source: str, data: Path | None, sizes: tuple[int, int], length: int) -> Sets:
    """The sets, cut to ``sizes``; ``length`` is that of sequences, where there are any."""
    if source == "curves":
        return (curves(sizes[0], _TRAIN),), (curves(sizes[1], _HELD_OUT),)
    if source in ("adding", "order"):
        task = recurrent.adding if source == "adding" else recurrent.order
        return task(sizes[0], length, _TRAIN), task(sizes[1], length, _HELD_OUT)
    if source == "text":
        return characters(sizes, length)
    if source in _IMAGES:
        return images(_IMAGES[source], data, sizes)
    return {"spoken-digits": spoken_digits, "starcraft": starcraft}[source](data, sizes)


def images(source: Source, data: Path | None, sizes: tuple[int, int]) -> Sets:
    """[n, 784] images in [0, 1] and [n] classes."""
    arrays = read(source, data)

    def part(name: str, n: int) -> tuple[Tensor, Tensor]:
        x = torch.from_numpy(arrays[f"x_{name}"][:n]).reshape(n, -1)
        return x.float() / 255, torch.from_numpy(arrays[f"y_{name}"][:n]).long()

    return part("train", sizes[0]), part("test", sizes[1])
