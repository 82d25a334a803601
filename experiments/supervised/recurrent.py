"""Long-range tasks of Hochreiter & Schmidhuber (1997), and a tanh network for them as of Martens & Sutskever (2011).

Lengths are fixed, and positions scale with T: what is written for T = 100 is multiplied by T/100.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.supervised.networks import linear, sparse_

RADIUS = 1.1  # spectral radius of the recurrent matrix: Sutskever, Martens, Dahl & Hinton 2013, section 4
# Of the 15 N(0,1) weights into hidden units and outputs. With 1 and 1 inputs drown what is remembered: order at T = 50
# stays at chance where 0.1 and 0.1 leave 2 % of errors after as long; adding is learnt sooner still at 0.01 (one seed).
INPUT_SCALE, OUTPUT_SCALE = 0.01, 0.1
DISTRACTORS, CUES = 4, 2  # symbols a..d, then A and B


class LastOfRNN(nn.Module):
    """A tanh network that answers by its last state; sparsely initialised, zero biases.

    A loop, and not nn.RNN, whose second derivatives take three times as long.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.input = linear(inputs, hidden)
        self.recurrent = linear(hidden, hidden, bias=False)
        self.output = linear(hidden, outputs)
        for layer in (self.input, self.recurrent, self.output):
            sparse_(layer.weight, generator)
        radius = float(torch.linalg.eigvals(self.recurrent.weight.detach().double()).abs().max())
        with torch.no_grad():
            self.input.weight *= INPUT_SCALE
            self.recurrent.weight *= RADIUS / radius
            self.output.weight *= OUTPUT_SCALE

    def forward(self, x: Tensor) -> Tensor:
        """[n, T, inputs] → [n, outputs]."""
        drive = self.input(x).unbind(1)
        h = torch.tanh(drive[0])
        for u in drive[1:]:
            h = torch.tanh(u + self.recurrent(h))
        z: Tensor = self.output(h)
        return z


def adding(n: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """[n, T, 2] numbers in [0, 1] and marks, [n, 1] the mean of the two marked numbers.

    The first mark is in [1, 10), the second in [10, 50). The mean and not the sum, so that targets fill an interval of
    length 1 as those of Hochreiter & Schmidhuber do, for whom 0.04 was set.
    """
    drawn = _drawn(n, length + 2, seed)
    numbers = drawn[:, :length].float()
    marks = torch.zeros(n, length)
    marks.scatter_(1, _between(drawn[:, length:-1], 1, length // 10), 1.0)
    marks.scatter_(1, _between(drawn[:, -1:], length // 10, length // 2), 1.0)
    return torch.stack([numbers, marks], 2), (numbers * marks).sum(1, keepdim=True) / 2


def order(n: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """[n, T, 6] one-hot symbols, [n] which of AA, AB, BA, BB came: cues in [10, 20) and [50, 60) among distractors."""
    drawn = _drawn(n, length + 4, seed)
    symbols = _between(drawn[:, :length], 0, DISTRACTORS)
    cues = _between(drawn[:, length : length + 2], 0, CUES)
    symbols.scatter_(1, _between(drawn[:, -2:-1], length // 10, length // 5), DISTRACTORS + cues[:, :1])
    symbols.scatter_(1, _between(drawn[:, -1:], length // 2, length * 6 // 10), DISTRACTORS + cues[:, 1:])
    return nn.functional.one_hot(symbols, DISTRACTORS + CUES).float(), CUES * cues[:, 0] + cues[:, 1]


def _drawn(n: int, each: int, seed: int) -> Tensor:
    """Row by row, so that the first sequences of a larger set are those of a smaller one."""
    return torch.rand(n, each, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _between(drawn: Tensor, low: int, high: int) -> Tensor:
    """Whole numbers from low, below high."""
    return low + (drawn * (high - low)).long()
