"""The problems of the experiments: data, network, loss and error of each, by name.

Where the paper's data are not public, a row is the nearest that is: spoken-digits for Aurora, starcraft for its own
StarCraft table. CURVES has a code of 5 in the paper's table and of 6 in all other work: both are here. The paper has no
convolutions, no LSTM and no transformer: they are of the study of deep networks alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from experiments.supervised import losses, pretraining, recurrent, sources, text
from experiments.supervised.characters import CharLSTM, CharTransformer
from experiments.supervised.networks import autoencoder, convolutional, dense, usual

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Data, network and measures; ``batch[0]`` is the input, ``batch[-1]`` the target: one tensor in autoencoders."""

    name: str
    train: tuple[Tensor, ...]
    held_out: tuple[Tensor, ...]
    make_model: Callable[[int], nn.Module]  # of a seed
    loss: Loss  # mean over cases
    error: Loss  # one figure per case
    error_name: str
    batch_size: int  # largest micro-batch of second-order methods, and of evaluations
    weight_decay: float  # c of ½c‖θ‖²
    evaluated: int = 10_000  # points are evaluated on the first training samples, at most so many
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # about data that differ between installations


@dataclasses.dataclass(frozen=True)
class Config:
    """A row; ``samples`` and ``held_out`` are the sizes of its whole sets."""

    source: Literal["curves", "mnist", "spoken-digits", "starcraft", "adding", "order", "fashion", "text"]
    network: Literal["autoencoder", "classifier", "pretrained", "recurrent", "conv", "lstm", "transformer"]
    widths: tuple[int, ...]
    samples: int
    held_out: int
    batch_size: int
    weight_decay: float = 2e-5  # Martens' (2010) published code; biases included
    length: int = 0  # T of sequences
    epochs: int = 50  # of contrastive divergence, for each layer
    evaluated: int = 10_000


_MNIST = functools.partial(Config, "mnist", samples=60_000, held_out=10_000, batch_size=2000)
_CURVES = functools.partial(Config, "curves", "autoencoder", samples=20_000, held_out=10_000, batch_size=2000)
_RECURRENT = functools.partial(
    Config, network="recurrent", samples=10_000, held_out=2000, batch_size=1000, weight_decay=0.0
)
_TEXT = functools.partial(
    Config, "text", samples=10_000, held_out=1000, batch_size=500, weight_decay=0.0, length=64, evaluated=2000
)
PROBLEMS: Mapping[str, Config] = {
    "curves": _CURVES((784, 400, 200, 100, 50, 25, 6)),
    "curves5": _CURVES((784, 400, 200, 100, 50, 25, 5)),
    "mnist-ae": _MNIST("autoencoder", (784, 1000, 500, 250, 30)),
    "mnist-class": _MNIST("classifier", (784, 500, 500, 2000, 10)),
    "mnist-pretrained": _MNIST("pretrained", (784, 500, 500, 2000, 10)),
    "spoken-digits": Config(
        "spoken-digits", "classifier", (351, 512, 1024, 1536, 60), samples=100_000, held_out=20_000, batch_size=2000
    ),
    "starcraft": Config("starcraft", "classifier", (992, 10, 7), samples=743, held_out=83, batch_size=1000),
    "adding-50": _RECURRENT("adding", widths=(2, 100, 1), length=50),
    "adding-100": _RECURRENT("adding", widths=(2, 100, 1), length=100),
    "order-50": _RECURRENT("order", widths=(6, 100, 4), length=50),
    "order-100": _RECURRENT("order", widths=(6, 100, 4), length=100),
    "fashion-conv": Config("fashion", "conv", (784, 64, 10), 60_000, 10_000, batch_size=1000, weight_decay=0.0),
    "char-lstm": _TEXT("lstm", (96, 32, 64)),
    "char-transformer": _TEXT("transformer", (96, 64)),
}


def load_problem(name: str, data: Path | None = None, samples: int | None = None) -> Problem:
    """Load a row; ``samples`` cuts its training set to the first so many cases and the held-out set to no more.

    Raises:
        ValueError: there is no such row, samples is not positive, or a data file is not the one that is known.
        FileNotFoundError: the data directory or a file of it is missing.
    """
    if name not in PROBLEMS:
        raise ValueError(f"no problem is named {name!r}: choose from {', '.join(PROBLEMS)}")
    if samples is not None and samples < 1:
        raise ValueError(f"samples is {samples}: it must be at least 1, or None for the whole training set")
    config = PROBLEMS[name]
    sizes = config.samples, config.held_out
    if samples is not None:
        sizes = min(samples, sizes[0]), min(samples, sizes[1])
    train, held_out = sources.load(config.source, data, sizes, config.length)
    if config.network == "autoencoder":
        train, held_out = train[:1], held_out[:1]
    loss, error, error_name = _measures(config)
    return Problem(
        name,
        train,
        held_out,
        _maker(config, train[0]),
        loss,
        error,
        error_name,
        config.batch_size,
        config.weight_decay,
        config.evaluated,
        text.facts() if config.source == "text" else {},
    )


def _measures(config: Config) -> tuple[Loss, Loss, str]:
    if config.network == "autoencoder":
        return losses.cross_entropy, losses.squared_error, "squared error"
    if config.source == "text":
        return losses.next_entropy, losses.mistaken, "classification error, %"
    if config.source == "adding":
        return losses.mean_square, losses.missed, "classification error, %"
    return losses.class_entropy, losses.misclassified, "classification error, %"


def _maker(config: Config, inputs: Tensor) -> Callable[[int], nn.Module]:
    if config.network == "autoencoder":
        return functools.partial(autoencoder, config.widths)
    if config.network == "classifier":
        return functools.partial(dense, config.widths)
    if config.network == "pretrained":
        return functools.partial(pretraining.classifier, config.widths, inputs=inputs, epochs=config.epochs)
    if config.network == "conv":
        return functools.partial(convolutional, config.widths[-1])
    if config.network == "lstm":
        return functools.partial(usual, functools.partial(CharLSTM, *config.widths))
    if config.network == "transformer":
        vocabulary, width = config.widths
        return functools.partial(usual, functools.partial(CharTransformer, vocabulary, width, config.length))
    return functools.partial(recurrent.LastOfRNN, *config.widths)
