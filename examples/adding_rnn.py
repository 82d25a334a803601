"""Teach a plain tanh recurrent network to add two numbers that it saw up to 50 steps ago.

    python examples/adding_rnn.py                  # about three minutes on one core; writes adding.png

The adding problem of Hochreiter & Schmidhuber (1997): a sequence of random numbers, two of them marked; the answer is
their mean, and counts if it is within 0.04. The gradient must reach back over the whole sequence, which is why such
networks were given to second-order methods (Martens & Sutskever 2011). The recurrence is a loop over nn.Linear: nn.RNN
works too, but its second derivatives take three times as long.

Every run gets the same CPU seconds of this process (race.py). Adam, with mini-batches of 100 and gradients clipped to a
norm of 1, runs with each of three learning rates, decayed to 0, and the best of them counts.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import copy
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Subsets
from race import RATES, Curve, Stopwatch, minibatches, tuned_adam

LENGTH, BLUE, ORANGE = 50, "#0072B2", "#D55E00"


def adding(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """[n, LENGTH, 2] numbers and marks, one mark in the first tenth, one before the middle; [n, 1] answers."""
    generator = torch.Generator().manual_seed(seed)
    numbers, marks = torch.rand(n, LENGTH, generator=generator), torch.zeros(n, LENGTH)
    for low, high in ((0, LENGTH // 10), (LENGTH // 10, LENGTH // 2)):
        marks.scatter_(1, torch.randint(low, high, (n, 1), generator=generator), 1.0)
    return torch.stack([numbers, marks], 2), (numbers * marks).sum(1, keepdim=True) / 2


class Recurrent(nn.Module):
    """h ← tanh(W h + U x + b), and an answer from the last h."""

    def __init__(self, input_scale: float, hidden: int = 40) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(2, hidden), nn.Linear(hidden, 1)
        self.recurrent = nn.Linear(hidden, hidden, bias=False)
        nn.init.orthogonal_(self.recurrent.weight)
        nn.init.normal_(self.input.weight, std=input_scale)  # not large, or inputs drown what is remembered
        nn.init.zeros_(self.input.bias)

    def states(self, x: Tensor) -> list[Tensor]:
        """[n, T, 2] → T times [n, hidden]."""
        h = [torch.zeros(len(x), self.recurrent.in_features)]
        for driven in self.input(x).unbind(1):
            h.append(torch.tanh(driven + self.recurrent(h[-1])))
        return h[1:]

    def forward(self, x: Tensor) -> Tensor:
        """[n, T, 2] → [n, 1]."""
        answer: Tensor = self.output(self.states(x)[-1])
        return answer


def main() -> None:
    """Train, compare, draw."""
    parser = argparse.ArgumentParser(description="The adding problem: KSD against Adam.")
    parser.add_argument("--seconds", type=float, default=45, help="CPU seconds for each of four runs (%(default)s)")
    parser.add_argument("--max-steps", type=int, help="end KSD after so many steps; Adam gets the seconds it took")
    parser.add_argument("--samples", type=int, default=5000, help="sequences to train with (%(default)s)")
    parser.add_argument("--input-scale", type=float, default=0.2, help="of the first input weights (%(default)s)")
    parser.add_argument("--out", default="adding.png")
    given = parser.parse_args()
    train, (inputs, answers) = adding(given.samples, seed=0), adding(2000, seed=1)
    torch.manual_seed(0)
    model = Recurrent(given.input_scale)
    start = copy.deepcopy(model.state_dict())

    def closure(batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        answer = model(x)
        return (answer - y).square().mean(), answer  # the loss, and the model outputs

    def answered() -> Tensor:
        with torch.no_grad():
            answer: Tensor = model(inputs)
        return answer

    def wrong() -> float:
        return float(((answered() - answers).abs() > 0.04).double().mean())

    flow = {"before": gradient_flow(model, inputs, answers)}
    optimizer = KSD(model.parameters(), krylov_dim=40)
    sets = Subsets(train, batch_size=1000, fraction=0.1, seed=0)  # gradient on all, curvature and search on 500 each
    ksd = Stopwatch(wrong)
    for report in optimizer.run(closure, sets, max_steps=given.max_steps):
        if report.iteration % 5 == 0:
            print(report, flush=True)
        if ksd.mark() >= given.seconds:
            break
    ksd.mark()
    flow["after"], given_answers = gradient_flow(model, inputs, answers), answered()

    model.load_state_dict(start)
    stream = minibatches(train, 100)
    rate, adam = tuned_adam(model, lambda: closure(next(stream))[0], wrong, ksd.seconds, clip=1.0)
    draw(given.out, {"KSD": ksd.curve, f"Adam, learning rate {rate:g}": adam.curve}, answers, given_answers, flow)
    print(
        f"adding problem, T = {LENGTH}: {1 - ksd.last:.1%} of answers correct with KSD (90 % {first(ksd.curve)}), "
        f"{1 - adam.last:.1%} with Adam (90 % {first(adam.curve)}; learning rate {rate:g}, the best of {len(RATES)}), "
        f"after {ksd.seconds:.0f} CPU seconds each."
    )


def first(curve: Curve) -> str:
    """When nine of ten answers were correct."""
    times = [seconds for seconds, wrong in curve if wrong <= 0.1]
    return f"after {times[0]:.0f}" if times else "not reached"


def gradient_flow(model: Recurrent, x: Tensor, y: Tensor) -> list[float]:
    """The loss's gradient with respect to the state at every time, relative to that at the last."""
    h = model.states(x[:200])
    loss = (model.output(h[-1]) - y[:200]).square().mean()
    norms = torch.stack([g.norm() for g in torch.autograd.grad(loss, h)])
    relative: list[float] = (norms / norms[-1]).tolist()
    return relative


def draw(
    out: str, curves: dict[str, Curve], answers: Tensor, given_answers: Tensor, flow: dict[str, list[float]]
) -> None:
    """Success over time, answers, and how far gradients reach back."""
    figure, (over_time, scatter, back) = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained")
    for (name, curve), colour, dashes in zip(curves.items(), (BLUE, ORANGE), ("-", "--"), strict=True):
        seconds, wrong = zip(*curve, strict=True)
        over_time.plot(seconds, [100 * (1 - share) for share in wrong], dashes, color=colour, label=name)
    over_time.set(title="held-out answers within 0.04 [%]", xlabel="CPU seconds", ylim=(-27, 102))
    over_time.set_yticks(range(0, 101, 20))
    scatter.axline((0, 0), slope=1, color="0.7")
    scatter.plot(answers, given_answers, ".", markersize=2, color=BLUE)
    scatter.set(title="answers with KSD", xlabel="right", ylabel="given", aspect="equal", xlim=(0, 1), ylim=(0, 1))
    for (name, norms), colour in zip(flow.items(), ("0.6", BLUE), strict=True):
        back.semilogy(range(1, LENGTH + 1), norms, color=colour, label=f"{name} training with KSD")
    back.set(title="gradient that reaches the state at t, ÷ at T", xlabel="t", ylim=(1e-3, 20))
    for axis in (over_time, back):
        axis.legend(frameon=False, loc="lower right")
    for axis in (over_time, scatter, back):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main()
