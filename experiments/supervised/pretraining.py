"""Weights from a stack of restricted Boltzmann machines: Hinton & Salakhutdinov (2006), their published settings.

CD-1 in batches of 100; binary states of hidden units in the positive phase, probabilities everywhere else; rate 0.1,
weight cost 2e-4 (not of biases), momentum 0.5 and from the sixth epoch 0.9; weights start as N(0, 0.1²), biases as 0;
50 epochs a layer unless set otherwise.

Deviations: cases are in a new order in every epoch; the next layer is given the probabilities that the finished weights
yield, not those met during the last epoch.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.supervised.networks import linear

BATCH, RATE, WEIGHT_COST, SPREAD = 100, 0.1, 2e-4, 0.1
MOMENTA = (0.5, 0.9)
SWITCH = 5  # epochs at the first of these


def classifier(widths: Sequence[int], seed: int, *, inputs: Tensor, epochs: int) -> nn.Sequential:
    """Sigmoid layers with the weights of the stack, and a last layer of N(0, 0.1²) that puts logits out.

    Minutes the first time; the weights are then kept in the user's cache directory.

    Raises:
        ValueError: epochs is not positive, or the kept weights cannot be read.
    """
    if epochs < 1:
        raise ValueError(f"epochs is {epochs}: it must be at least 1 (the row mnist-class is without pretraining)")
    weights = _kept(widths[:-1], seed, inputs, epochs)
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for i, (m, n) in enumerate(itertools.pairwise(widths)):
        layer = linear(m, n)
        with torch.no_grad():
            if i < len(widths) - 2:
                layer.weight.copy_(weights[2 * i])
                layer.bias.copy_(weights[2 * i + 1])
            else:
                layer.weight.copy_(SPREAD * torch.randn(n, m, generator=generator))
        layers += [layer, nn.Sigmoid()]
    return nn.Sequential(*layers[:-1])


def cache_directory() -> Path:
    """Where what takes minutes to compute is kept: $XDG_CACHE_HOME/krylov-descent, by default below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "krylov-descent"


def _kept(widths: Sequence[int], seed: int, inputs: Tensor, epochs: int) -> list[Tensor]:
    """The stack's weights, from the cache if it has them."""
    name = f"rbm-{'-'.join(map(str, widths))}-samples{len(inputs)}-epochs{epochs}-seed{seed}.pt"
    path = cache_directory() / name
    if path.is_file():
        try:
            weights: list[Tensor] = torch.load(path, weights_only=True)
        except Exception as error:
            raise ValueError(f"the pretrained weights in {path} cannot be read ({error}): remove the file") from error
        return weights
    weights = stack(widths, seed, inputs, epochs)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")  # a run that is stopped while it writes leaves no half of a file
    torch.save(weights, partial)
    partial.replace(path)
    return weights


def stack(widths: Sequence[int], seed: int, inputs: Tensor, epochs: int) -> list[Tensor]:
    """Weight [n, m] and hidden bias [n] of each layer, the first layer's first."""
    generator = torch.Generator().manual_seed(seed)
    rounds = _shown([(layer, epoch) for layer in range(len(widths) - 1) for epoch in range(epochs)])
    found: list[Tensor] = []
    data = inputs
    machine = Machine(widths[0], widths[1], generator)
    for layer, epoch in rounds:
        if epoch == 0 and layer > 0:
            data = machine.hidden(data)
            machine = Machine(widths[layer], widths[layer + 1], generator)
        machine.epoch(data, MOMENTA[epoch >= SWITCH])
        if epoch == epochs - 1:
            found += [machine.weight.T.contiguous(), machine.hidden_bias]
    return found


class Machine:
    """One restricted Boltzmann machine with its velocities; weight is [visible, hidden]."""

    def __init__(self, visible: int, hidden: int, generator: torch.Generator) -> None:
        self.generator = generator
        self.weight = SPREAD * torch.randn(visible, hidden, generator=generator)
        self.visible_bias, self.hidden_bias = torch.zeros(visible), torch.zeros(hidden)
        self._parameters = (self.weight, self.visible_bias, self.hidden_bias)
        self._velocities = [torch.zeros_like(parameter) for parameter in self._parameters]

    def hidden(self, visible: Tensor) -> Tensor:
        """Probabilities of the hidden units."""
        return torch.sigmoid(torch.addmm(self.hidden_bias, visible, self.weight))

    def visible(self, hidden: Tensor) -> Tensor:
        """Probabilities of the visible units."""
        return torch.sigmoid(torch.addmm(self.visible_bias, hidden, self.weight.T))

    def epoch(self, data: Tensor, momentum: float) -> None:
        """One pass of contrastive divergence over the data."""
        for chosen in torch.split(torch.randperm(len(data), generator=self.generator), BATCH):
            self._update(data[chosen], momentum)

    def _update(self, data: Tensor, momentum: float) -> None:
        hidden = self.hidden(data)
        states = torch.bernoulli(hidden, generator=self.generator)
        again = self.visible(states)
        answer = self.hidden(again)
        products, visibles, hiddens = self._velocities
        step = RATE / len(data)
        products.mul_(momentum).addmm_(data.T, hidden, alpha=step).addmm_(again.T, answer, alpha=-step)
        products.sub_(self.weight, alpha=RATE * WEIGHT_COST)
        visibles.mul_(momentum).add_((data - again).sum(0), alpha=step)
        hiddens.mul_(momentum).add_((hidden - answer).sum(0), alpha=step)
        for parameter, velocity in zip(self._parameters, self._velocities, strict=True):
            parameter.add_(velocity)


def _shown(rounds: Sequence[Any]) -> Iterable[Any]:
    """With a bar, if tqdm is installed and somebody looks."""
    try:
        bar = importlib.import_module("tqdm").tqdm
    except ModuleNotFoundError:
        return rounds
    shown: Iterable[Any] = bar(rounds, desc="pretraining, layers × epochs", disable=None)
    return shown
